"""One way in: a name, a directory or a hub id → a running engine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from steerscope.engines.base import Engine
from steerscope.engines.facade import SyncEngine
from steerscope.models import resolve
from steerscope.specs.errors import InvalidRequest, Problem


class LoadOptions(TypedDict, total=False):
    """What can be said about an engine before it starts."""

    engine: Literal["hf", "vllm"]  # transformers, or vLLM where it is installed
    device: str | None  # hf only
    dtype: str | None
    max_batch: int  # requests that run at once
    max_columns: int  # ops of one token at one site
    capture_budget: int  # bytes of rows that may wait to be fetched
    progress: Callable[[str], None] | None
    taps: Mapping[str, Any]  # vllm only: settings of the taps (layers, sites, slots, …)
    vllm: Mapping[str, Any]  # vllm only: vLLM's own engine arguments


def load_engine(model: str | Path, **options: Unpack[LoadOptions]) -> Engine:
    """The async engine. `smollm2-135m` is the embedded default; a directory or a hub id works the same way."""
    kind, progress = options.pop("engine", "hf"), options.pop("progress", None)
    device, dtype = options.pop("device", None), options.pop("dtype", None)
    taps, vllm = options.pop("taps", {}), options.pop("vllm", {})
    problems = []
    if kind not in ("hf", "vllm"):
        problems.append(Problem("engine", f"{kind!r} is unknown", "choose hf or vllm"))
    if kind == "vllm" and device is not None:
        problems.append(Problem("device", "vLLM chooses it itself", "leave it out, or set CUDA_VISIBLE_DEVICES"))
    if kind == "hf" and (taps or vllm):
        problems.append(Problem("taps" if taps else "vllm", "is for the vLLM engine", "leave it out"))
    if problems:
        raise InvalidRequest(problems)
    if kind == "vllm":
        return _vllm(model, progress, dtype, taps, vllm, options)
    from steerscope.engines.hf import HFEngine

    found = resolve(str(model), progress=progress)
    return HFEngine.from_pretrained(found, device=device, dtype=dtype, name=str(model), **dict(options))  # type: ignore[arg-type]


def load(model: str | Path, **options: Unpack[LoadOptions]) -> SyncEngine:
    """The engine for code without await; `load(...).aio` is the async one."""
    return load_engine(model, **options).sync


def _vllm(
    model: str | Path,
    progress: Callable[[str], None] | None,
    dtype: str | None,
    taps: Mapping[str, Any],
    vllm: Mapping[str, Any],
    options: LoadOptions,
) -> Engine:
    from steerscope.engines.vllm.guards import check_version

    check_version()
    from steerscope.engines.vllm.engine import VLLMEngine
    from steerscope.engines.vllm.settings import Settings
    from steerscope.engines.vllm.starting import usable_dtype

    columns = {"max_columns": options.pop("max_columns")} if "max_columns" in options else {}
    settings = Settings.parse({**taps, **columns})
    dtype = dtype or usable_dtype()
    given: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if "max_batch" in options:
        given["max_num_seqs"] = options.pop("max_batch")
    found = resolve(str(model), progress=progress)
    return VLLMEngine(found, name=str(model), settings=settings, **options, **{**given, **vllm})
