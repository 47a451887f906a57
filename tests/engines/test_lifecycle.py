"""Edges of a request's and an engine's life: names, scopes, closing, faults, exit. Nothing hangs, nothing leaks."""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.conftest import Start
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf import engine as engine_module
from steerscope.engines.hf.decode_batch import BatchCache
from steerscope.engines.hf.sequence import Row
from steerscope.engines.hf.settings import context_of
from steerscope.engines.options import SteerLike
from steerscope.engines.result_channels import ResultChannel, in_this_thread, waits_here
from steerscope.engines.results import EndEvent
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.errors import EngineClosed, RequestFailed
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

PROMPT = "The quick brown fox jumps over"
SHORT = Sampling(max_tokens=8, ignore_eos=True)
LONG = Sampling(max_tokens=200, ignore_eos=True)
VECTOR = np.random.default_rng(1).normal(size=64).astype(np.float32)
# Reaches into that engine.
ON_TRANSFORMERS = pytest.mark.parametrize("start", ["hf"], indirect=True)


def test_a_stream_made_inside_a_steering_block_is_steered_wherever_it_is_read(engine: SyncEngine) -> None:
    op = Add(vector=VECTOR, scale=30, layers="all")
    with engine.steering(op):
        stream = engine.stream(PROMPT, SHORT)
    end = list(stream)[-1]
    assert isinstance(end, EndEvent)
    assert end.generation.token_ids == engine.generate(PROMPT, SHORT, steer=op).token_ids
    with pytest.raises(InvalidRequest, match="out of range"):
        engine.stream(PROMPT, SHORT, capture=Capture(layers=9))  # refused at the call


def test_a_forward_of_the_users_own_is_never_steered_while_a_steered_request_runs(start: Start) -> None:
    engine = start()
    model, ids = tiny.model(), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain = model(ids).logits
        stream = engine.stream(PROMPT, LONG, steer=Add(vector=VECTOR, scale=20, layers="all"))
        for _ in range(40):
            next(stream)
            assert torch.equal(model(ids).logits, plain)
    stream.close()  # type: ignore[attr-defined]


def test_a_name_belongs_to_one_request_from_the_call_on(start: Start) -> None:
    engine = start(capture_budget=80_000, capture_wait=HUNG_S)
    first = engine.generate(PROMPT, LONG.model_copy(update={"max_tokens": 60}), capture=Capture())

    async def run() -> None:
        async def named() -> object:
            events = engine.aio.stream(
                PROMPT, LONG.model_copy(update={"max_tokens": 60}), capture=Capture(), request_id="x"
            )
            return [event async for event in events][-1]

        waiting = asyncio.create_task(named())  # no room yet
        await asyncio.sleep(0.1)
        with pytest.raises(InvalidRequest, match="already running"):
            await named()
        assert engine.cancel("x")
        assert first.capture is not None
        first.capture.close()
        end = await waiting
        assert isinstance(end, EndEvent)
        assert end.generation.finish_reason == "cancelled"

    asyncio.run(run())
    names = {engine.generate(PROMPT, SHORT).request_id for _ in range(3)}
    assert len(names) == 3


def test_of_threads_that_take_one_name_at_once_one_gets_it(engine: SyncEngine) -> None:
    together, told = threading.Barrier(8, timeout=HUNG_S), []

    def ask() -> None:
        together.wait()
        stream = engine.stream(PROMPT, LONG, request_id="one")
        try:
            next(stream)
            told.append("runs")
        except InvalidRequest as error:
            told.append(str(error))
        together.wait()  # it holds its name until everybody has asked
        stream.close()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HUNG_S)
    assert told.count("runs") == 1
    assert sum("already running" in one for one in told) == 7
    assert len(list(engine.stream(PROMPT, SHORT, request_id="one"))) == 9  # free again


def test_an_interrupt_ends_the_request_that_was_waited_for(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, when the thread waits for its texts."""

    async def interrupted(_: ResultChannel) -> None:
        while not engine.stats()["running"]:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ResultChannel, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT] * 3, LONG, capture=Capture())
    until = time.monotonic() + HUNG_S
    while any((now := engine.stats())[name] for name in ("running", "waiting", "capture_bytes")):
        assert time.monotonic() < until, now
        time.sleep(0.01)
    assert not engine.aio._jobs
    assert engine.generate(PROMPT, SHORT).finish_reason == "length"


def test_a_coroutine_that_wants_a_loop_is_not_left_hanging() -> None:
    with pytest.raises(RuntimeError, match="wants a loop"):
        in_this_thread(asyncio.sleep(0))
    assert not waits_here()


def test_a_vanishing_temperature_is_greedy(engine: SyncEngine) -> None:
    cold = Sampling(max_tokens=8, temperature=1e-50, seed=0, ignore_eos=True)
    assert engine.generate(PROMPT, cold).token_ids == engine.generate(PROMPT, SHORT).token_ids


def test_a_mean_over_no_rows_is_not_a_number(start: Start) -> None:
    engine = start()
    first = engine.generate(PROMPT, SHORT).token_ids[0]
    ended = start(eos=[first]).generate(
        PROMPT, Sampling(max_tokens=8), capture=Capture(tokens="generated", reduce="mean")
    )
    assert ended.rows.n == 0
    assert torch.isnan(ended.rows[0]).all()


@ON_TRANSFORMERS
def test_a_request_that_cannot_be_started_fails_alone(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Row.lease

    def lease(self: Row) -> None:
        if self.plan.sampling.max_tokens == 3:
            raise MemoryError("no room for rows")
        real(self)

    monkeypatch.setattr(Row, "lease", lease)
    with pytest.raises(RequestFailed, match="no room for rows") as failure:
        engine.generate([PROMPT] * 3, [SHORT, Sampling(max_tokens=3), SHORT])
    assert [done is not None for done in failure.value.completed] == [True, False, True]


@ON_TRANSFORMERS
def test_a_fault_in_a_step_spares_those_who_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(max_batch=1)
    real, calls = BatchCache.make_room, []

    def make_room(self: BatchCache) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room for a step")
        real(self)

    monkeypatch.setattr(BatchCache, "make_room", make_room)
    with pytest.raises(RequestFailed, match="no room for a step") as failure:
        engine.generate([PROMPT, "Hello", "x"], SHORT)
    assert [done is not None for done in failure.value.completed] == [False, True, True]


async def in_order_of_ending(engine: SyncEngine, **asked: tuple[Sampling, SteerLike | None]) -> list[str]:
    """The names of these requests, which are made one after the other, as they end."""
    ended: list[str] = []

    async def one(name: str, sampling: Sampling, steer: SteerLike | None) -> None:
        await engine.aio.generate(PROMPT, sampling, steer=steer)
        ended.append(name)

    running = [one(name, sampling, steer) for name, (sampling, steer) in asked.items()]
    await asyncio.wait_for(asyncio.gather(*running), HUNG_S)
    return ended


def test_a_request_that_needs_no_slot_overtakes_one_that_waits_for_it(start: Start) -> None:
    """And no other does: it could keep the slot in use for ever."""
    engine = start(slots=2)
    first, second = (Add(vector=VECTOR * i, layers=1) for i in (1, 2))
    asked = {"holder": (LONG, first), "waits": (SHORT, second), "plain": (SHORT, None), "shares": (SHORT, first)}
    ended = asyncio.run(in_order_of_ending(engine, **asked))
    assert ended[:2] == ["plain", "holder"]
    assert sorted(ended[2:]) == ["shares", "waits"]


def test_behind_one_that_has_waited_long_others_take_only_places_that_are_free(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would stand before it, in a queue for places, when a slot is free at last."""
    monkeypatch.setattr("steerscope.engines.engine_thread.OVERTAKEN_S", 0.0)
    engine = start(slots=2, max_batch=2)
    first, second = (Add(vector=VECTOR * i, layers=1) for i in (1, 2))
    asked = {"holder": (LONG, first), "waits": (SHORT, second)} | {f"plain {i}": (SHORT, None) for i in range(60)}
    ended = asyncio.run(in_order_of_ending(engine, **asked))
    begun = ended.index("holder")
    assert begun > 10, "places that were free stayed empty"
    assert ended.index("waits") - begun <= 3, "others were let in before it"


def test_what_never_fits_is_refused_though_others_run(start: Start) -> None:
    """It would wait as long as plain requests keep coming: none of them has a slot to give."""
    engine = start(slots=2)
    two = Steering.of(Add(vector=VECTOR, layers=1), Add(vector=-VECTOR, layers=1, tokens="generated"))

    async def run() -> None:
        stream = engine.aio.stream(PROMPT, LONG)
        await anext(stream)
        with pytest.raises(RequestFailed, match="all 1 vector slots are in use"):
            await asyncio.wait_for(engine.aio.generate(PROMPT, SHORT, steer=two), HUNG_S)
        assert engine.aio.stats()["running"] == 1
        assert len([event async for event in stream]) == 200  # 199 tokens more, and the end

    asyncio.run(run())


@ON_TRANSFORMERS
def test_a_fault_while_receiving_does_not_end_the_engine(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Row", lambda *_: 1 / 0)
    with pytest.raises(RequestFailed, match="division by zero"):
        engine.generate(PROMPT, SHORT)
    monkeypatch.undo()
    assert len(engine.generate(PROMPT, SHORT).token_ids) == 8


@ON_TRANSFORMERS
def test_one_long_text_does_not_bloat_the_cache_of_those_after_it(start: Start) -> None:
    engine = start("llama", max_position_embeddings=4096)
    engine.generate("word " * 1300, Sampling(max_tokens=2))
    engine.generate([PROMPT] * 4, SHORT)
    keys = engine.aio._cache.own[0].keys  # type: ignore[attr-defined]
    assert keys.shape[-2] <= 1024


def test_gathered_captures_wait_their_turn_as_long_as_somebody_finishes(start: Start) -> None:
    engine = start(capture_budget=40_000, capture_wait=HUNG_S)

    async def run() -> list[int]:
        async def one() -> int:
            done = await engine.aio.generate(PROMPT, SHORT, capture=Capture())
            assert done.capture is not None
            async with done.capture as handle:
                await asyncio.sleep(0.05)
                return handle.fetch().n

        return await asyncio.gather(*(one() for _ in range(20)))

    assert len(asyncio.run(run())) == 20
    assert engine.stats()["capture_bytes"] == 0


def test_closing_tells_everybody_who_waits(start: Start) -> None:
    engine = start(capture_budget=20_000, capture_wait=HUNG_S)
    kept = engine.generate(PROMPT, SHORT, capture=Capture())
    told: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate(PROMPT, SHORT, capture=Capture())
        except EngineClosed as error:
            told.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiters:
        thread.start()
    time.sleep(0.2)
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in [*waiters, *closers]:
        thread.join(timeout=HUNG_S)
        assert not thread.is_alive()
    assert len(told) == 2
    assert kept.rows.n > 0  # what was captured stays in hand
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT, SHORT)


@pytest.mark.slow
def test_a_script_that_ends_in_the_middle_of_a_request_ends_cleanly(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path / "m")
    tiny.tokenizer().save_pretrained(tmp_path / "m")
    script = f"""
        import steerscope as ss
        engine = ss.load({str(tmp_path / "m")!r})
        stream = engine.stream("Hello", ss.Sampling(max_tokens=200, ignore_eos=True))
        next(stream)
        print("said")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=HUNG_S, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "said"), ran.stderr


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"slots": 1}, {"capture_budget": -1}, {"max_columns": 0}])
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        HFEngine(tiny.model(), tiny.tokenizer(), name="llama", **options)  # type: ignore[arg-type]


def test_a_length_dependent_rotary_embedding_limits_the_context_to_where_it_does_not_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    config = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model = tiny.model("llama")  # the limit is read from the configuration alone
    changed = type(model.config)(**{**model.config.to_dict(), **config})
    assert context_of(model.config) == 256
    assert context_of(changed) == 64


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.generate("a", {"max_tokens": 3}),
        lambda e: e.generate("a", capture=True),
        lambda e: e.generate("a", steer="happy"),
        lambda e: e.generate(None),
        lambda e: e.chat({"role": "user", "content": "x"}),
        lambda e: e.chat(None),
        lambda e: e.register("a", "b"),
        lambda e: e.register("a", np.ones(3)),
    ],
)
def test_things_of_the_wrong_kind_are_refused_in_words(engine: SyncEngine, call) -> None:
    with pytest.raises(InvalidRequest):
        call(engine)
