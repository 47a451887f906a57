"""Requests that end early on vLLM: nothing of them stays, and no request reads their memory."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT, reused_vllm, saved, start_vllm
from engines.test_watching import PACK
from steerscope.engines.results import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.watch import Watch
from support.waiting import HUNG_S

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
LONG = TokenPrompt([20 + i % 200 for i in range(100)])
SAMPLING = Sampling(max_tokens=60, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[SyncEngine]:
    """One request at a time: the others wait inside vLLM, which the workers do not see."""
    options: dict[str, object] = {"sites": ("resid_post",), "max_batch": 1}
    options |= {"capture_budget": 4 << 20, "max_num_batched_tokens": 64}
    yield from reused_vllm(options)


async def streamed(engine: SyncEngine, name: str, capture: Capture | None) -> Generation:
    async for event in engine.aio.stream(LONG, SAMPLING, capture=capture, request_id=name):
        if isinstance(event, EndEvent):
            return event.generation
    raise AssertionError("a stream without an end")


async def cancelled_in_the_queue(engine: SyncEngine, captures: list[Capture]) -> list[Generation]:
    """One request runs, those that capture wait behind it inside vLLM and are cancelled there."""
    running: dict[str, object] = engine.aio._running  # type: ignore[attr-defined]
    first = asyncio.ensure_future(streamed(engine, "first", None))
    rest = [asyncio.ensure_future(streamed(engine, f"w{i}", capture)) for i, capture in enumerate(captures)]
    while len(running) <= len(captures):
        await asyncio.sleep(0.002)
    for i in range(len(captures)):
        engine.cancel(f"w{i}")
    done = await asyncio.gather(*rest)
    await first
    return done


def test_what_is_cancelled_before_a_worker_met_it_leaves_no_memory_taken(engine: SyncEngine) -> None:
    for _ in range(8):  # each wave asks for more than a third of the memory
        for one in asyncio.run(cancelled_in_the_queue(engine, [Capture()] * 7)):
            assert one.finish_reason == "cancelled"
            assert one.capture is not None
            one.capture.close()
        del one
        gc.collect()
        assert engine.stats()["capture_bytes"] == 0
    assert engine.generate(LONG, SAMPLING, capture=Capture()).rows.n == 159
    assert engine.aio.capacity.regions.used < 1 << 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("capture", [Capture(), Capture(reduce="mean")])
def test_when_nothing_runs_the_workers_hear_of_ends_without_a_next_request(
    engine: SyncEngine, capture: Capture
) -> None:
    """Also of a text that ran to its longest, whose rows were there before anybody asked for them."""
    done = engine.generate(LONG, SAMPLING, capture=capture)
    regions = engine.aio.capacity.regions  # type: ignore[attr-defined]
    assert done.rows[0].ndim == (1 if capture.reduce else 2)
    del done
    gc.collect()
    until = time.monotonic() + HUNG_S
    while engine.stats()["worker_requests"] or regions.untidy:
        assert time.monotonic() < until, "an idle engine has not tidied up"
        time.sleep(0.02)
    assert regions.used == 0


def test_rows_that_are_dropped_while_nothing_runs_are_tidied_up_before_the_next_request(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steerscope.engines.engine_thread.SWEEP_S", 2 * HUNG_S)  # no sweep runs by itself
    done = engine.generate(LONG, SAMPLING, capture=Capture())
    regions = engine.aio.capacity.regions  # type: ignore[attr-defined]
    time.sleep(0.1)  # idle: it has tidied up what there was
    assert done.capture is not None
    done.capture.close()
    del done
    gc.collect()
    until = time.monotonic() + HUNG_S
    while regions.untidy:
        assert time.monotonic() < until, "an idle engine does not notice"
        time.sleep(0.005)
    assert len(regions._free) == 1


def test_what_is_left_of_requests_goes_when_nothing_runs_and_before_others_come(
    engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    aio: Any = engine.aio
    seen, admit, push = [], aio._admit, Add(vector=np.ones(64, np.float32), scale=1e-3, layers=0)
    monkeypatch.setattr(aio, "_admit", lambda: (seen.append(aio._spent), admit())[1])
    for _ in range(4):
        engine.generate([LONG, LONG], SAMPLING, steer=push)
    assert set(seen) == {()}
    until = time.monotonic() + HUNG_S
    while aio._spent or aio.capacity.regions.used:
        assert time.monotonic() < until, "an idle engine keeps memory that is not needed"
        time.sleep(0.02)


def test_a_mean_of_nothing_is_not_somebody_elses_rows(engine: SyncEngine) -> None:
    before = engine.generate(LONG, SAMPLING, capture=Capture(layers=0))
    assert before.capture is not None
    kept = before.rows[0].clone()
    before.capture.close()
    del before
    gc.collect()
    engine.generate(TokenPrompt([20]), Sampling(max_tokens=2, ignore_eos=True))  # the workers hear of its end
    (one,) = asyncio.run(cancelled_in_the_queue(engine, [Capture(reduce="mean")]))
    assert one.rows.n == 0
    for layer in range(4):
        assert torch.isnan(one.rows[layer]).all()
        assert not any(torch.equal(one.rows[layer].view(-1), row) for row in kept)


def test_more_sets_of_layers_than_the_workers_know_at_once_wait_their_turn() -> None:
    options = {"sites": ("resid_post",), "slots": 4, "groups": 3}
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", options)
    try:
        layers = [(i,) for i in range(4)] + [(i, j) for i in range(4) for j in range(i)]
        done = engine.generate([LONG] * 10, Sampling(max_tokens=4), capture=[Capture(layers=each) for each in layers])
        assert [one.rows.layers for one in done] == [tuple(sorted(each)) for each in layers]
    finally:
        engine.close()


@pytest.mark.long
def test_a_killed_engine_core_ends_its_requests_and_refuses_others() -> None:
    script = Path(__file__).with_name("kill_script.py")
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, str(script), str(saved("llama", "bytes", None, {}))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["running"][0] == "RequestFailed"
    assert found["next"][0] == "EngineClosed"
    assert found["close"][0] == "done"
    assert not found["alive"]
    assert all(found[name][1] < 30 for name in ("running", "next", "close"))


def test_rows_of_generated_tokens_are_the_last_of_all_rows_whatever_the_parts_of_the_prompt() -> None:
    options: dict[str, object] = {"sites": ("resid_post",), "max_num_batched_tokens": 64, "max_batch": 4}
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {**options, "enable_prefix_caching": False})
    long, sampling = TokenPrompt([20 + i for i in range(100)]), Sampling(max_tokens=4, ignore_eos=True)
    push = Add(vector=np.ones(64, np.float32), layers="all", tokens="generated")
    try:
        plain = engine.generate(long, sampling)
        whole = engine.generate(long, sampling, capture=Capture())
        assert plain.token_ids == whole.token_ids != engine.generate(long, sampling, steer=push).token_ids
        found = engine.generate([long, TokenPrompt([5, 6, 7])], sampling, capture=Capture(tokens="generated"))
        for key, rows in whole.rows.items():
            torch.testing.assert_close(found[0].rows[key], rows[100:])
        assert {len(rows) for one in found for rows in one.rows.values()} == {3}
    finally:
        engine.close()


def test_a_watched_request_has_every_reading_while_others_are_registered_late() -> None:
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"sites": ("resid_post",), "max_batch": 4})
    engine.register_pack("p", PACK)
    long = Sampling(max_tokens=40, ignore_eos=True)

    async def both() -> list[Generation]:
        late: list[asyncio.Task[Generation]] = []
        async for event in engine.aio.stream(TokenPrompt([5, 6, 7]), long, watch=Watch(pack="p")):
            if isinstance(event, TokenEvent) and event.index in (4, 9, 14):
                asked = engine.aio.generate(TokenPrompt([8 + event.index]), long, capture=Capture(tokens="generated"))
                late.append(asyncio.ensure_future(asked))
            elif isinstance(event, EndEvent):
                return [event.generation, *[await one for one in late]]
        raise AssertionError("a stream without an end")

    try:
        watched, *others = asyncio.run(asyncio.wait_for(both(), HUNG_S))
        assert len(watched.readings) == 3 + 39
        assert [{len(rows) for rows in one.rows.values()} for one in others] == [{39}] * 3
    finally:
        engine.close()
