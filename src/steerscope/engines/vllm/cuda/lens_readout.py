"""Lens readings on a GPU, which writes them into the client's memory without the host.

A work list has a line for every row to be read: its cell, its request, and the place of its reading. While requests
decode, the kernel moves every line on to the next row, so that a repeated step is one CUDA graph. Rules must act before
the next forward; lenses without rules read on a side stream, beside it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.capture.transport import ALIGN, HEADER, READ
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.requests import TrackedRequest
from steerscope.lenses.graph_pool import GraphPool
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.reader import Reader, StepReadings

# Columns of a work list. BASE and COUNTER are addresses in the client's memory, 0 where nothing is written; TERMS is −1
# without rules.
CELL, POSITION, SLOT, VIEW, BASE, NUMBER, MOST, KEPT, TERMS, COUNTER = range(10)
WIDTH = 10
MOST_LINES = 64  # of a graph
_LINE_STEP = 8  # the lines of a graph are a multiple of this
_MAX_GRAPHS = 32


@triton.jit
def _write(
    work, values, indices, scores, on, off, found, terms, rules,
    K: tl.constexpr, T: tl.constexpr, R: tl.constexpr, RULED: tl.constexpr, WIDTH: tl.constexpr, BASE: tl.constexpr,
    NUMBER: tl.constexpr, MOST: tl.constexpr, KEPT: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """The reading of one line: scores, lenses, and of rules which went on and off and the scores of their terms."""
    line = tl.program_id(0).to(tl.int64)
    mine = work + line * WIDTH
    base, number, kept, said = tl.load(mine + BASE), tl.load(mine + NUMBER), tl.load(mine + KEPT), tl.load(mine + TERMS)
    if (base != 0) & (number < tl.load(mine + MOST)):
        words = 2 * kept
        if said >= 0:
            words += 2 + said
        out = (base + 4 * number * words).to(tl.pointer_type(tl.int32))
        at = tl.arange(0, K)
        value = tl.load(values + line * found + at, mask=at < kept, other=0.0)
        lens = tl.load(indices + line * found + at, mask=at < kept, other=-1)
        tl.store(out + at, value.to(tl.int32, bitcast=True), mask=at < kept)
        tl.store(out + kept + at, lens.to(tl.int32), mask=at < kept)
        if RULED:  # noqa: SIM102 (known when this is compiled, unlike the other)
            if said >= 0:
                rule = tl.arange(0, R)
                up = tl.load(on + line * rules + rule, mask=rule < rules, other=0).to(tl.int32)
                down = tl.load(off + line * rules + rule, mask=rule < rules, other=0).to(tl.int32)
                tl.store(out + 2 * kept, tl.sum(up << rule))
                tl.store(out + 2 * kept + 1, tl.sum(down << rule))
                term = tl.arange(0, T)
                score = tl.load(scores + line * terms + term, mask=term < said, other=0.0)
                tl.store(out + 2 * kept + 2 + term, score.to(tl.int32, bitcast=True), mask=term < said)


@triton.jit
def _count(
    work, WIDTH: tl.constexpr, POSITION: tl.constexpr, NUMBER: tl.constexpr, MOST: tl.constexpr, COUNTER: tl.constexpr
):
    """Store in the client's memory how many readings are there, and move each line to the next row of its request."""
    mine = work + tl.program_id(0).to(tl.int64) * WIDTH
    number, counter = tl.load(mine + NUMBER) + 1, tl.load(mine + COUNTER)
    if counter != 0:
        tl.store(counter.to(tl.pointer_type(tl.int64)), tl.minimum(number, tl.load(mine + MOST)))
    tl.store(mine + NUMBER, number)
    tl.store(mine + POSITION, tl.load(mine + POSITION) + 1)


def write_readings(work: Tensor, seen: StepReadings[Tensor]) -> None:
    """Write the readings of all lines, then (kernels write in their order) how many there are."""
    ruled = seen.scores is not None and seen.on is not None and seen.off is not None
    scores = seen.scores if seen.scores is not None else seen.values
    on, off = (part.view(torch.uint8) if part is not None else seen.values for part in (seen.on, seen.off))
    found = seen.values.shape[1]
    terms = scores.shape[1]
    rules = on.shape[1]
    _write[(len(work),)](  # type: ignore[index]
        work, seen.values, seen.indices, scores, on, off, found, terms, rules,
        K=triton.next_power_of_2(found), T=triton.next_power_of_2(terms), R=triton.next_power_of_2(rules), RULED=ruled,
        WIDTH=WIDTH, BASE=BASE, NUMBER=NUMBER, MOST=MOST, KEPT=KEPT, TERMS=TERMS,
    )  # fmt: skip
    _count[(len(work),)](  # type: ignore[index]
        work, WIDTH=WIDTH, POSITION=POSITION, NUMBER=NUMBER, MOST=MOST, COUNTER=COUNTER
    )


class ReadKind(NamedTuple):
    """Reads of equal kind and size share a graph."""

    reader: Reader
    views: int  # of the reader: a new view moves the memory of all
    top_k: int
    ruled: bool
    viewed: bool


@dataclass(slots=True)
class DeviceRead:
    """Rows that one reader reads on the GPU."""

    kind: ReadKind
    requests: list[TrackedRequest]
    lines: Tensor  # on the host, pinned
    single: bool  # one row of each request: the next step may repeat it
    buffer: "_Buffer | None" = None  # that holds its lines on the device

    @property
    def reader(self) -> Reader:
        return self.kind.reader


@dataclass(slots=True)
class _Buffer:
    """Device memory of a work list, and the graph that reads with it."""

    lines: Tensor
    rows: Tensor
    cells: Tensor  # of the rows in the pool: a column of the lines
    graph: torch.cuda.CUDAGraph | None = None


class LensReadout:
    def __init__(self, monitor: Monitor, cells: Tensor, first: int, delivery: Delivery) -> None:
        self.monitor = monitor
        self._cells = cells
        self._first = first
        self._delivery = delivery
        self._side = torch.cuda.Stream(cells.device)
        self._capturing = torch.cuda.Stream(cells.device)
        self._rows_stored = torch.cuda.Event()
        self._done = torch.cuda.Event()
        self._buffers: dict[tuple[ReadKind, int], _Buffer] = {}
        self._pools = {ruled: GraphPool() for ruled in (False, True)}  # graphs of one stream run one after the other
        delivery.when_read = self.event

    def event(self) -> torch.cuda.Event:
        """Return an event that is reached when all readings launched until now are in the client's memory."""
        event = torch.cuda.Event()
        self._rows_stored.record(torch.cuda.current_stream(self._cells.device))
        self._side.wait_event(self._rows_stored)
        event.record(self._side)
        return event

    def drop(self, reader: Reader) -> None:
        """Free the graphs of a reader whose weights are about to be freed. None of them runs."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0].reader is not reader}

    # --- work lists

    def prepare(self, parts: list[tuple[TrackedRequest, int, int, int]]) -> DeviceRead:
        """Return the read of these rows: requests, each with its first token in the batch and its positions
        [start, stop)."""
        seats = [request.watched.seat for request, *_ in parts if request.watched is not None]
        counts = [b - a for *_, a, b in parts]
        lines = np.zeros((sum(counts), WIDTH), dtype=np.int64)
        done = 0
        for (request, token, a, b), seat in zip(parts, seats, strict=True):
            mine = lines[done : done + b - a]
            mine[:, CELL] = self._first + token + np.arange(b - a)
            mine[:, POSITION] = np.arange(a, b)
            mine[:, SLOT], mine[:, VIEW] = seat.slot, seat.view
            self._fill_targets(request, mine, a, b)
            done += b - a
        reader = seats[0].reader
        ruled = bool(lines[:, SLOT].any())
        viewed = bool(lines[:, VIEW].any())
        kind = ReadKind(reader, len(reader.views), max(seat.top_k for seat in seats), ruled, viewed)
        return DeviceRead(
            kind, [request for request, *_ in parts], torch.from_numpy(lines).pin_memory(), max(counts) == 1
        )

    def _fill_targets(self, request: TrackedRequest, mine: np.ndarray, first: int, stop: int) -> None:
        """Fill in the places of readings. Readings of recomputed rows are with the client already."""
        watched = request.watched
        assert watched is not None
        watch = watched.asked
        number = watched.number_of(first)
        until = number + stop - first
        mine[:, NUMBER] = number + np.arange(stop - first)
        mine[:, MOST], mine[:, KEPT] = watched.max_readings, watch.kept
        mine[:, TERMS] = len(watch.compiled.terms) if watch.compiled.rules else -1
        fresh = mine[:, NUMBER] >= watched.published
        watched.until = max(watched.until, stop)
        if not self._delivery.writes or request.arena is None or request.left or until <= watched.published:
            return
        region = request.arena.address + request.wire.offset
        mine[fresh, BASE] = region + HEADER + watch.place
        mine[-1, COUNTER] = region + ALIGN * READ
        watched.published = min(until, watched.max_readings)

    # --- reading

    def read(self, read: DeviceRead) -> None:
        """Read rows after the forward and before the next one's taps, on the stream that runs them."""
        here = torch.cuda.current_stream(self._cells.device)
        here.wait_event(self._done)  # the step before may still be reading what is about to be overwritten
        if not read.single or len(read.lines) > MOST_LINES:
            lines = read.lines.to(self._cells.device, non_blocking=True) if read.buffer is None else read.buffer.lines
            read.buffer = _Buffer(lines, lines, lines[:, CELL])  # the same lines again, if the step repeats
            rows = self._cells.index_select(0, read.buffer.cells)
            write_readings(lines, self._look(read.kind, rows, lines))
            return
        buffer = read.buffer or self._buffer_of(read)
        if read.buffer is None:
            read.buffer = buffer
            buffer.lines.zero_()
            buffer.lines[: len(read.lines)].copy_(read.lines, non_blocking=True)
        torch.index_select(self._cells, 0, buffer.cells, out=buffer.rows)
        if read.kind.ruled:
            self._run(buffer, read.kind)
            return
        self._rows_stored.record(here)
        self._side.wait_event(self._rows_stored)
        with torch.cuda.stream(self._side):
            self._run(buffer, read.kind)
        self._done.record(self._side)

    def _buffer_of(self, read: DeviceRead) -> _Buffer:
        lines = -(-len(read.lines) // _LINE_STEP) * _LINE_STEP
        key = (read.kind, lines)
        if key not in self._buffers:
            if len(self._buffers) >= _MAX_GRAPHS:
                torch.cuda.synchronize(self._cells.device)
                self._buffers.clear()
            device = self._cells.device
            rows = torch.zeros(lines, self._cells.shape[1], dtype=self._cells.dtype, device=device)
            made = torch.zeros(lines, WIDTH, dtype=torch.int64, device=device)
            self._buffers[key] = _Buffer(made, rows, made[:, CELL])
        return self._buffers[key]

    def _run(self, buffer: _Buffer, kind: ReadKind) -> None:
        if buffer.graph is not None:
            buffer.graph.replay()
            return
        # Of this step; libraries also need it before a capture.
        write_readings(buffer.lines, self._look(kind, buffer.rows, buffer.lines))
        here = torch.cuda.current_stream(self._cells.device)
        graph = torch.cuda.CUDAGraph()
        self._capturing.wait_stream(here)
        pool = self._pools[kind.ruled]
        with torch.cuda.stream(self._capturing):  # as torch.cuda.graph does, which also waits and collects garbage
            graph.capture_begin(pool=pool.handle(), capture_error_mode="thread_local")
            try:
                write_readings(buffer.lines, self._look(kind, buffer.rows, buffer.lines))
            finally:
                graph.capture_end()
        here.wait_stream(self._capturing)
        pool.add(graph)
        buffer.graph = graph

    def _look(self, kind: ReadKind, rows: Tensor, lines: Tensor) -> StepReadings[Tensor]:
        slot = lines[:, SLOT] if kind.ruled else None
        view = lines[:, VIEW] if kind.viewed else None
        return self.monitor.look(kind.reader, rows, kind.top_k, slot, lines[:, POSITION], view)
