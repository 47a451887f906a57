"""Texts that end while others run: their last rows come with later steps, and no other request waits for them."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, reused_vllm
from steerscope.engines.results import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm.client.requests import VLLMText
from steerscope.engines.vllm.worker.device import RowPool
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import RequestFailed
from support.waiting import HUNG_S

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
LONG, SHORT = Sampling(max_tokens=120, ignore_eos=True), Sampling(max_tokens=5, ignore_eos=True)
ONE, OTHER = TokenPrompt([20 + i for i in range(40)]), TokenPrompt([90 + i for i in range(30)])


@pytest.fixture
def engine() -> Iterator[SyncEngine]:
    """With room for one vector."""
    options: dict[str, object] = {"sites": ("resid_post",), "max_batch": 4, "enable_prefix_caching": False, "slots": 2}
    yield from reused_vllm(options)


async def streamed(
    engine: SyncEngine,
    name: str,
    prompt: TokenPrompt,
    leave_at: int = 0,
    sampling: Sampling = LONG,
    steer: Add | None = None,
) -> Generation:
    """A text; its end cannot be foreseen if it is cancelled after `leave_at` tokens."""
    async for event in engine.aio.stream(prompt, sampling, steer=steer, capture=Capture(), request_id=name):
        if isinstance(event, EndEvent):
            return event.generation
        if isinstance(event, TokenEvent) and event.index + 1 == leave_at:
            engine.cancel(name)
    raise AssertionError("a stream without an end")


def asked_of(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the workers are asked from now on, and how many texts run then."""
    aio, asked = engine.aio, list[tuple[str, int]]()
    rpc: Any = aio._rpc  # type: ignore[attr-defined]

    def noted(name: str, *args: Any) -> Any:
        asked.append((name, len(aio._running)))  # type: ignore[attr-defined]
        return rpc(name, *args)

    monkeypatch.setattr(aio, "_rpc", noted)
    return asked


def test_whoever_ends_while_others_run_asks_nobody_for_rows_and_has_all(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.generate([ONE, OTHER], LONG, capture=Capture())
    asked = asked_of(engine, monkeypatch)

    async def both() -> list[Generation]:
        texts = [streamed(engine, "a", ONE), streamed(engine, "b", OTHER, leave_at=7), streamed(engine, "c", ONE, 23)]
        return list(await asyncio.wait_for(asyncio.gather(*texts), HUNG_S))

    done = asyncio.run(both())
    assert [one.finish_reason for one in done] == ["length", "cancelled", "cancelled"]
    assert not [name for name, running in asked if name == "finish" and running > 1]
    for one, wanted, prompt in zip(done, (whole[0], whole[1], whole[0]), (40, 30, 40), strict=True):
        count = len(one.token_ids)
        assert one.token_ids == wanted.token_ids[:count]
        for layer in one.rows.layers:
            assert len(one.rows[layer]) == prompt + count - 1
            torch.testing.assert_close(one.rows[layer], wanted.rows[layer][: len(one.rows[layer])])
    assert engine.stats()["running"] == 0


def test_the_last_one_asks_since_no_step_would_bring_its_rows(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of(engine, monkeypatch)
    done = asyncio.run(asyncio.wait_for(streamed(engine, "a", ONE, leave_at=9), HUNG_S))
    assert ("finish", 1) in asked
    assert done.rows.n == 40 + len(done.token_ids) - 1


def test_an_overflow_in_the_last_steps_is_told_though_nobody_foresaw_the_end(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU checks the overflow flags every few steps; here the text ends between two checks, and asks for one."""
    take_overflows = RowPool.take_overflows
    monkeypatch.setattr(RowPool, "take_overflows", lambda pool, wait=False: take_overflows(pool, wait) if wait else [])
    huge = Add(vector=np.full(engine.facts.hidden, 3e38, np.float32), scale=1.0, layers="all", tokens="positions=[50:]")

    async def both() -> tuple[Any, ...]:
        other = asyncio.ensure_future(streamed(engine, "a", ONE))
        steered = streamed(engine, "b", OTHER, leave_at=24, steer=huge)
        return tuple(await asyncio.wait_for(asyncio.gather(steered, other, return_exceptions=True), HUNG_S))

    failed, fine = asyncio.run(both())
    assert isinstance(failed, RequestFailed)
    assert "not finite" in str(failed)
    assert fine.rows.n == 40 + 119


@pytest.mark.parametrize("end", ["others", "close", "failure"])
def test_rows_that_do_not_come_hold_up_nobody_and_nobody_waits_for_them_for_ever(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """They are fetched when no request runs any more; an engine that fails names their requests."""
    wanted, lacks, closing = engine.generate(ONE, SHORT, capture=Capture()), VLLMText.lacks, threading.Event()
    aio: Any = engine.aio

    def never(self: VLLMText) -> Any:
        if self.name != "short":
            return lacks(self)
        if self.count == SHORT.max_tokens and aio._closing:
            closing.set()
        return "rows"

    monkeypatch.setattr(VLLMText, "lacks", never)
    found: dict[str, Generation | Exception] = {}

    def run(name: str, sampling: Sampling) -> None:
        try:
            found[name] = asyncio.run(streamed(engine, name, ONE, sampling=sampling))
        except Exception as error:
            found[name] = error
        closing.set()

    texts = {"long": LONG.model_copy(update={"max_tokens": 200}), "short": SHORT}
    threads = [threading.Thread(target=run, args=one) for one in texts.items()]
    for thread in threads:
        thread.start()
    assert closing.wait(HUNG_S)
    assert not found
    assert engine.stats()["running"] == 2
    if end == "close":
        engine.close()
    elif end == "failure":
        monkeypatch.setattr(aio.outputs, "step", lambda: 1 / 0)
    for thread in threads:
        thread.join(HUNG_S)
    short, long = found["short"], found["long"]
    if end == "failure":
        assert isinstance(short, RequestFailed)
        assert isinstance(long, RequestFailed)
        return
    assert isinstance(short, Generation)
    assert isinstance(long, Generation)
    assert (short.finish_reason, long.finish_reason) == ("length", "length" if end == "others" else "cancelled")
    assert torch.equal(short.rows[0], wanted.rows[0])
    assert long.rows.n == 40 + len(long.token_ids) - 1


def test_whoever_waits_for_a_slot_has_that_of_one_who_waits_for_rows_when_nobody_else_runs(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks, aio = VLLMText.lacks, cast("Any", engine.aio)
    monkeypatch.setattr(VLLMText, "lacks", lambda one: "rows" if one.name == "short" else lacks(one))
    size = engine.facts.hidden
    one, other = (Add(vector=np.eye(size, dtype=np.float32)[i], scale=0.1, layers="all") for i in (0, 1))

    async def all_three() -> list[Generation]:
        tasks = [
            asyncio.ensure_future(streamed(engine, "short", ONE, sampling=SHORT, steer=one)),
            asyncio.ensure_future(streamed(engine, "long", OTHER)),
        ]
        while not aio._closing:
            assert not tasks[1].done()
            await asyncio.sleep(0.001)
        tasks.append(asyncio.ensure_future(streamed(engine, "next", ONE, sampling=SHORT, steer=other)))
        while not aio._waiting:
            assert not tasks[1].done()
            await asyncio.sleep(0.001)
        engine.cancel("long")
        return list(await asyncio.gather(*tasks))

    done = asyncio.run(asyncio.wait_for(all_three(), HUNG_S))
    assert [text.finish_reason for text in done] == ["length", "cancelled", "length"]
    assert engine.stats()["slots_in_use"] == 0


def test_rows_that_will_never_come_are_asked_for_though_others_run(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers have left it, and said so: it fails alone, and at once."""
    from steerscope.engines.vllm.worker.delivery import Delivery

    copy = Delivery._copy

    def lost(self: Delivery, part: Any) -> None:
        if part.request.wire.name.startswith("lost"):
            self.drop(part)
        else:
            copy(self, part)

    monkeypatch.setattr(Delivery, "_copy", lost)
    asked = asked_of(engine, monkeypatch)

    async def both() -> tuple[Any, ...]:
        other = asyncio.ensure_future(streamed(engine, "a", ONE))
        lone = streamed(engine, "lost", OTHER, sampling=SHORT)
        return tuple(await asyncio.wait_for(asyncio.gather(lone, other, return_exceptions=True), HUNG_S))

    failed, fine = asyncio.run(both())
    assert isinstance(failed, RequestFailed)
    assert "did not arrive" in str(failed)
    assert ("finish", 1) in asked, "the other one still ran"
    assert fine.rows.n == 40 + 119
