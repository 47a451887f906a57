"""The promises of docs/design.md §5, and for each of their guards a proof that it is needed: with the guard taken out,
the promise's own check fails. A guard whose removal goes unnoticed is not a guard."""

import contextlib
import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from steerscope.capture.budget import ByteBudget
from steerscope.core import rows, slot_table
from steerscope.engines import plan as plan_module
from steerscope.engines.hf import HFEngine, decode_batch, forward_index, sampler, taps
from steerscope.engines.hf import engine as engine_module
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Cap, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.errors import BadFile, CapacityExceeded, CaptureClosed, RequestFailed, UnsupportedModel
from steerscope.specs.tokens import Positions
from steerscope.vectors import load as load_vector
from support import tiny
from support.reference import Reference, distance
from support.waiting import HUNG_S

PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog, and then it rained", "How was your week?"]
GREEDY = Sampling(max_tokens=7, ignore_eos=True)
VECTOR = np.random.default_rng(2).normal(size=64).astype(np.float32)


@pytest.fixture
def start() -> Iterator[Callable[..., SyncEngine]]:
    running: list[SyncEngine] = []

    def begin(**options: object) -> SyncEngine:
        running.append(HFEngine(tiny.model(), tiny.tokenizer(), name="llama", **options).sync)  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for engine in running:
        engine.close()


Start = Callable[..., SyncEngine]

# --- the promises, as checks that raise AssertionError


@contextlib.contextmanager
def held(kind: type[Exception], *parts: str) -> Iterator[None]:
    """The block is refused with this error, and its text holds all these parts."""
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not said in: {error}") from error
    except Exception as error:
        raise AssertionError(f"not a clear refusal: {error!r}") from error
    else:
        raise AssertionError("not refused")


def exact_rows(start: Start, _: Path) -> None:
    """1 and 2: p+g−1 rows, in order, each equal to the reference, in a mixed batch with a steered neighbour."""
    steer = [None, Add(vector=VECTOR, scale=3, layers="0-2"), None]
    done = start().generate(PROMPTS, GREEDY, steer=steer, capture=Capture())
    for i in (0, 2):
        fed = [*done[i].prompt_token_ids, *done[i].token_ids[:-1]]
        _, wanted = Reference(tiny.model()).run(fed)
        try:
            found = done[i].rows
        except RequestFailed as error:
            raise AssertionError(error) from error
        assert found.n == len(fed)
        assert list(found.labels.token_id) == fed
        assert all(distance(found[layer], wanted[layer, "resid_post"]) < 1e-5 for layer in range(4))


def exact_means(start: Start, _: Path) -> None:
    """1: a reduction counts every position once, even when positions are fed again."""
    del start
    reducer = rows.Reducer("mean", 1, 2, torch.device("cpu"))
    values = torch.arange(12.0).view(6, 1, 2)
    reducer.update(range(0, 4), values[:4])
    reducer.update(range(2, 6), values[2:])
    assert reducer.n == 6
    assert torch.equal(reducer.result(), values.mean(0))


def steering_happens(start: Start, _: Path) -> None:
    """3: what was asked for is what the rows show, for every op and in order."""
    op = Steering.of(Add(vector=VECTOR, scale=40, layers=1), Cap(vector=VECTOR, max=2.0, layers=1))
    found = start().generate(PROMPTS, GREEDY, steer=op, capture=Capture(layers=1))
    unit = torch.from_numpy(VECTOR / np.linalg.norm(VECTOR))
    for done in found:
        assert float((done.rows[1] @ unit).max()) < 2.0 + 1e-4


def self_test_notices(_: Start, __: Path) -> None:
    """3: a tap that does not reach the model is found at start-up, not by the user."""
    real = taps.Taps._addend
    taps.Taps._addend = lambda *_: lambda *_: None  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(UnsupportedModel, match="self-test"):
            HFEngine(tiny.model(), tiny.tokenizer(), name="llama")
    except pytest.fail.Exception as error:
        raise AssertionError("a dead tap went unnoticed") from error
    finally:
        taps.Taps._addend = real  # type: ignore[method-assign]


def refused_before_it_runs(start: Start, _: Path) -> None:
    """3: specs that cannot be honoured are refused with every problem listed."""
    engine = start(max_columns=1)
    bad = Steering.of(
        Add(vector=VECTOR[:8], layers=1),
        Add(vector=VECTOR, layers=9),
        Add(vector=VECTOR, layers=1, tokens="positions=[90]"),
        Add(vector=VECTOR, layers=1, tokens="positions=[5:5]"),
        Add(vector=VECTOR, layers=1, tokens="prompt"),
        Add(vector=VECTOR, layers=1, tokens="generated"),
    )
    with held(InvalidRequest, "hidden size 64", "out of range", "never computed", "selects no token", "columns"):
        engine.generate("Hello there", GREEDY, steer=bad)


def numbers_only(_: Start, __: Path) -> None:
    """3: NaN, infinite and zero vectors never become ops."""
    for bad in ([float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]):
        with held(InvalidRequest, "vector"):
            Add(vector=bad, layers=1)


def no_leak_between_requests(start: Start, _: Path) -> None:
    """4 and 6: slots and cache rows are reused; nothing of the last owner is left in them."""
    engine = start(slots=2, max_batch=2)
    plain = [engine.generate(p, GREEDY).token_ids for p in PROMPTS[:2]]
    for scale in range(20, 28):  # more strengths than there are coefficient slots: every slot has had an owner
        engine.generate(PROMPTS[0], GREEDY, steer=Add(vector=VECTOR, scale=scale, layers="0-3"))
    faint = Add(vector=-VECTOR, scale=1e-6, layers=3)
    found = engine.generate(PROMPTS[1], GREEDY, steer=faint, capture=Capture(layers="0-3")).rows
    wanted = Reference(tiny.model()).run(list(found.labels.token_id))[1]
    assert all(distance(found[layer], wanted[layer, "resid_post"]) < 1e-4 for layer in range(4))
    assert [engine.generate(p, GREEDY).token_ids for p in PROMPTS[:2]] == plain


def bounded_and_said(start: Start, _: Path) -> None:
    """5: captures have a budget, and unfetched ones expire and say so."""
    engine = start(capture_budget=30_000, capture_wait=0.05, capture_ttl=0.2)
    first = engine.generate(PROMPTS[2], GREEDY, capture=Capture())
    engine.aio.capture_ttl = HUNG_S
    kept = []
    with held(CapacityExceeded, "close handles"):
        for _i in range(4):
            kept.append(engine.generate(PROMPTS[2], GREEDY, capture=Capture()))
            assert kept[-1].rows.n > 0  # fetched: it stays
    time.sleep(0.3)
    assert engine.generate(PROMPTS[2], GREEDY, capture=Capture(layers=0)).rows.n > 0
    with held(CaptureClosed, "capture_ttl"):
        _ = first.rows


def nothing_dropped_silently(start: Start, _: Path) -> None:
    """5: rows that were not fetched are announced when they are dropped."""
    engine = start()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine.generate("Hello", GREEDY, capture=Capture())
        deadline = time.monotonic() + HUNG_S  # the engine's thread lets go of the result a moment after we have it
        while engine.stats()["capture_bytes"] and time.monotonic() < deadline:
            time.sleep(0.005)
    assert any("dropped unfetched" in str(w.message) for w in seen)
    assert engine.stats()["capture_bytes"] == 0


def one_bad_request_hurts_nobody(start: Start, _: Path) -> None:
    """6: an overflowing request fails alone, and the cache rows it used are clean for the next."""
    # Two places: a long request stays, a bad one fails, and a short one takes its place, padded where the bad one was.
    engine = start(max_batch=2)
    prompts = [f"{PROMPTS[1]}, {PROMPTS[1]}", PROMPTS[1], PROMPTS[0]]
    samplings = [GREEDY.model_copy(update={"max_tokens": 30}), GREEDY, GREEDY]
    wanted = [engine.generate(p, s).token_ids for p, s in zip(prompts, samplings, strict=True)]
    for tokens in ("all", "generated"):
        steer = [None, Add(vector=VECTOR, scale=3e38, layers="all", tokens=tokens), None]
        try:
            engine.generate(prompts, samplings, steer=steer)
        except RequestFailed as error:
            kept = [d.token_ids if d else None for d in error.completed]
            assert kept == [wanted[0], None, wanted[2]]
        else:
            raise AssertionError("an overflow went unnoticed")
        assert [d.token_ids for d in engine.generate(prompts, samplings)] == wanted
    short_first = engine.generate(prompts[1::-1], samplings[1::-1])  # the long request moves to the place of the short
    assert [d.token_ids for d in short_first] == [wanted[1], wanted[0]]


def long_prompts_do_not_stop_streams(start: Start, _: Path) -> None:
    """7: a step of the stream lies between two pieces of a prompt, and its rows are those of one plain forward."""
    engine, widths = start(prefill_chunk=16), list[int]()
    prompt = TokenPrompt(np.random.default_rng(4).integers(4, 512, size=90).tolist())
    stream = engine.stream("Hello", Sampling(max_tokens=200, ignore_eos=True))
    next(stream)
    model = engine.aio.model  # type: ignore[attr-defined]
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    done = engine.generate(prompt, Sampling(max_tokens=1), capture=Capture())
    hook.remove()
    stream.close()  # type: ignore[attr-defined]
    engine.close()
    pieces = [i for i, width in enumerate(widths) if width > 1]
    assert [widths[i] for i in pieces] == [16] * 5 + [10]
    assert {b - a for a, b in itertools.pairwise(pieces)} == {2}
    _, wanted = Reference(tiny.model()).run(prompt.token_ids)
    assert all(distance(found, wanted[key]) < 1e-4 for key, found in done.rows.items())


def no_code_from_users(_: Start, folder: Path) -> None:
    """8: a pickle with code in it is refused by name and never runs."""
    marker, file = folder / "ran", folder / "evil.pt"

    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (marker,))

    with file.open("wb") as out:
        pickle.dump({"vector": Evil()}, out)
    with held(BadFile, "evil.pt"):
        load_vector(file)
    assert not marker.exists(), "code from a file ran"


PROMISES = [
    exact_rows,
    exact_means,
    steering_happens,
    self_test_notices,
    refused_before_it_runs,
    numbers_only,
    no_leak_between_requests,
    bounded_and_said,
    nothing_dropped_silently,
    one_bad_request_hurts_nobody,
    long_prompts_do_not_stop_streams,
    no_code_from_users,
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda check: check.__name__)
def test_promise(promise: Callable[[Start, Path], None], start: Start, tmp_path: Path) -> None:
    promise(start, tmp_path)


# --- the guards, taken out one by one

Mutation = Callable[[pytest.MonkeyPatch], None]


def rows_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """Rows written to the next request instead of by position: padding is taken for tokens."""
    real = forward_index.index_forward

    def wrong(spans, width):
        index = real(spans, width)
        for staged in index.captured:
            staged.tokens = list(range(len(staged.tokens)))
        return index

    patch.setattr(forward_index, "index_forward", wrong)


def phantom_row(patch: pytest.MonkeyPatch) -> None:
    """The last sampled token counted as if it had been fed."""
    real = rows.RowBuffer.finish
    patch.setattr(rows.RowBuffer, "finish", lambda self, count: real(self, count + 1))


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    real = Positions.within
    patch.setattr(Positions, "within", lambda self, a, b: real(self, a + 1, b + 1))


def half_the_stream(patch: pytest.MonkeyPatch) -> None:
    """Only a part of the stream captured, as when delta or residual is forgotten."""
    real = forward_index.Gather.take
    patch.setattr(forward_index.Gather, "take", lambda self, key, flat: real(self, key, flat * 0.5))


def steer_everyone(patch: pytest.MonkeyPatch) -> None:
    """Ops applied to the first rows of the batch instead of their own tokens."""
    real = forward_index.index_forward

    def wrong(spans, width):
        index = real(spans, width)
        index.entries = dict(enumerate(index.entries.values()))
        return index

    patch.setattr(forward_index, "index_forward", wrong)


def no_watermark(patch: pytest.MonkeyPatch) -> None:
    def update(self, positions, rows_):
        self._value += rows_.float().sum(0)
        self.n += len(positions)

    patch.setattr(rows.Reducer, "update", update)


def order_lost(patch: pytest.MonkeyPatch) -> None:
    real = plan_module.pack
    patch.setattr(plan_module, "pack", lambda ops: real(ops[::-1]))
    patch.setattr(plan_module, "columns_of", plan_module.columns_of.__wrapped__)


def no_steering(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(taps, "apply", lambda h, *_: torch.zeros_like(h, dtype=torch.float32))


def no_self_test(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "self_test", lambda *_: None)


def no_size_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_module.Planner, "_vector", lambda *args: args[1].vector)


def no_layer_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_module.Planner, "_check_layers", lambda *_: True)


def no_column_check(patch: pytest.MonkeyPatch) -> None:
    real = plan_module.pack
    patch.setattr(plan_module, "pack", lambda ops: real(ops)[:1])
    patch.setattr(plan_module, "columns_of", plan_module.columns_of.__wrapped__)


def numbers_unchecked(patch: pytest.MonkeyPatch) -> None:
    from steerscope.specs import steering

    patch.setattr(steering.math, "isfinite", lambda _: True)


def slots_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """A reused slot keeps what its last owner had at other layers."""

    def write(self, which, slot, values):
        for key, value in values.items():
            self.tensors(key)[which][slot].copy_(value)

    patch.setattr(slot_table.SlotTable, "_write", write)


def slots_never_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slot_table.SlotTable, "_write", lambda *_: None)


def no_budget(patch: pytest.MonkeyPatch) -> None:
    def reserve(self, size):
        from steerscope.capture.budget import Reservation

        self.sweep()
        self.used += size
        return Reservation(self, size)

    patch.setattr(ByteBudget, "take", reserve)


def no_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ByteBudget, "sweep", lambda _: None)


def silent_drop(patch: pytest.MonkeyPatch) -> None:
    from steerscope.capture import handle

    patch.setattr(handle.warnings, "warn", lambda *_, **__: None)


def overflow_unnoticed(patch: pytest.MonkeyPatch) -> None:
    real = sampler.torch.isfinite
    patch.setattr(sampler.torch, "isfinite", lambda x: torch.ones_like(real(x)))


def cache_rows_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """A row keeps the NaNs of the request that had it before, where the next one's padding is."""
    patch.setattr(decode_batch, "clear", lambda _: None)


def cache_row_not_moved(patch: pytest.MonkeyPatch) -> None:
    """A row leaves and the last one does not take its place."""

    def leave(self, row):
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()
        self.window.rows -= 1
        self._narrow()

    patch.setattr(decode_batch.BatchCache, "leave", leave)


def prompts_always_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "can_continue", lambda *_: False)


def pieces_from_position_0(patch: pytest.MonkeyPatch) -> None:
    real = engine_module.prefill_inputs
    patch.setattr(engine_module, "prefill_inputs", lambda texts, _, device: real(texts, 0, device))


def unpickle_anything(patch: pytest.MonkeyPatch) -> None:
    from steerscope.vectors import legacy

    real = torch.load
    patch.setattr(legacy.torch, "load", lambda *a, **k: real(*a, **{**k, "weights_only": False}))


GUARDS: list[tuple[Callable[[Start, Path], None], Mutation]] = [
    (exact_rows, rows_by_arrival),
    (exact_rows, phantom_row),
    (exact_rows, positions_off_by_one),
    (exact_rows, half_the_stream),
    (exact_rows, steer_everyone),
    (exact_means, no_watermark),
    (steering_happens, order_lost),
    (steering_happens, no_steering),
    (steering_happens, slots_never_written),
    (self_test_notices, no_self_test),
    (refused_before_it_runs, no_size_check),
    (refused_before_it_runs, no_layer_check),
    (refused_before_it_runs, no_column_check),
    (numbers_only, numbers_unchecked),
    (no_leak_between_requests, slots_not_cleared),
    (bounded_and_said, no_budget),
    (bounded_and_said, no_expiry),
    (nothing_dropped_silently, silent_drop),
    (one_bad_request_hurts_nobody, overflow_unnoticed),
    (one_bad_request_hurts_nobody, cache_rows_not_cleared),
    (one_bad_request_hurts_nobody, cache_row_not_moved),
    (long_prompts_do_not_stop_streams, prompts_always_whole),
    (long_prompts_do_not_stop_streams, pieces_from_position_0),
    (no_code_from_users, unpickle_anything),
]


@pytest.mark.parametrize(("promise", "mutation"), GUARDS, ids=lambda part: part.__name__)
@pytest.mark.filterwarnings("ignore")
def test_without_its_guard_the_promise_is_seen_to_break(
    promise: Callable[[Start, Path], None],
    mutation: Mutation,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutation(monkeypatch)
    # Seen by the check, or refused by another guard with a clear error: both are better than a wrong row.
    with pytest.raises((AssertionError, RequestFailed, UnsupportedModel)):
        promise(start, tmp_path)
