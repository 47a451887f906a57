"""One way in: a name, a directory or a hub id → a running engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from steerscope.engines.base import Engine
from steerscope.engines.facade import SyncEngine
from steerscope.models import resolve


def load_engine(
    model: str | Path,
    *,
    engine: Literal["hf"] = "hf",
    device: str | None = None,
    dtype: str | None = None,
    max_batch: int = 32,
    max_columns: int = 16,
    capture_budget: int = 4 << 30,
    progress: Callable[[str], None] | None = None,
) -> Engine:
    """The async engine. `smollm2-135m` is the embedded default; a directory or a hub id works the same way."""
    from steerscope.engines.hf import HFEngine

    del engine  # one so far
    found = resolve(str(model), progress=progress)
    return HFEngine.from_pretrained(
        found,
        device=device,
        dtype=dtype,
        name=str(model),
        max_batch=max_batch,
        max_columns=max_columns,
        capture_budget=capture_budget,
    )


def load(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    max_batch: int = 32,
    max_columns: int = 16,
    capture_budget: int = 4 << 30,
    progress: Callable[[str], None] | None = None,
) -> SyncEngine:
    """The engine for code without await; `load(...).aio` is the async one."""
    return load_engine(
        model,
        device=device,
        dtype=dtype,
        max_batch=max_batch,
        max_columns=max_columns,
        capture_budget=capture_budget,
        progress=progress,
    ).sync
