"""Who may write to a region, and until when; with the pool of a CPU and with the queue of the GPU's pool, whose events
are played here."""

import contextlib
import random
import types
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from steerscope.capture.transport import HEADER, LEFT, MET, OWNER, ROWS, Arena, Region, Regions
from steerscope.engines.vllm.cuda import row_copies
from steerscope.engines.vllm.cuda.row_copies import Pace, RowCopies
from steerscope.engines.vllm.wire import Wire, WireCapture
from steerscope.engines.vllm.worker.admission import clear_overflow_flags
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.device import Cells, Reductions, RowPool
from steerscope.engines.vllm.worker.index_layout import FLAG, PRECOMPUTED
from steerscope.engines.vllm.worker.requests import Page, RowSlice, TrackedRequest, make_slice
from steerscope.engines.vllm.worker.step_index import StepIndex
from steerscope.engines.vllm.worker.worker import WorkerTaps
from steerscope.specs.tokens import EVERYWHERE

HIDDEN = 8


@pytest.fixture
def regions(tmp_path: Path) -> Regions:
    return Regions(Arena(tmp_path / "arena", 1 << 20, create=True))


def deliver(regions: Regions, pool, writes: bool = True) -> Delivery:
    made = Delivery(pool, Reductions(pool.cells), 0, writes)
    made.arena = regions.arena
    return made


SIZES = torch.device("cpu"), 64, 4, HIDDEN, torch.float32, np.zeros((4, 16), np.int32)


def host_pool() -> RowPool:
    return RowPool(*SIZES)


def asking(region: Region, name: str = "a", rows: int = 4, more: int = 1) -> TrackedRequest:
    """A text with `rows` rows that may get `more`."""
    capture = WireCapture(((0, "resid_post"),), EVERYWHERE, False, None, 0, rows + more)
    return TrackedRequest(Wire(name, None, region.offset, region.owner, (), capture), [], 1, 1)


def allocate(regions: Regions, rows: int = 4) -> Region:
    assert regions.used >= 0  # takes back what was left
    region = regions.allocate(rows * HIDDEN * 4, (0,))
    assert region is not None
    return region


def test_rows_arrive_then_the_count_then_the_worker_leaves(regions):
    region, pool = allocate(regions), host_pool()
    delivery, request = deliver(regions, pool), asking(region)
    delivery.find_region(request)
    delivery.reserve_rows(request)
    assert region.counters[MET] == 1
    cell = pool.take(3)
    pool.cells[cell : cell + 3] = torch.arange(3.0).unsqueeze(1)
    delivery.flush([RowSlice(request, 0, 3, cell, 3, 3)])
    assert region.counters[ROWS] == 3
    assert region.tensor((3, HIDDEN), torch.float32)[:, 0].tolist() == [0, 1, 2]
    assert pool.take(64) is not None  # the cells came back
    delivery.leave(request)
    assert region.counters[LEFT] == 1


def test_a_mean_is_written_at_the_end_and_rows_that_come_later_hurt_nobody(regions):
    first, second, pool = allocate(regions), allocate(regions), host_pool()
    delivery, requests = deliver(regions, pool), [asking(first, "a"), asking(second, "b")]
    for request in requests:
        request.wire = structs.replace(
            request.wire, capture=structs.replace(request.wire.capture, reduce="mean", hold=1)
        )
        delivery.find_region(request)
        delivery.reserve_rows(request)
    cell = pool.take(6)
    pool.cells[cell : cell + 6] = torch.arange(6.0).unsqueeze(1)
    delivery.flush([RowSlice(one, 0, 3, cell + 3 * i, 3, 3) for i, one in enumerate(requests)])
    delivery.complete([["a", 2, first.offset, False]])  # the third row was one step too many
    assert (first.counters[ROWS], first.counters[LEFT]) == (2, 1)
    assert torch.equal(first.tensor((HIDDEN,), torch.float32), torch.full((HIDDEN,), 0.5))
    late = pool.take(2)
    delivery.flush([RowSlice(requests[0], 3, 4, late, 4, 1), RowSlice(requests[1], 3, 4, late + 1, 4, 1)])
    delivery.complete([["b", 4, second.offset, False]])
    assert second.counters[ROWS] == 4
    assert second.failure is None
    assert pool.take(64) == 0  # every cell came back


def reduces(delivery, region, name):
    """A request that reduces and has all its rows."""
    request = asking(region, name, rows=3, more=0)
    request.wire = structs.replace(request.wire, capture=structs.replace(request.wire.capture, reduce="mean", hold=1))
    delivery.find_region(request)
    delivery.reserve_rows(request)
    cell = delivery.pool.take(3)
    delivery.pool.cells[cell : cell + 3] = torch.arange(3.0).unsqueeze(1)
    delivery.flush([make_slice(request, 0, 3, cell, 3)])
    return request


def test_nothing_is_kept_of_a_reduction_that_no_client_wants_any_more(regions):
    delivery = deliver(regions, host_pool())
    texts = {name: allocate(regions) for name in ("runs", "gone", "short", "open")}
    requests = {name: reduces(delivery, region, name) for name, region in texts.items()}
    for name in ("gone", "short", "open"):
        delivery.leave(requests[name])
        assert requests[name].left
    texts["runs"].counters[OWNER] += 1  # withdrawn, but the worker still writes to it
    texts["gone"].counters[OWNER] += 1
    delivery.hold_regions({"short"})
    delivery.complete([["short", 2, texts["short"].offset, False]])
    assert texts["short"].counters[ROWS] == 2
    assert torch.equal(texts["short"].tensor((HIDDEN,), torch.float32), torch.full((HIDDEN,), 0.5))
    reduces(delivery, allocate(regions), "next")
    assert list(delivery.reducing) == ["runs", "open", "next"]


def test_finish_forgets_requests_with_an_open_page_at_once_and_others_with_the_next_step(regions):
    """A text that has all its rows may be computing one of them again, after it was preempted."""
    taps, pool = WorkerTaps.__new__(WorkerTaps), host_pool()
    taps.step_index, taps.pool, taps.delivery = StepIndex(4, 1), pool, deliver(regions, pool)
    taps.admission = types.SimpleNamespace(release=lambda _: None)
    texts = {name: allocate(regions) for name in ("open", "whole", "short")}
    for name, region in texts.items():
        request = asking(region, name, rows=2, more=0)
        taps.delivery.find_region(request)
        taps.delivery.reserve_rows(request)
        request.flushed = 1 if name == "short" else 2
        if name == "open":
            request.page = Page(pool.take(2), 1, 2)
        taps.step_index.admit(name, request)
    taps.finish([[name, 2, region.offset, False] for name, region in texts.items()])
    assert list(taps.step_index.requests) == ["whole"]
    assert all(region.counters[LEFT] == 1 for region in texts.values())
    assert pool.take(64) == 0  # its cells came back


def test_a_withdrawn_request_is_never_met(regions):
    """And what it was promised is free at once."""
    region = allocate(regions)
    request, offset = asking(region), region.offset
    region.withdraw()
    assert region.counters[LEFT] == 1
    del region
    other = allocate(regions)
    assert other.offset == offset
    delivery = deliver(regions, host_pool())
    delivery.find_region(request)
    assert request.left
    assert request.wire.capture is None
    delivery.leave(request)
    delivery.fail(request, "too late")
    assert other.counters[MET] == other.counters[LEFT] == 0
    assert other.failure is None


def test_one_that_was_met_is_left_by_the_worker_alone(regions):
    region = allocate(regions)
    request, delivery, offset = asking(region), deliver(regions, host_pool()), region.offset
    delivery.find_region(request)
    region.withdraw()
    assert region.counters[LEFT] == 0
    del region
    other = allocate(regions)
    assert other.offset != offset  # still written to, perhaps
    delivery.leave(request)
    assert allocate(regions).offset == offset


def test_withdrawn_between_the_two_looks(regions, monkeypatch):
    """The client withdraws after the worker's first look, before it says that it has met the request."""
    region = allocate(regions)
    request, delivery = asking(region), deliver(regions, host_pool())
    real = delivery._set

    def racing(*args):
        region.withdraw()
        real(*args)

    monkeypatch.setattr(delivery, "_set", racing)
    delivery.find_region(request)
    assert request.left
    assert request.wire.capture is None
    assert region.counters[LEFT] == 1  # the client saw no worker there, and left for us


def test_a_late_failure_is_not_written_into_another_request(regions):
    """Ranks that do not write rows may find out later than the one that does."""
    region = allocate(regions)
    request, speaks, listens = (
        asking(region),
        deliver(regions, host_pool()),
        deliver(regions, host_pool(), writes=False),
    )
    twin = asking(region)
    speaks.find_region(request)
    listens.find_region(twin)
    speaks.leave(request)
    offset = region.offset
    del region
    other = allocate(regions)
    assert other.offset == offset
    listens.fail(twin, "too late")
    assert other.failure is None


def test_a_rank_that_only_listens_writes_no_counter(regions):
    region = allocate(regions)
    request, delivery = asking(region), deliver(regions, host_pool(), writes=False)
    delivery.find_region(request)
    delivery.leave(request)
    assert not any(region.counters[:OWNER])
    assert request.left


# --- cells


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 30)), max_size=60))
def test_cells_belong_to_one_at_a_time_and_come_together_again(asked: list[tuple[int, int]]) -> None:
    cells, held = Cells(200), dict[int, int]()
    for count, gone in asked:
        if (first := cells.take(count)) is not None:
            assert 0 <= first <= 200 - count
            assert all(first + count <= other or other + size <= first for other, size in held.items())
            held[first] = count
        else:
            free = [0, *(end for first, size in sorted(held.items()) for end in (first, first + size)), 200]
            assert max(b - a for a, b in zip(free[::2], free[1::2], strict=True)) < count
        for other in sorted(held)[gone : gone + 1]:
            cells.give(other, held.pop(other))
    for other, size in held.items():
        cells.give(other, size)
    assert cells.take(200) == 0


def test_pages_leave_room_for_the_prompts_of_whole_steps() -> None:
    """Which come one after the other, with room for two, while texts that were read before are being written."""
    cells = Cells(2300)
    steps = deque([cells.take(1000)])
    for _ in range(20):
        steps.append(cells.take(1000))
        assert None not in steps
        cells.give(steps.popleft(), 1000)
        assert all(cells.take(5) is not None for _ in range(3))


# --- the queue of the GPU's pool


class PlayedEvent:
    """Comes to pass when `happened` says so."""

    happened = True

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self, *_: object) -> None: ...

    def elapsed_time(self, other: "PlayedEvent") -> float:
        assert self.timed
        assert other.timed
        return 1.0

    def query(self) -> bool:
        return PlayedEvent.happened

    def synchronize(self) -> None:
        PlayedEvent.happened = True


class SideStream:
    """A CUDA stream that waits for nothing, unless a test replaces `wait_event`."""

    cuda_stream = 0

    def __init__(self, _device: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


@pytest.fixture
def cuda_pool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    monkeypatch.setattr(torch.cuda, "Stream", SideStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(row_copies, "runtime_copy", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(PlayedEvent, "happened", True)
    monkeypatch.setattr(row_copies, "_FIRST_BYTES", 2 * HIDDEN * 4)  # two rows per step
    monkeypatch.setattr(row_copies, "_MIN_COPY_BYTES", 0)
    return RowCopies(*SIZES)


def test_rows_leave_at_the_pace_and_count_when_they_are_there(cuda_pool, regions):
    region = allocate(regions)
    delivery, request = deliver(regions, cuda_pool), asking(region)
    delivery.find_region(request)
    delivery.reserve_rows(request)
    cell = cuda_pool.take(4)
    cuda_pool.cells[cell : cell + 4] = torch.arange(4.0).unsqueeze(1)
    delivery.flush([RowSlice(request, 0, 4, cell, 4, 4)])
    delivery.leave(request)
    PlayedEvent.happened = False
    cuda_pool.copy_some(1)
    assert cuda_pool.backlog == 2 * HIDDEN * 4  # half of it is under way
    cuda_pool.copy_some(1)
    assert cuda_pool.backlog == 0
    assert region.counters[ROWS] == region.counters[LEFT] == 0  # but not there
    assert cuda_pool.take(61) is None
    PlayedEvent.happened = True
    cuda_pool.copy_some(1)
    assert (region.counters[ROWS], region.counters[LEFT]) == (4, 1)
    assert cuda_pool.take(64) is not None
    assert region.tensor((4, HIDDEN), torch.float32)[:, 0].tolist() == [0, 1, 2, 3]


def test_rows_are_cut_where_the_pace_ends_and_no_crumbs_are_left(cuda_pool, regions, monkeypatch):
    region, row = allocate(regions, rows=5), HIDDEN * 4
    delivery, request = deliver(regions, cuda_pool), asking(region, rows=5)
    delivery.find_region(request)
    delivery.reserve_rows(request)
    cell = cuda_pool.take(5)
    cuda_pool.cells[cell : cell + 5] = torch.arange(5.0 * HIDDEN).view(5, HIDDEN)
    monkeypatch.setattr(row_copies, "_FIRST_BYTES", 48)  # bytes
    monkeypatch.setattr(row_copies, "_MIN_COPY_BYTES", 16)
    delivery.flush([RowSlice(request, 0, 3, cell, 3, 3), RowSlice(request, 3, 5, cell + 3, 5, 2)])
    waiting, there = [], []
    for _ in range(5):
        cuda_pool.copy_some(1)
        waiting.append(cuda_pool.backlog)
        there.append(int(region.counters[ROWS]))
    assert waiting == [5 * row - 48, 2 * row, 0, 0, 0]
    assert there == [0, 0, 3, 5, 5]
    assert region.tensor((5, HIDDEN), torch.float32).flatten().tolist() == list(range(5 * HIDDEN))


def test_what_a_worker_completes_is_written_and_left_once(cuda_pool, regions):
    region, row = allocate(regions, rows=12), HIDDEN * 4
    delivery, request = deliver(regions, cuda_pool), asking(region, rows=12, more=0)
    delivery.find_region(request)
    delivery.reserve_rows(request)
    PlayedEvent.happened = False
    for start, stop in ((0, 4), (4, 6), (6, 12)):
        request.flushed = stop
        delivery.flush([RowSlice(request, start, stop, cuda_pool.take(stop - start), stop, stop - start)])
        assert cuda_pool.backlog == stop * row
    assert region.counters[ROWS] == 0
    delivery.hold_regions({"a"})
    delivery.complete([["a", 12, region.offset, False]], [request])
    assert (region.counters[ROWS], region.counters[LEFT]) == (12, 1)
    del region
    other = allocate(regions, rows=12)
    delivery.flush([RowSlice(request, 11, 12, cuda_pool.take(1), 12, 1)])  # one row comes again
    assert cuda_pool.backlog == 0
    delivery.leave(request)  # the next step says that it is gone: its region is another's
    assert not other.counters[LEFT]


@pytest.mark.parametrize(("sent", "others"), [(4, False), (1, False), (4, True)])
def test_who_is_asked_for_waits_for_no_forward_behind_its_own(cuda_pool, regions, monkeypatch, sent, others):
    """The device would stand still behind one that has just begun. Rows of before leave without it, too."""
    launched, awaited, over = [1], [0], [1]  # forwards: so far, before what the side stream does, that have ended

    class Event(PlayedEvent):
        def record(self, stream: object = None) -> None:
            self.behind = launched[0] if stream is None else awaited[0]

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            assert self.behind <= over[0]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(row_copies, "_FIRST_BYTES", sent * HIDDEN * 4)
    cuda_pool._forward_done = Event()
    cuda_pool._side.wait_event = lambda event: awaited.append(max(awaited.pop(), event.behind))
    mine, row = sending(regions, cuda_pool, 4), HIDDEN * 4
    cuda_pool.copy_some(1)
    assert cuda_pool.backlog == (4 - sent) * row
    launched[0] = 2
    other = sending(regions, cuda_pool, 3, "b")
    if others:  # theirs are under way, behind the other forward
        cuda_pool.copy_some(1)
    cuda_pool.wait_for_copies({"a"})
    assert (mine.counters[ROWS], other.counters[ROWS]) == (4, 0)
    assert (cuda_pool.backlog, awaited) == ((0, [2]) if others else (3 * row, [1]))
    over[0] = 2
    cuda_pool.wait_for_copies()
    assert other.counters[ROWS] == 3


def sending(regions, pool, rows: int, name: str = "a"):
    """A request with this many rows that wait to be copied."""
    region = allocate(regions, rows=rows)
    delivery, request = deliver(regions, pool), asking(region, name, rows)
    delivery.find_region(request)
    delivery.reserve_rows(request)
    delivery.flush([RowSlice(request, 0, rows, pool.take(rows), rows, rows)])
    return region


def test_where_nothing_arrives_nothing_more_is_sent_and_nothing_is_lost(cuda_pool, regions):
    region, row, waiting = sending(regions, cuda_pool, 12), HIDDEN * 4, []
    PlayedEvent.happened = False
    for _ in range(5):
        cuda_pool.copy_some(1)
        waiting.append(cuda_pool.backlog // row)
    assert waiting == [10, 8, 6, 6, 6], "three parts are under way: no more until one is there"
    PlayedEvent.happened = True
    while cuda_pool.backlog:
        cuda_pool.copy_some(1)
    cuda_pool.copy_some(1)
    assert region.counters[ROWS] == 12


class Bus:
    """A device whose steps end with a small copy, behind the rows that are on their way; the host is a step ahead."""

    def __init__(self, pool, monkeypatch, row_ms: float) -> None:
        self.pool, self.main, self.side, self.now, bus = pool, 0.0, 0.0, 0.0, self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None: ...

            def record(self, stream: object = None) -> None:
                self.at = bus.main if stream is None else bus.side

            def query(self) -> bool:
                return self.at <= bus.now

            def elapsed_time(self, other: "Event") -> float:
                assert max(self.at, other.at) <= bus.now, "not there yet: the driver would raise"
                return other.at - self.at

        def wait(event: Event) -> None:
            self.side = max(self.side, event.at)

        def copy(_target: int, _source: int, size: int, _stream: int) -> None:
            self.side += row_ms * size / (HIDDEN * 4)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(row_copies, "_MIN_TIMED_BYTES", 1)
        pool._side.wait_event, pool._copy_bytes, pool._forward_done = wait, copy, Event()

    def step(self, tokens: int, ms: float) -> tuple[float, float]:
        """How long it took, and the rows that left beside it."""
        before, self.now, began = self.pool.backlog, self.main, self.main
        self.pool.copy_some(tokens)
        self.main = max(self.main + ms, self.side)
        return self.main - began, (before - self.pool.backlog) / (HIDDEN * 4)


def test_on_a_slow_bus_steps_are_not_held_up_by_rows(cuda_pool, regions, monkeypatch):
    """A step that waits for its rows lasts as long as they do: that they arrive in time says nothing."""
    sending(regions, cuda_pool, 60)
    bus = Bus(cuda_pool, monkeypatch, row_ms=2.0)  # two rows, 4 ms, beside a step of 3
    found = [bus.step(32, 3.0) for _ in range(40)]
    assert found[0] == (4.0, 2), "nobody knows yet"
    assert all(took == 3.0 for took, _ in found[6:]), found
    left = sum(rows for _, rows in found[6:])
    most = row_copies._SHARE * 34 * 3.0
    assert 0.75 * most <= 2.0 * left <= most + 2.0, "all that the bus may carry meanwhile, and no more"


def test_beside_a_step_that_reads_prompts_more_leaves(cuda_pool, regions, monkeypatch):
    sending(regions, cuda_pool, 60)
    monkeypatch.setattr(row_copies, "_SHARE", 0.4)
    bus = Bus(cuda_pool, monkeypatch, row_ms=0.5)
    found: dict[int, list[tuple[float, float]]] = {16: [], 4096: []}
    for turn in range(9):
        tokens, ms = ((16, 3.0), (4096, 20.0))[turn % 3 == 0]
        found[tokens].append(bus.step(tokens, ms))
    assert [rows for _, rows in found[4096]][1:3] == [16, 16], found  # 0.4 of 20 ms
    assert all(rows <= 3 for _, rows in found[16]), found
    assert all(took == ms for kind, ms in ((16, 3.0), (4096, 20.0)) for took, _ in found[kind]), found


def test_a_step_without_room_waits_for_rows_on_their_way_and_not_for_the_step_before(cuda_pool, regions):
    """What that one leaves is complete at its end: the device would stand still from then on."""
    sending(regions, cuda_pool, 32)
    while cuda_pool.backlog:
        cuda_pool.copy_some(1)
    PlayedEvent.happened = False
    sending(regions, cuda_pool, 24)  # of the step that runs
    assert cuda_pool.take(32) is None
    assert cuda_pool.take_late(32) is not None
    assert cuda_pool.backlog == 24 * HIDDEN * 4
    assert cuda_pool.take_late(32) is None, "nothing is on its way"


def test_a_step_without_room_sends_what_earlier_steps_left_whatever_the_pace(cuda_pool, regions):
    """Those rows are complete. With room for two steps, rows of one leave beside the next."""
    early, late = sending(regions, cuda_pool, 30), sending(regions, cuda_pool, 2)
    cuda_pool.copy_some(1)
    PlayedEvent.happened = False
    sending(regions, cuda_pool, 28)
    assert cuda_pool.backlog == (30 + 28) * HIDDEN * 4, "two have left beside the step"
    assert cuda_pool.take(24) is None
    assert cuda_pool.take_late(24) is not None
    assert early.counters[ROWS] == 30
    assert cuda_pool.backlog == 28 * HIDDEN * 4, "those of the step that runs are not complete"
    assert cuda_pool.take_late(24) is None
    cuda_pool.wait_for_copies()
    assert (late.counters[ROWS], cuda_pool.backlog) == (2, 0)


@pytest.mark.parametrize("seed", range(12))
def test_no_row_leaves_before_the_forward_that_writes_it(cuda_pool, regions, monkeypatch, seed):
    """Whatever is asked of the pool, in whatever order: copies wait only for what the side stream waits for."""
    chance, forwards, waited, written = random.Random(seed), [0], [0], dict[int, int]()
    copied = list[int]()

    class Event(PlayedEvent):
        def record(self, *_: object) -> None:
            self.forwards = forwards[0]

        def query(self) -> bool:
            return chance.random() < 0.5

        def synchronize(self) -> None: ...

    def wait(event: Event) -> None:
        waited[0] = max(waited[0], event.forwards)

    def copy(_target: int, source: int, size: int, _stream: int) -> None:
        first = (source - cuda_pool._address) // cuda_pool._cell_bytes
        cells = range(first, first + size // cuda_pool._cell_bytes)
        assert all(written[cell] <= waited[0] for cell in cells)
        copied.extend(cells)

    def take(count: int) -> int | None:
        if (first := free(count)) is not None:
            written.update(dict.fromkeys(range(first, first + count), forwards[0]))
        return first

    monkeypatch.setattr(torch.cuda, "Event", Event)
    cuda_pool._forward_done, cuda_pool._side.wait_event, cuda_pool._copy_bytes = Event(), wait, copy
    free, cuda_pool.free.take, total = cuda_pool.free.take, take, 0
    for _ in range(60):
        rows = chance.randint(1, 24)
        first = cuda_pool.take(rows) if chance.random() < 0.7 else cuda_pool.take_late(rows)
        if first is None and (first := cuda_pool.take_late(rows)) is None:
            cuda_pool.wait_for_copies()
            first = cuda_pool.take(rows)
        assert first is not None
        cuda_pool.give(first, rows)
        cuda_pool.copy_some(chance.choice([rows, rows, 600]))  # or a step with prompts, behind which rows wait
        forwards[0] += 1
        sending(regions, cuda_pool, rows, chance.choice(["odd", "even"]))
        total += rows
        if chance.random() < 0.3:
            cuda_pool.wait_for_copies({"even"})
        if chance.random() < 0.2:
            cuda_pool.wait_for_copies({"odd"})
    cuda_pool.wait_for_copies()
    assert len(copied) == total


def test_whatever_was_timed_rows_go_on_leaving():
    pace = Pace()
    pace.rows_took(16 << 20, 1e6)
    pace.step_took(32, 0.0)
    left = 0
    for _ in range(64):
        allowed = pace.beside(32)
        size = 16 << 20 if allowed > 0 else 0
        pace.copied(size, allowed)
        left += size
    assert left == 64 << 20


def test_precomputed_ops_are_flagged_in_the_index_of_steps_that_have_room_for_them():
    calls: list[tuple[str, int]] = []
    pytest.importorskip("triton")
    from steerscope.engines.vllm.cuda.pool import CudaPool

    pool = CudaPool.__new__(CudaPool)  # its pinned memory would need a GPU
    pool._host_index = index = torch.zeros(5, 16, dtype=torch.int32)
    pool._copy_index = lambda tokens: calls.append(("index", tokens))
    pool._precomputed = types.SimpleNamespace(rows=3, compute=lambda tokens: calls.append(("ops", tokens)))
    index[:, FLAG] = torch.tensor([7, 0, 9, 4, 0])
    for _ in range(2):  # the second time as after a page was opened
        pool.upload_index(3, precompute=True)
        assert index[:, FLAG].tolist() == [7 + PRECOMPUTED, PRECOMPUTED, 9 + PRECOMPUTED, 4, 0]
    index[:, FLAG] = torch.tensor([7, 0, 9, 4, 0])
    pool.upload_index(5, precompute=True)  # too many tokens
    pool.upload_index(3, precompute=False)
    assert index[:, FLAG].tolist() == [7, 0, 9, 4, 0]
    assert calls == [("index", 3), ("ops", 3)] * 2 + [("index", 5), ("ops", 0), ("index", 3), ("ops", 0)]


def test_a_region_is_left_only_behind_its_own_rows_and_never_twice(cuda_pool, regions):
    """The end of a request that waits behind another's rows: once the client knows, nothing writes there again."""
    slow, quick = allocate(regions), allocate(regions)
    delivery = deliver(regions, cuda_pool)
    first, second = asking(slow, "slow"), asking(quick, "quick")
    for request in (first, second):
        delivery.find_region(request)
        delivery.reserve_rows(request)
    delivery.flush([RowSlice(first, 0, 4, cuda_pool.take(4), 4, 4)])
    delivery.leave(second)
    assert quick.counters[LEFT] == 0
    delivery.hold_regions({"quick"})
    delivery.complete([["quick", 0, quick.offset]])
    assert quick.counters[LEFT] == 1
    offset = quick.offset
    del quick
    other = allocate(regions)
    assert other.offset == offset
    cuda_pool.wait_for_copies()
    assert other.counters[LEFT] == 0
    assert slow.counters[ROWS] == 4


def test_the_region_lies_where_the_client_looks(regions):
    region = allocate(regions)
    region.tensor((1, HIDDEN), torch.float32).fill_(7)
    assert regions.arena.view(region.offset + HEADER, (HIDDEN,), torch.float32).eq(7).all()


@pytest.mark.parametrize("numbers", [[], [2], [1, 3, 4, 6, 7]])
def test_new_requests_begin_without_an_overflow_flag_and_others_keep_theirs(numbers: list[int]) -> None:
    overflow_flags = torch.ones(9, dtype=torch.int32)
    clear_overflow_flags(overflow_flags, numbers)
    assert overflow_flags.tolist() == [int(number not in numbers) for number in range(9)]
