"""Requests beside a training run: the engine takes turns, and neither changes the other."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.results import Generation
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import EngineClosed, SteerscopeError
from steerscope.training import passes as passes_module
from steerscope.training.settings import TrainSettings
from steerscope.training.texts import Completion, TrainingSet
from steerscope.training.vectors import train
from support import tiny
from support.reference import distance
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out
ANIMALS = ("fox", "dog", "week", "time", "world", "beach")
TEXTS = tuple(Completion(prompt=f"The {one} ", response="jumps over the lazy dog again.") for one in ANIMALS)
DATA = TrainingSet("jumps", TEXTS[:4], TEXTS[4:], prompts=())
# Two layers, so that blocks before the ops are left out and blocks behind them are computed again.
RUN = TrainSettings(layers=(1, 2), rank=1, epochs=6, batch=1, learning_rate=0.3, gradient_checkpointing=True)
PROMPT, LONG = "The quick brown fox jumps over", Sampling(max_tokens=60, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[HFEngine]:
    made = HFEngine(tiny.model(), tiny.tokenizer(), name="tiny")
    yield made
    made.sync.close()


def asked(engine: HFEngine) -> list[Generation]:
    push = Add(vector=torch.ones(64).numpy(), scale=0.3, layers=1)
    return engine.sync.generate([PROMPT, "Hello"], LONG, steer=[None, push], capture=Capture(layers="1-3"))


def same(found: list[Generation], wanted: list[Generation]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert all(distance(rows, theirs.rows[key]) < 1e-5 for key, rows in mine.rows.items())


def test_requests_beside_a_training_run_are_plain_and_so_is_the_run(engine: HFEngine, tmp_path: Path) -> None:
    wanted = asked(engine)
    alone = train(engine.sync, DATA, tmp_path / "alone", RUN)
    found: list[list[Generation]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            found.append(asked(engine))

    thread = threading.Thread(target=ask)
    thread.start()
    beside = train(engine.sync, DATA, tmp_path / "beside", RUN)
    over.set()
    thread.join(timeout=HUNG_S)
    assert found
    for one in found:
        same(one, wanted)
    assert beside.result == alone.result
    assert all(torch.equal(beside.vector[layer], alone.vector[layer]) for layer in RUN.layers)


def test_what_is_told_of_a_step_may_ask_the_engine(engine: HFEngine, tmp_path: Path) -> None:
    wanted, texts = engine.sync.generate(PROMPT, LONG).text, []
    train(engine.sync, DATA, tmp_path / "a", RUN, told=lambda *_: texts.append(engine.sync.generate(PROMPT, LONG).text))
    assert set(texts) == {wanted}
    assert len(texts) == 24


@pytest.mark.parametrize("error", [SteerscopeError("broken"), KeyboardInterrupt()])
def test_the_engine_is_as_it_was_when_a_step_of_training_fails(
    engine: HFEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    wanted, free = asked(engine), [parameter.requires_grad for parameter in engine.model.parameters()]
    calls: list[int] = []
    real = passes_module.cross_entropy

    def broken(*arguments: object, **more: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 8:
            raise error
        return real(*arguments, **more)  # type: ignore[arg-type]

    if isinstance(error, KeyboardInterrupt):  # it comes in the thread that trains, between two forwards

        def told(*_: object) -> None:
            raise error

    else:
        told = None
        monkeypatch.setattr(passes_module, "cross_entropy", broken)
    with pytest.raises(type(error)):
        train(engine.sync, DATA, tmp_path / "a", RUN, told=told)
    same(asked(engine), wanted)
    assert [parameter.requires_grad for parameter in engine.model.parameters()] == free
    assert not any(module.training for module in engine.model.modules())
    assert not any("forward" in module.__dict__ for module in engine.model.modules())


def test_an_engine_that_was_closed_does_not_train(engine: HFEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineClosed, match="load it again"):
        train(engine.sync, DATA, tmp_path / "a", RUN, told=lambda *_: engine.sync.close())
