"""Requests that wait: which of them may be overtaken, and what a fault in another request's step does to them."""

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from engines.conftest import HAS_VLLM, saved, start_vllm
from steerscope.engines.results import EndEvent, Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm.worker.device import RowPool
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import EngineClosed, RequestFailed
from support.waiting import HUNG_S

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
LONG, SHORT = Sampling(max_tokens=150, ignore_eos=True), Sampling(max_tokens=6, ignore_eos=True)
PROMPT = TokenPrompt([20 + i for i in range(70)])  # two blocks of the prefix cache, and a part of one
BATCH = 2
PUSHES = [Add(vector=np.eye(64, dtype=np.float32)[i], scale=2, layers=1) for i in range(4)]
FIRST, SECOND, *_ = PUSHES


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    """With places for two requests, and room for one vector."""
    options: dict[str, object] = {"sites": ("resid_post",), "max_batch": BATCH, "slots": 2}
    started = start_vllm(saved("llama", "bytes", None, {}), "llama", options)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: SyncEngine) -> Iterator[None]:
    yield
    if engine.aio.closed:
        return
    gc.collect()
    engine.generate(TokenPrompt([9]), SHORT)
    found = engine.stats()
    assert not any(found[name] for name in ("running", "waiting", "slots_in_use", "capture_bytes", "worker_requests"))


def broken_steps(monkeypatch: pytest.MonkeyPatch, *which: int) -> None:
    """These of the steps that follow fail before their forward."""
    count, copy_some = iter(range(1 << 30)), RowPool.copy_some

    def pumped(self: RowPool, tokens: int) -> None:
        if next(count) in which:
            raise MemoryError("no room for a step")
        copy_some(self, tokens)

    monkeypatch.setattr(RowPool, "copy_some", pumped)


async def begun(engine: SyncEngine, steer: Add | None = None) -> "asyncio.Task[Generation]":
    """A long text whose first token is there."""
    there = asyncio.Event()

    async def run() -> Generation:
        async for event in engine.aio.stream(PROMPT, LONG, steer=steer):
            there.set()
            if isinstance(event, EndEvent):
                return event.generation
        raise AssertionError("a stream without an end")

    task = asyncio.ensure_future(run())
    task.add_done_callback(lambda _: there.set())
    await asyncio.wait_for(there.wait(), HUNG_S)
    return task


def test_a_fault_in_a_step_spares_the_requests_of_vllms_queue(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they get nothing from the prefix cache that the step should have put there: all have the same prompt."""
    wanted = engine.generate(PROMPT, SHORT, capture=Capture())
    assert engine.aio._llm.reset_prefix_cache()  # type: ignore[attr-defined]
    broken_steps(monkeypatch, 0)
    with pytest.raises(RequestFailed, match="no room for a step") as failure:
        engine.generate([PROMPT] * 5, SHORT, capture=[Capture(tokens="generated")] * 4 + [None])
    done = failure.value.completed
    assert [one is not None for one in done] == [False] * BATCH + [True] * 3
    for one in done[BATCH:]:
        assert one is not None
        assert one.token_ids == wanted.token_ids
        if one.capture is not None:
            assert np.allclose(one.rows[3].numpy(), wanted.rows[3][len(PROMPT.token_ids) :].numpy(), atol=1e-5)
            one.capture.close()
    assert wanted.capture is not None
    wanted.capture.close()


def test_a_fault_in_a_step_spares_a_request_that_waits_for_a_slot(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = engine.generate(PROMPT, SHORT, steer=SECOND).token_ids
    broken_steps(monkeypatch, 20)

    async def run() -> list[int]:
        holder = await begun(engine, FIRST)
        done = await asyncio.wait_for(engine.aio.generate(PROMPT, SHORT, steer=SECOND), HUNG_S)
        with pytest.raises(RequestFailed, match="no room for a step"):
            await holder
        return done.token_ids

    assert asyncio.run(run()) == wanted


def test_steps_that_fail_leave_no_cells_taken(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a prompt have cells before the first layer runs."""
    from steerscope.engines.vllm.worker import worker

    def broken(*_: object) -> None:
        raise MemoryError("no room for a layer")

    (taps,) = (one for one in worker.LOCAL_WORKERS if one.runner.vllm_config is engine.aio._llm.vllm_config)  # type: ignore[attr-defined]
    monkeypatch.setattr("steerscope.engines.vllm.worker.tap._store_watched_rows", broken)
    with pytest.raises(RequestFailed, match="no room for a layer"):
        engine.generate(PROMPT, SHORT, capture=Capture())
    monkeypatch.undo()
    engine.generate(PROMPT, SHORT)  # the workers hear of an end with the next step
    cells = len(taps.pool.cells) - len(taps.step_index.index)
    assert taps.pool.take(cells) == 0
    taps.pool.give(0, cells)


def test_a_fault_behind_the_forward_is_survived(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's runner refuses a step while the forward of another one waits to be sampled."""
    wanted = engine.generate(PROMPT, SHORT).token_ids

    @contextlib.contextmanager
    def fails_behind(_mode: object) -> Iterator[None]:
        yield
        raise RuntimeError("a fault behind the forward")

    monkeypatch.setattr("steerscope.engines.vllm.worker.worker.launch_mode", fails_behind)
    with pytest.raises(RequestFailed, match="a fault behind the forward"):
        engine.generate(PROMPT, SHORT)
    monkeypatch.undo()
    assert engine.generate(PROMPT, SHORT).token_ids == wanted


def test_an_engine_whose_every_step_fails_refuses_what_waits_with_the_reason(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this file: the engine is beyond help then."""
    broken_steps(monkeypatch, *range(1000))

    async def run() -> list[object]:
        each = [PUSHES[i // BATCH] for i in range(4 * BATCH)]  # those of one vector run together
        asked = [engine.aio.generate(PROMPT, SHORT, steer=steer) for steer in each]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HUNG_S)

    found = asyncio.run(run())
    assert all(isinstance(one, RequestFailed) for one in found)
    in_a_step, waiting = "a step of llama failed: no room", "llama failed before this request began: no room"
    assert [in_a_step in str(one) for one in found] == [True] * 3 * BATCH + [False] * BATCH
    assert [waiting in str(one) for one in found] == [False] * 3 * BATCH + [True] * BATCH
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT, SHORT)
