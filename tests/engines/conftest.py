"""Engines for the contract suite. Each test that takes `engine` or `start` runs on every engine named here."""

import copy
from collections.abc import Callable, Iterator

import pytest

import tiny
from steerscope.engines.facade import SyncEngine
from steerscope.engines.hf import HFEngine

ENGINES = ("hf",)
Start = Callable[..., SyncEngine]


@pytest.fixture(params=ENGINES)
def start() -> Iterator[Start]:
    """Starts an engine on a tiny model; all are closed when the test ends."""
    running: list[SyncEngine] = []

    def begin(architecture: str = "llama", tokenizer: str = "bytes", **options: object) -> SyncEngine:
        model_options = {k: options.pop(k) for k in ("layers", "seed", "max_position_embeddings") if k in options}
        model = tiny.model(architecture, **model_options)  # type: ignore[arg-type]
        if dtype := options.pop("dtype", None):
            model = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]
        engine = HFEngine(model, tiny.tokenizer(tokenizer), name=architecture, **options).sync  # type: ignore[arg-type]
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.close()


@pytest.fixture
def engine(start: Start) -> SyncEngine:
    return start()
