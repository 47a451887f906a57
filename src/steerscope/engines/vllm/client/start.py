"""Starting a vLLM engine: its arguments, tokenizer, dtype and end tokens, and a thread that watches its core."""

import os
import platform
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from steerscope.engines.vllm import plugin
from steerscope.engines.vllm.settings import VLLMSettings, asked_for, smallest_pool
from steerscope.specs.errors import ModelNotFound, SteerscopeError, first_line, problems_of

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_LEAST_TOKENS = 2048  # of a step, vLLM's default for devices with little memory
_POOL_PART = 20  # the rows of one step take at most this part of a device's memory


def start_vllm(
    model: str | Path, name: str, settings: VLLMSettings, options: dict[str, Any]
) -> "tuple[LLMEngine, VLLMSettings]":
    """Start vLLM with the defaults of its server, and return it and the settings with all sizes filled in."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    plugin.register()
    extra = {**options.pop("additional_config", {}), **settings.additional_config()}
    defaults = {"disable_log_stats": not options.get("otlp_traces_endpoint")}  # traces are made of statistics
    server = UsageContext.OPENAI_API_SERVER  # without it vLLM runs 128 sequences, of 2,048 tokens in a step
    try:
        args = EngineArgs(model=str(model), additional_config=extra, **{**defaults, **options})
        if options.get("max_num_batched_tokens") is None:
            args.max_num_batched_tokens = batched_tokens(args.create_engine_config(server))
        with plugin.followed():
            llm = LLMEngine.from_engine_args(args, server)
    except SteerscopeError:
        raise
    except Exception as error:
        raise ModelNotFound(f"vLLM cannot start {name}: {reason_of(error)}") from error
    found = asked_for(llm.vllm_config)
    assert found is not None
    return llm, found


def batched_tokens(config: Any) -> int:
    """Return the tokens of a step that vLLM chose by itself, halved until their rows fit `pool_bytes` or a small part
    of the device's memory: of a large model, all layers of 8,192 tokens would leave little for keys and values."""
    from vllm.platforms import current_platform

    scheduler = config.scheduler_config
    model = config.model_config
    settings = asked_for(config)
    tokens = scheduler.max_num_batched_tokens
    least = max(_LEAST_TOKENS, scheduler.max_num_seqs)
    if settings is None or not settings.capture or not scheduler.enable_chunked_prefill:
        return tokens
    row_bytes = model.get_hidden_size() * model.dtype.itemsize
    taps = len(settings.keys(model.hf_text_config.num_hidden_layers))
    limit = settings.pool_bytes or current_platform.get_device_total_memory() // _POOL_PART
    while tokens > least and row_bytes * (taps * smallest_pool(tokens, scheduler.max_num_seqs)[1] + tokens) > limit:
        tokens = max(least, tokens // 2)
    return tokens


def tokenizer_of(model: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:
        raise ModelNotFound(f"no tokenizer can be loaded for {model}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """One line; of a refused configuration what was wrong with it, not how many things were."""
    if isinstance(error, ValidationError):
        return "; ".join(map(str, problems_of(error)))
    return first_line(error)


def has_bf16() -> bool:
    """vLLM's CPU kernels for ARM use its bf16 instructions without looking whether they are there."""
    return platform.machine() != "aarch64" or "bf16" in Path("/proc/cpuinfo").read_text()


def usable_dtype() -> str | None:
    """Return the default dtype; None: the model's own."""
    from vllm.platforms import current_platform

    return "float32" if current_platform.is_cpu() and not has_bf16() else None


def device_of_workers() -> torch.device:
    from vllm.platforms import current_platform

    return torch.device("cpu" if current_platform.is_cpu() else "cuda")


def share_of_memory() -> dict[str, float]:
    """On a CPU, half of what is free: vLLM's own default takes 0.92 of the machine, and does not start with less."""
    import psutil
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return {}
    memory = psutil.virtual_memory()
    return {"gpu_memory_utilization": round(0.5 * memory.available / memory.total, 3)}


def mode_of(config: Any) -> str:
    """How the forward runs: eager, compiled, or compiled and replayed from graphs."""
    compilation = config.compilation_config
    graphs = getattr(compilation.cudagraph_mode, "name", "NONE")
    compiled = getattr(compilation.mode, "name", str(compilation.mode))
    return "eager" if config.model_config.enforce_eager else f"compiled ({compiled}), CUDA graphs {graphs}"


def eos_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    found = config.model_config.try_get_generation_config().get("eos_token_id")
    if found is None:
        found = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    return frozenset(() if found is None else found if isinstance(found, list | tuple) else [found])


def watch_core(core: Any, thread: threading.Thread) -> None:
    """Raise in `thread` when the core is killed: vLLM's synchronous client would wait for it for ever."""
    if not hasattr(core, "outputs_queue"):  # it is in this process
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    def watch() -> None:
        while thread.is_alive():
            if core.resources.engine_dead:
                core.outputs_queue.put_nowait(EngineDeadError())
                for waiting in list(core.utility_results.values()):
                    if not waiting.done():
                        waiting.set_exception(EngineDeadError())
                return
            time.sleep(0.5)

    threading.Thread(target=watch, name="steerscope-watch", daemon=True).start()
