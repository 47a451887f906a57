"""Engines for the contract suite. Each test that takes `engine` or `start` runs on every engine that is installed."""

import copy
import functools
import gc
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm.client.start import has_bf16
from steerscope.specs import Sampling
from steerscope.specs.steering import SITES, Site
from support import tiny

HAS_VLLM = importlib.util.find_spec("vllm") is not None
ENGINES = ("hf", *(("vllm",) if HAS_VLLM else ()))
# vLLM's own implementations of these are tapped (its generic transformers backend is not), without these sites: the
# layer has none, or it is no output of a single module.
ON_VLLM: dict[str, tuple[Site, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3"), ()),
    **dict.fromkeys(("exaone4", "exaone_moe", "glm4", "granite", "granitemoe", "hyperclovax", "minicpm3"), ()),
    **dict.fromkeys(("ministral3", "mixtral", "nemotron", "olmoe", "opt", "qwen2_moe", "stablelm"), ()),
    **dict.fromkeys(tiny.VISION_LANGUAGE, ()),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "gptj"), ("resid_mid",)),
    **dict.fromkeys(("gemma4_text", "granitemoehybrid"), ("mlp_out",)),
}
MODEL_OPTIONS = ("layers", "seed", "max_position_embeddings", "attn_logit_softcapping")
Start = Callable[..., SyncEngine]
CLEAN = ("running", "waiting", "failed", "slots_in_use", "capture_bytes", "worker_requests")  # all zero


@pytest.fixture(params=ENGINES)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts an engine on a tiny model; all are closed when the test ends. One of vLLM takes seconds to start: if a
    test had only one and leaves it as it was, the next gets the same if it asks for the same."""
    running: list[SyncEngine] = []
    asked: list[str] = []

    def begin(architecture: str = "llama", tokenizer: str = "bytes", **options: object) -> SyncEngine:
        asked.append(repr((architecture, tokenizer, sorted(options.items()))))
        model_options = {k: options.pop(k) for k in MODEL_OPTIONS if k in options}
        eos = options.pop("eos", None)
        if request.param == "vllm":
            if architecture not in ON_VLLM:
                pytest.skip("vLLM runs this architecture through its transformers backend")
            engine = _kept.pop(asked[-1], None) if len(asked) == 1 else None
            engine = engine or start_vllm(saved(architecture, tokenizer, eos, model_options), architecture, options)
        else:
            model = tiny.model(architecture, **model_options)  # type: ignore[arg-type]
            if dtype := options.pop("dtype", None):
                model = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]
            if eos:
                model = with_eos(model, eos)
            made = HFEngine(model, tiny.tokenizer(tokenizer), name=architecture, **options)  # type: ignore[arg-type]
            engine = made.sync
        running.append(engine)
        return engine

    yield begin
    if request.param == "vllm" and len(running) == 1 and _clean(running[0]):
        _kept[asked[0]] = running.pop()
    for engine in running:
        engine.close()


@pytest.fixture
def engine(start: Start) -> SyncEngine:
    """An engine with nothing special."""
    return start()


@pytest.fixture(scope="module", autouse=True)
def _until_the_end_of_a_file() -> Iterator[None]:
    yield
    close_kept()


_kept: dict[str, SyncEngine] = {}  # at most one, by what was asked for


def _clean(engine: SyncEngine) -> bool:
    aio = engine.aio
    if aio.closed or aio._vectors or aio._packs or aio.surrounding().ops:
        return False
    gc.collect()
    engine.generate(TokenPrompt([20]), Sampling(max_tokens=1))  # the workers hear of an end with the next step
    found = engine.stats()
    return not any(found[name] for name in CLEAN)


def reused_vllm(options: dict[str, object]) -> Iterator[SyncEngine]:
    """Yield the engine of the last test that had these options and left it as it was, or a new one."""
    asked = repr(sorted(options.items()))
    engine = _kept.pop(asked, None) or start_vllm(saved("llama", "bytes", None, {}), "llama", dict(options))
    yield engine
    if _clean(engine):
        _kept[asked] = engine
    else:
        engine.close()


def close_kept() -> None:
    """Close what is kept before another engine starts: the first that is closed takes vLLM's process groups away."""
    while _kept:
        _kept.popitem()[1].close()


# --- vLLM

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: a start takes seconds instead of half a minute
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def with_eos(model: PreTrainedModel, eos: object) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    assert changed.generation_config is not None
    changed.generation_config.eos_token_id = eos  # type: ignore[assignment]
    return changed


def saved(architecture: str, tokenizer: str, eos: object, model_options: dict[str, object]) -> Path:
    """The tiny model as a directory, made once per process."""
    key = "-".join(map(str, (architecture, tokenizer, eos, *sorted(model_options.items()))))
    folder = _scratch() / "".join(c if c.isalnum() else "_" for c in key)
    if not folder.exists():
        model = tiny.model(architecture, **model_options)  # type: ignore[arg-type]
        (with_eos(model, eos) if eos else model).save_pretrained(folder)
        tiny.tokenizer(tokenizer).save_pretrained(folder)
    return folder


def _scratch() -> Path:
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="steerscope-tiny-")
    return Path(_folder.name)


_folder: tempfile.TemporaryDirectory[str] | None = None


@functools.cache
def _settle_heap() -> None:
    """What is imported is no garbage. vLLM looks for garbage several times in the life of an engine, and at its end
    takes back what it had told the collector to pass over: most of the time that an engine takes here."""
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_model_runner  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@functools.cache
def register_without_torchvision(architecture: str) -> None:
    """Register vLLM's class of a vision-language model where torchvision is missing, whose PyPI builds do not load
    against CPU torch. vLLM's and transformers' modules of these models import it, and call it for images only."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm import ModelRegistry

    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
            patch.setitem(sys.modules, f"torchvision{name}", types.ModuleType(f"torchvision{name}"))
        module = importlib.import_module(f"vllm.model_executor.models.{architecture}")
    class_name = type(tiny.model(architecture)).__name__
    ModelRegistry.register_model(class_name, getattr(module, class_name))


def start_vllm(folder: Path, name: str, options: dict[str, object]) -> SyncEngine:
    close_kept()
    for variable, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    _settle_heap()
    from steerscope.engines.vllm.client.engine import VLLMEngine
    from steerscope.engines.vllm.settings import VLLMSettings

    if options.get("dtype") == torch.bfloat16 and not has_bf16():
        pytest.skip("this processor has no bf16")
    settings = {"max_columns": options.pop("max_columns", 16), "slots": options.pop("slots", 64)}
    lacking = ON_VLLM.get(name, ())
    settings |= {
        "sites": options.pop("sites", tuple(site for site in SITES if site not in lacking)),
        "layers": options.pop("tapped", "all"),
    }
    settings |= {"groups": options.pop("groups", 64)}
    defaults: dict[str, object] = {
        "dtype": str(options.pop("dtype", torch.float32)).removeprefix("torch."),
        "enforce_eager": True,
        "max_num_seqs": options.pop("max_batch", 32),
        "capture_budget": 64 << 20,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 32 << 20,
        "num_gpu_blocks_override": 512,  # the bytes are not heeded on a CPU: it would fill a gigabyte with zeros
        "block_size": 32,
    }
    if name in tiny.VISION_LANGUAGE:
        register_without_torchvision(name)
        defaults["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    made = VLLMEngine(folder, name=name, settings=VLLMSettings.parse(settings), **{**defaults, **options})  # type: ignore[arg-type]
    return made.sync
