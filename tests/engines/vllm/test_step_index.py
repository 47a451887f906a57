"""The index of a step, driven with what a scheduler can order: chunks, mixed batches, preemption, steps too many.

An independent oracle recomputes, token by token, what every index row must say.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack, structs

from steerscope.core.slot_table import Lease
from steerscope.engines.vllm.settings import NAME, PAGE, smallest_pool
from steerscope.engines.vllm.wire import Envelope, Wire, WireBody, WireCapture, WireColumn, WireWatch
from steerscope.engines.vllm.worker.decode_fast_path import StepPlan
from steerscope.engines.vllm.worker.device import Cells
from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, FLAG, GROUP, STRIDE
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest, WatchState
from steerscope.engines.vllm.worker.step_index import StepIndex
from steerscope.lenses.rules import Compiled, CompiledRule, Term
from steerscope.specs.tokens import END, EVERYWHERE, Positions

COLUMNS, TOKENS = 2, 64
RULES = Compiled(
    [Term(4, 0.5, float("inf"), 2), Term(1, float("-inf"), 0.25, 1)],
    [
        CompiledRule("cheer", "steer", ((1, 2), (2, 0)), 2, 3, (4, 1)),
        CompiledRule("end", "stop", ((1, 0),), None, 1, (4,)),
    ],
)


def request(
    name: str, positions: Positions | None, columns: tuple[Positions, ...] = (), most: int = 1000, slot: int = 1
) -> TrackedRequest:
    capture = positions and WireCapture(((0, "resid_post"), (1, "resid_post")), positions, False, None, 0, most)
    wire = Wire(name, None, 0, 0, tuple(WireColumn(b"", b"", {}, p, 0) for p in columns), capture)
    leases = [Lease(slot + k, slot + k, b"", b"") for k in range(len(columns))]
    return TrackedRequest(wire, leases, 3 if positions else 0, 2 if positions else 0)


class Pool:
    """Hands out cells one step after another, never the same twice."""

    def __init__(self) -> None:
        self.next = 1

    def reserve(self, cells: int) -> int:
        first, self.next = self.next, self.next + cells
        return first


class TightPool(Pool):
    """Every third time there is no room until all pages are closed and their rows sent, before the step's forward."""

    def __init__(self, step_index: StepIndex) -> None:
        super().__init__()
        self.step_index, self.calls = step_index, 0
        self.sent: list[RowSlice] = []

    def reserve(self, cells: int) -> int:
        self.calls += 1
        if self.calls % 3 == 0:
            for one in self.step_index.requests.values():
                self.sent += self.step_index.close_page(one)
        return super().reserve(cells)


def step(step_index: StepIndex, pool: Pool, *parts: tuple[str, int, int]) -> StepPlan:
    """Requests with their first position and number of tokens, in batch order."""
    starts = np.cumsum([0, *(count for _, _, count in parts)])
    early: list[RowSlice] = []
    at = np.array([at for _, at, _ in parts])
    plan = step_index.plan([name for name, _, _ in parts], starts, at, pool.reserve, early.extend)
    if plan.advance:  # as the pool does
        step_index.index[: plan.tokens, CELL] += step_index.index[: plan.tokens, STRIDE]
    # What a step says of itself decides which kernels run: never less than its index has.
    numbers = step_index.index[:, ENTRIES + 1 : ENTRIES + 3 * COLUMNS : 3]
    assert not numbers[:, plan.columns :].any()
    assert plan.steers == numbers.any()
    assert plan.keeps == step_index.index[:, GROUP].any()
    assert plan.busy == (plan.steers or plan.keeps)
    return replace(plan, slices=early + plan.slices)


def test_a_chunk_in_a_mixed_batch_is_addressed_by_absolute_position() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = request("a", Positions(((0, 2), (5, 9))))
    step(step_index, pool, ("a", 0, 4))
    plan = step(step_index, pool, ("plain", 40, 1), ("a", 4, 6), ("other", 0, 3))
    assert [(s.start, s.stop) for s in plan.slices] == [(5, 9)]
    assert step_index.index[:11, GROUP].tolist() == [0, 0, 3, 3, 3, 3, 0, 0, 0, 0, 0]
    cell = plan.slices[0].cell
    assert step_index.index[2:6, CELL].tolist() == [cell, cell + 2, cell + 4, cell + 6]


def test_columns_act_at_their_own_positions_only() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = request("a", None, (EVERYWHERE, Positions(((3, END),))), slot=5)
    step(step_index, pool, ("x", 0, 1), ("a", 2, 3))
    assert step_index.index[:5, ENTRIES : ENTRIES + 6].tolist() == [
        [0] * 6,
        [5, 5, 0, 0, 0, 0],
        [5, 5, 0, 6, 6, 0],
        [5, 5, 0, 6, 6, 0],
        [0] * 6,
    ]


def test_a_token_that_is_steered_says_whose_it_is() -> None:
    """A steering that produces NaN or inf is reported to the request that asked for it."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    for number, name in enumerate("ab", start=7):
        step_index.requests[name] = request(name, None, (Positions(((1, END),)),))
        step_index.requests[name].flag = number
    step(step_index, pool, ("a", 0, 3), ("x", 0, 1), ("b", 4, 1))
    assert step_index.index[:6, FLAG].tolist() == [0, 7, 7, 0, 8, 0]


def test_nothing_stays_in_the_index_when_an_asker_is_gone() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = request("a", EVERYWHERE, (EVERYWHERE,))
    step(step_index, pool, ("a", 0, 10))
    assert not step_index.clean
    del step_index.requests["a"]
    plan = step(step_index, pool, ("b", 0, 20))
    assert plan.tokens == 0
    assert step_index.clean
    assert not step_index.index.any()


def test_a_preempted_request_writes_the_same_rows_again() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = one = request("a", EVERYWHERE)
    step(step_index, pool, ("a", 0, 8))
    step(step_index, pool, ("a", 8, 1))
    plan = step(step_index, pool, ("a", 0, 9))
    assert [(s.start, s.stop) for s in plan.slices] == [(8, 9), (0, 9)], "its open page, then all of it again"
    assert one.seen == 9
    assert one.failed is None


def test_rows_that_were_never_computed_void_the_request_and_only_that() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["cached"], step_index.requests["b"] = request("cached", EVERYWHERE), request("b", EVERYWHERE)
    plan = step(step_index, pool, ("cached", 16, 4), ("b", 0, 4))
    assert [s.request.wire.name for s in plan.slices] == ["b"]
    assert "before position 16 were never computed" in str(step_index.requests["cached"].failed)
    assert step_index.index[:4, GROUP].tolist() == [0] * 4


def test_a_void_capture_goes_on_being_steered() -> None:
    """Its keys and values are cached under the salt of its steering: they must be steered ones."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = one = request("a", EVERYWHERE, (EVERYWHERE,), slot=5)
    one.failed = "rows are missing"
    plan = step(step_index, pool, ("a", 0, 3))
    assert plan.slices == []
    assert step_index.index[:3, ENTRIES].tolist() == [5, 5, 5]


def test_a_slice_says_how_many_rows_are_there_with_it_and_not_with_the_next() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = request("a", Positions(((0, 2), (4, 5), (7, 10))))
    assert [part.n_rows for part in step(step_index, pool, ("a", 0, 9)).slices] == [2, 3, 5]
    assert [part.n_rows for part in step(step_index, pool, ("a", 0, 10)).slices] == [5, 5, 6], "fed again: none is lost"


def test_steps_too_many_have_no_rows() -> None:
    """An asynchronous scheduler runs on until it hears that the text has ended."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = request("a", EVERYWHERE, most=9)
    step(step_index, pool, ("a", 0, 8))
    assert len(step(step_index, pool, ("a", 8, 1)).slices) == 1, "the last row there can be closes the page"
    for at in (9, 10, 11):
        assert step(step_index, pool, ("a", at, 1)).slices == []
        assert not step_index.index[:, GROUP].any()


POSITIONS = st.builds(
    lambda cuts: Positions.of(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)),
    st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
)


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, int, int]]]:
    """Steps of up to four requests: chunked prompts, decoding for a while, preemption to 0, in any batch order."""
    at = dict.fromkeys("abcd", 0)
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        decode = draw(st.integers(0, 2)) == 0
        for name in names:
            if draw(st.integers(0, 9)) == 0:
                at[name] = 0  # preempted: everything is computed again
        for _ in range(draw(st.integers(1, 9)) if decode else 1):
            parts = []
            for name in names:
                count = 1 if decode else draw(st.integers(1, 12))
                parts.append((name, at[name], count))
                at[name] += count
            steps.append(parts)
    return steps


class Oracle:
    """Where every captured row was written last, and whether it was handed out since."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], int] = {}
        self.owed: set[tuple[str, int]] = set()
        self.free: set[int] = set()

    def write(self, name: str, position: int, cell: int) -> None:
        assert cell not in self.written.values(), "no two rows share a cell"
        self.written[name, position] = cell
        self.owed.add((name, position))

    def hand_out(self, parts: list[RowSlice]) -> None:
        for part in parts:
            for i, position in enumerate(range(part.start, part.stop)):
                key = part.request.wire.name, position
                if self.written[key] == part.cell + 2 * i:  # else it was fed again meanwhile
                    self.owed.discard(key)
            assert part.request.wire.capture is not None
            assert part.n_rows >= part.request.wire.capture.positions.count(part.stop)
            first, count = part.freed
            free = set(range(first, first + count))
            assert not free & self.free, "nothing is given back twice"
            assert not free & {self.written[key] for key in self.owed}, "nor before its rows are out"
            self.free |= free


CHOSEN = st.lists(POSITIONS | st.just(EVERYWHERE), min_size=4, max_size=4)


@settings(max_examples=200, deadline=None)
@given(histories(), CHOSEN, CHOSEN, st.booleans(), st.sampled_from([4, 64]), st.sampled_from([0, 40]))
@pytest.mark.slow
def test_every_index_row_says_what_an_oracle_says(
    history: list[list[tuple[str, int, int]]],
    captured: list[Positions],
    steered: list[Positions],
    tight: bool,
    page: int,
    shared: int,
) -> None:
    step_index, oracle = StepIndex(TOKENS, COLUMNS, page_rows=page, shared_rows=shared), Oracle()
    pool = TightPool(step_index) if tight else Pool()
    for i, name in enumerate("abc"):  # "d" asks for nothing
        step_index.requests[name] = request(name, captured[i] if i else None, (steered[i],), most=50, slot=1 + i)
    for parts in history:
        plan = step(step_index, pool, *parts)
        if isinstance(pool, TightPool):  # sent already: rows of this step cannot be among them
            oracle.hand_out(pool.sent)
            pool.sent = []
        token = 0
        for name, at, count in parts:
            for position in range(at, at + count):
                row, number = step_index.index[token], "abcd".index(name)
                wanted = name in "bc" and position in captured[number] and position < 50
                entry = [1 + number, 1 + number] if name in "abc" and position in steered[number] else [0, 0]
                assert row[GROUP] == (3 if wanted else 0)
                assert row[ENTRIES : ENTRIES + 6].tolist() == [*entry, 0, 0, 0, 0]
                assert not row[ENTRIES + 6 :].any()
                if wanted:
                    oracle.write(name, position, int(row[CELL]))
                token += 1
        assert not step_index.index[token:].any()
        oracle.hand_out(plan.slices)
    for name in "abc":
        oracle.hand_out(step_index.forget(name)[1])
    assert not oracle.owed
    assert oracle.free == set(range(1, pool.next))


@pytest.mark.parametrize("captured", [Positions(((0, 1),)), EVERYWHERE])
@pytest.mark.parametrize("group", [0, 3])
def test_steering_ends_where_it_should_whatever_is_captured(captured: Positions, group: int) -> None:
    """Also where nothing but the steering changes: no page ends there."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.requests["a"] = request("a", captured, (Positions(((0, 20),)),), most=20)
    step_index.requests["a"].group = group
    step(step_index, pool, ("a", 0, 8))
    for at in range(8, 24):
        step(step_index, pool, ("a", at, 1))
        assert bool(step_index.index[0, ENTRIES]) == (at < 20)


def test_a_text_with_all_its_rows_may_have_a_page_open_again() -> None:
    """After a preemption: the code that forgets it must look at both."""
    step_index, pool = StepIndex(TOKENS, COLUMNS, page_rows=8), Pool()
    step_index.requests["a"] = request("a", Positions(((0, 5),)), most=20)
    step_index.requests["a"].max_rows = 5
    step(step_index, pool, ("a", 0, 5))
    assert step_index.requests["a"].complete
    for at, count in ((0, 4), (4, 1), (5, 1)):
        step(step_index, pool, ("a", at, count))
    assert step_index.requests["a"].complete
    assert step_index.requests["a"].page is not None


def test_decoding_requests_cost_no_python_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a batch decodes, no request is looked up by name."""
    step_index, pool = StepIndex(TOKENS, COLUMNS, page_rows=16), Pool()
    for i in range(20):
        step_index.requests[str(i)] = request(str(i), EVERYWHERE, (EVERYWHERE,))
        step(step_index, pool, (str(i), 0, 3))
    step(step_index, pool, *((str(i), 3, 1) for i in range(20)))
    monkeypatch.setattr(step_index, "requests", range(20))  # their number, without requests
    done = []
    for at in range(4, 3 + 16):
        done += step(step_index, pool, *((str(i), at, 1) for i in range(20))).slices
    assert [(part.start, part.stop) for part in done] == [(3, 19)] * 20


def test_a_batch_that_goes_on_is_looked_at_once() -> None:
    """For any number of steps and any other requests in the batch."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    for name in "ab":
        step_index.requests[name] = request(name, None, (EVERYWHERE,))
    parts = ("a", 3), ("plain", 90), ("b", 7)
    step(step_index, pool, *((name, at, 1) for name, at in parts))
    known = step_index._fast
    assert known is not None
    for later in range(1, 200):
        assert step(step_index, pool, *((name, at + later, 1) for name, at in parts)).same
        assert step_index._fast is known
    step(step_index, pool, *((name, at + 201, 1) for name, at in parts))  # a position was left out
    assert step_index._fast is not known


def test_who_begins_again_in_its_place_is_not_taken_for_one_who_goes_on() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    for name in "ab":
        step_index.requests[name] = request(name, EVERYWHERE)
    step(step_index, pool, ("a", 0, 3), ("b", 0, 3))
    for at in range(3, 10):
        step(step_index, pool, ("a", at, 1), ("b", at, 1))
    plan = step(step_index, pool, ("a", 5, 1), ("b", 10, 1))
    assert plan.recomputed == 1
    assert [(part.start, part.stop) for part in plan.slices] == [(3, 10)]  # of its page until then
    (rest,) = step_index.forget("b")[1]
    assert (rest.start, rest.stop) == (3, 11)
    (rest,) = step_index.forget("a")[1]
    assert (rest.start, rest.stop) == (5, 6)


def test_prompts_side_by_side_have_cells_side_by_side() -> None:
    """Those of one group that also are neighbours in the batch are written at once."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    for name in "abce":
        step_index.requests[name] = request(name, EVERYWHERE)
    step_index.requests["c"].group = 4
    plan = step(step_index, pool, ("a", 0, 3), ("b", 0, 2), ("c", 0, 2), ("d", 0, 2), ("e", 0, 3))
    first = plan.slices[0].cell
    assert [part.cell - first for part in plan.slices] == [0, 6, 10, 14]
    assert (step_index.index[:12, CELL] - first).tolist() == [0, 2, 4, 6, 8, 10, 12, -first, -first, 14, 16, 18]
    assert step_index.index[:12, GROUP].tolist() == [3, 3, 3, 3, 3, 4, 4, 0, 0, 3, 3, 3]


def test_the_index_is_sent_once_a_page() -> None:
    """Between two pages the device moves the cells on by itself."""
    step_index, pool = StepIndex(TOKENS, COLUMNS, page_rows=8), Pool()
    for name in "ab":
        step_index.requests[name] = request(name, EVERYWHERE, most=40)
    step(step_index, pool, ("a", 0, 3), ("b", 0, 3))
    sent, sizes = [], []
    for at in range(3, 40):
        plan = step(step_index, pool, ("a", at, 1), ("b", at, 1))
        assert step_index.index[:2, STRIDE].tolist() == [2, 2]
        sent += [] if plan.advance or plan.same else [at]
        sizes += [part.stop - part.start for part in plan.slices if part.request.wire.name == "a"]
    assert sent == [3, 11, 19, 27, 35]
    assert sizes == [8, 8, 8, 8, 5]


def test_pages_are_as_long_as_those_who_ask_leave_room_for() -> None:
    """Not as all who might: few requests in an engine for many have long ones."""
    step_index, pool = StepIndex(TOKENS, COLUMNS, page_rows=4, shared_rows=80), Pool()
    sizes = []
    for i in range(30):
        step_index.requests[str(i)] = request(str(i), EVERYWHERE)
        step(step_index, pool, (str(i), 0, 1))
        page = step_index.requests[str(i)].page
        assert page is not None
        sizes.append(page.size)
    assert sizes == [20] * 4 + [16, 13, 11, 10, 8, 8, 7, 6, 6] + [5] * 3 + [4] * 14
    assert StepIndex(TOKENS, COLUMNS, page_rows=4, shared_rows=80_000).page == PAGE


@pytest.mark.parametrize("seed", range(40))
def test_the_rows_of_a_step_always_fit_the_smallest_pool(seed: int) -> None:
    """Requests come, read prompts in parts, decode and go; nothing is copied before the room is needed."""
    chance, requests = random.Random(seed), random.Random(seed).choice([1, 3, 8, 40])
    page, most = smallest_pool(TOKENS, requests)
    step_index, free, waiting = StepIndex(TOKENS, COLUMNS, page, TOKENS // 4), Cells(2 * most), list[RowSlice]()

    def reserve(cells: int) -> int:
        if (first := free.take(cells)) is None:
            for one in step_index.requests.values():
                waiting.extend(step_index.close_page(one))
            while waiting:
                free.give(*waiting.pop().freed)
            first = free.take(cells)
        assert first is not None
        return first

    running, names = dict[str, tuple[int, int]](), itertools.count()  # prompt, fed
    for _ in range(150):
        while len(running) < requests and chance.random() < 0.5:
            name = f"r{next(names)}"
            step_index.admit(name, request(name, EVERYWHERE, most=chance.choice([60, 10_000])))
            running[name] = chance.randint(1, 3 * TOKENS), 0
        parts, left = list[tuple[str, int, int]](), TOKENS
        for name, (prompt, fed) in running.items():
            if count := min(left, max(1, prompt - fed)):
                parts.append((name, fed, count))
                running[name], left = (prompt, fed + count), left - count
        starts = np.cumsum([0, *(count for _, _, count in parts)])
        at = np.array([fed for _, fed, _ in parts])
        waiting += step_index.plan([name for name, *_ in parts], starts, at, reserve, waiting.extend).slices
        for name in [name for name in running if chance.random() < 0.02]:
            del running[name]
            waiting += step_index.forget(name)[1]


def test_a_request_is_the_same_behind_the_wire() -> None:
    coefficients = {(3, "resid_post"): (0.0, 1.0, 1.0, float("-inf"), 2.5)}
    column = WireColumn(b"\x00\xff", b"\x07", coefficients, EVERYWHERE, 0)  # type: ignore[arg-type]
    capture = WireCapture(((1, "resid_mid"), (2, "attn_out")), Positions(((0, 4),)), True, "mean", 4, 17)
    watch = WireWatch("p", (1, "resid_mid"), Positions(((2, 9),)), 5, (0, 2), RULES, 4, 17, 640)
    body = WireBody((column,), capture, watch)
    envelope = Envelope("r0.0", ("/somewhere", 1 << 30), 4096, 2**61 + 1, msgpack.encode(body), (b"\x01\x02",))
    wire = Wire.unpack(envelope.entry()[NAME])
    assert (wire.name, wire.arena, wire.offset, wire.owner) == ("r0.0", ("/somewhere", 1 << 30), 4096, 2**61 + 1)
    assert (wire.capture, wire.watch) == (capture, watch)
    assert wire.columns == (structs.replace(column, content=b"\x01\x02"),)
    assert wire.without_content().columns == (column,)


def test_who_is_met_late_is_seen_in_the_next_step() -> None:
    """Also where all others go on as they did."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.admit("a", request("a", EVERYWHERE))
    step(step_index, pool, ("a", 0, 3))
    step(step_index, pool, ("a", 3, 1), ("b", 0, 1))
    step_index.admit("b", request("b", Positions(((1, END),))))
    assert step(step_index, pool, ("a", 4, 1), ("b", 1, 1)).tokens == 2
    assert step_index.index[:2, GROUP].all()
    assert step_index.requests["a"].page.count == 2  # type: ignore[union-attr]
    assert step_index.requests["b"].page.count == 1  # type: ignore[union-attr]


def test_who_has_all_its_rows_costs_nothing_more() -> None:
    """A resting StepIndex is not called again until a new request comes."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.admit("a", request("a", Positions(((2, 3),))))
    assert step(step_index, pool, ("a", 0, 3), ("plain", 0, 3)).busy
    assert not step_index.resting
    assert not step(step_index, pool, ("a", 3, 1), ("plain", 3, 1)).busy
    assert step_index.resting
    step_index.admit("c", request("c", None, (EVERYWHERE,)))
    assert not step_index.resting
    assert step(step_index, pool, ("a", 4, 1), ("c", 0, 2)).busy
    step(step_index, pool, ("a", 5, 1), ("c", 2, 1))
    assert not step_index.resting  # one of them goes on


def test_a_neighbour_that_stops_feeding_its_prompt_moves_everybodys_tokens() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.admit("a", request("a", None, (EVERYWHERE,)))
    step(step_index, pool, ("plain", 0, 2), ("a", 0, 4))
    step(step_index, pool, ("plain", 2, 3), ("a", 4, 1))
    assert step_index.index[:5, ENTRIES].tolist() == [0, 0, 0, 1, 0]
    step(step_index, pool, ("plain", 5, 1), ("a", 5, 1))
    assert step_index.index[:5, ENTRIES].tolist() == [0, 1, 0, 0, 0]


def test_a_prompt_that_was_steered_is_steered_again_when_it_is_computed_again() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.admit("a", request("a", None, (Positions(((0, 3),)),)))
    step(step_index, pool, ("a", 0, 3))
    for at in range(3, 6):
        assert not step(step_index, pool, ("a", at, 1)).busy
        assert not step_index.resting
    again = step(step_index, pool, ("a", 0, 6))  # preempted, and back
    assert again.busy
    assert again.recomputed == 1
    assert step_index.index[:6, ENTRIES].tolist() == [1, 1, 1, 0, 0, 0]


def watched(positions: Positions, captured: Positions | None, columns: tuple[Positions, ...] = ()) -> TrackedRequest:
    found = request("w", captured, columns, most=200)
    watch = WireWatch("p", (0, "resid_post"), positions, 5, None, RULES, 5, 200, 0)
    gated = tuple(structs.replace(column, gate=1) for column in found.wire.columns)
    found.wire = structs.replace(found.wire, watch=watch, columns=gated)
    found.watched = WatchState(watch, None, [40] * len(columns), 7, 8, positions.count(200))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("captured", [None, EVERYWHERE, Positions(((1, 4), (9, END)))])
@pytest.mark.parametrize("read", [EVERYWHERE, Positions(((2, 5), (8, 14))), Positions(((6, END),))])
def test_watched_tokens_have_a_group_of_their_own_and_positions_that_move_on(
    read: Positions, captured: Positions | None
) -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    step_index.admit("w", watched(read, captured))
    step_index.admit("other", request("other", EVERYWHERE))
    at = 0
    for count in [3, 4, *[1] * 30]:
        plan = step(step_index, pool, ("other", at, count), ("w", at, count))
        found = []
        for _, token, start, stop in plan.watched_rows.parts if plan.watched_rows else ():
            found += [(token + i, start + i + plan.watched_rows.offset) for i in range(stop - start)]  # type: ignore[union-attr]
        wanted = [(count + i, at + i) for i in range(count) if at + i in read]
        assert found == wanted
        for i in range(count):
            both = captured is not None and at + i in captured
            group = (8 if both else 7) if at + i in read else 3 if both else 0
            assert step_index.index[count + i, GROUP] == group
        at += count


def test_what_is_computed_again_has_the_gates_it_had() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    one = watched(EVERYWHERE, None, (Positions(((3, END),)),))
    step_index.admit("w", one)
    step(step_index, pool, ("w", 0, 3))
    for at in range(3, 12):
        step(step_index, pool, ("w", at, 1))
        assert step_index.index[0, ENTRIES + 2] == 40, "the gate on the device"
    assert one.watched is not None
    one.watched.switch(1, 4, on=True)
    one.watched.switch(1, 6, on=False)
    one.watched.switch(1, 10, on=True)
    step(step_index, pool, ("w", 0, 8))
    step(step_index, pool, ("w", 8, 5))
    fed = step_index.index[:5, [ENTRIES + 1, ENTRIES + 2]].tolist()
    assert fed == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 0]], "open from row 11 on"
    step(step_index, pool, ("w", 13, 1))
    assert step_index.index[0, ENTRIES + 2] == 40
    step(step_index, pool, ("w", 0, 8))
    assert step_index.index[:8, ENTRIES + 1].tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    assert not step_index.index[:8, ENTRIES + 2].any(), "always open"


def test_what_is_computed_again_token_by_token_has_the_gates_it_had() -> None:
    """Such steps look alike, but each row has an entry of its own."""
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    one = watched(EVERYWHERE, None, (Positions(((3, END),)),))
    step_index.admit("w", one)
    step(step_index, pool, ("w", 0, 9))
    assert one.watched is not None
    one.watched.switch(1, 4, on=True)
    one.watched.switch(1, 6, on=False)
    step(step_index, pool, ("w", 0, 3))
    found = []
    for at in range(3, 11):
        step(step_index, pool, ("w", at, 1))
        found.append(tuple(step_index.index[0, [ENTRIES + 1, ENTRIES + 2]].tolist()))
    assert found == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 0), (0, 0), (1, 40), (1, 40)]


def test_a_switched_steering_whose_rules_nobody_reads_stays_off() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    one = watched(EVERYWHERE, None, (EVERYWHERE,))
    one.watched = None
    step_index.admit("w", one)
    assert not step(step_index, pool, ("w", 0, 3)).steers
    assert not step_index.index.any()


def test_watched_rows_that_never_came_are_an_error() -> None:
    step_index, pool = StepIndex(TOKENS, COLUMNS), Pool()
    one = watched(EVERYWHERE, None)
    step_index.admit("w", one)
    assert step(step_index, pool, ("w", 4, 3)).failed == [one]
    assert one.failed is not None
    assert "watched rows before position 4" in one.failed
