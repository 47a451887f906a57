"""Readings on a GPU, written by the GPU itself into the memory that the client maps: the host waits for nothing.

A sheet has a line for every row that is read: where the row lies, whose it is, and where its reading goes. While
requests decode, every line counts on by itself, so that a step is one CUDA graph. What rules do must be done before the
next forward; lenses without rules read on a stream of their own, beside it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.capture.transport import ALIGN, HEADER, READ
from steerscope.engines.vllm.cuda.streams import Here, aside
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.requests import Asker
from steerscope.lenses.graph_pool import GraphPool
from steerscope.lenses.monitor import Monitor, StepReadings
from steerscope.lenses.reader import Reader

# Columns of a sheet. BASE and COUNTER are addresses in the client's memory, 0 where nothing is written; TERMS is −1
# without rules.
CELL, POSITION, SLOT, VIEW, BASE, NUMBER, MOST, KEPT, TERMS, COUNTER = range(10)
WIDTH = 10
MOST_LINES = 64  # of a graph
_STEP = 8  # graphs have a multiple of so many lines
_MAX_GRAPHS = 32


@triton.jit
def _write(
    sheet, values, indices, scores, on, off, found, terms, rules,
    K: tl.constexpr, T: tl.constexpr, R: tl.constexpr, RULED: tl.constexpr, WIDTH: tl.constexpr, BASE: tl.constexpr,
    NUMBER: tl.constexpr, MOST: tl.constexpr, KEPT: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """The reading of one line: scores, lenses, and of rules which went on and off and the scores of their terms."""
    line = tl.program_id(0).to(tl.int64)
    mine = sheet + line * WIDTH
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
    sheet, WIDTH: tl.constexpr, POSITION: tl.constexpr, NUMBER: tl.constexpr, MOST: tl.constexpr, COUNTER: tl.constexpr
):
    """Store in the client's memory how many readings are there, and move each line to the next row of its request."""
    mine = sheet + tl.program_id(0).to(tl.int64) * WIDTH
    number, counter = tl.load(mine + NUMBER) + 1, tl.load(mine + COUNTER)
    if counter != 0:
        tl.store(counter.to(tl.pointer_type(tl.int64)), tl.minimum(number, tl.load(mine + MOST)))
    tl.store(mine + NUMBER, number)
    tl.store(mine + POSITION, tl.load(mine + POSITION) + 1)


def tell(sheet: Tensor, seen: StepReadings) -> None:
    """Write the readings of all lines, then (kernels write in their order) how many there are."""
    ruled = seen.scores is not None and seen.on is not None and seen.off is not None
    scores = seen.scores if seen.scores is not None else seen.values
    on, off = (part.view(torch.uint8) if part is not None else seen.values for part in (seen.on, seen.off))
    found, terms, rules = seen.values.shape[1], scores.shape[1], on.shape[1]
    _write[(len(sheet),)](  # type: ignore[index]
        sheet, seen.values, seen.indices, scores, on, off, found, terms, rules,
        K=triton.next_power_of_2(found), T=triton.next_power_of_2(terms), R=triton.next_power_of_2(rules), RULED=ruled,
        WIDTH=WIDTH, BASE=BASE, NUMBER=NUMBER, MOST=MOST, KEPT=KEPT, TERMS=TERMS,
    )  # fmt: skip
    _count[(len(sheet),)](  # type: ignore[index]
        sheet, WIDTH=WIDTH, POSITION=POSITION, NUMBER=NUMBER, MOST=MOST, COUNTER=COUNTER
    )


class Kind(NamedTuple):
    """Sheets of equal kind and size share a graph."""

    reader: Reader
    views: int  # of the reader: a new view moves the memory of all
    top_k: int
    ruled: bool
    viewed: bool


@dataclass(slots=True)
class Sheet:
    kind: Kind
    askers: list[Asker]
    lines: Tensor  # on the host, pinned
    single: bool  # one row of each request: the next step may repeat it
    lane: "_Lane | None" = None  # that holds its lines on the device

    @property
    def reader(self) -> Reader:
        return self.kind.reader


@dataclass(slots=True)
class _Lane:
    """The device's memory of a sheet, and the graph that reads with it."""

    sheet: Tensor
    rows: Tensor
    cells: Tensor  # of the rows in the pool: a column of the sheet
    graph: torch.cuda.CUDAGraph | None = None


class Readout:
    def __init__(self, monitor: Monitor, cells: Tensor, first: int, delivery: Delivery) -> None:
        self.monitor, self._cells, self._first, self._delivery = monitor, cells, first, delivery
        self._here = Here(cells.device)
        self._side, self._capturing = torch.cuda.Stream(cells.device), torch.cuda.Stream(cells.device)
        self._rows_there, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._lanes: dict[tuple[Kind, int], _Lane] = {}
        self._pools = {ruled: GraphPool() for ruled in (False, True)}  # graphs of one stream run one after the other
        delivery.when_read = self.now

    def now(self) -> torch.cuda.Event:
        """Return an event that is reached when all readings launched until now are in the client's memory."""
        event = torch.cuda.Event()
        self._rows_there.record(self._here())
        self._side.wait_event(self._rows_there)
        event.record(self._side)
        return event

    def drop(self, reader: Reader) -> None:
        """Free the graphs of a reader whose weights are about to be freed. None of them runs."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if key[0].reader is not reader}

    # --- sheets

    def sheet(self, parts: list[tuple[Asker, int, int, int]]) -> Sheet:
        """Return the sheet of these rows: requests, each with its first token in the batch and its positions
        [start, stop)."""
        seats = [asker.watched.seat for asker, *_ in parts if asker.watched is not None]
        counts = [b - a for *_, a, b in parts]
        lines = np.zeros((sum(counts), WIDTH), dtype=np.int64)
        done = 0
        for (asker, token, a, b), seat in zip(parts, seats, strict=True):
            mine = lines[done : done + b - a]
            mine[:, CELL] = self._first + token + np.arange(b - a)
            mine[:, POSITION] = np.arange(a, b)
            mine[:, SLOT], mine[:, VIEW] = seat.slot, seat.view
            self._address(asker, mine, a, b)
            done += b - a
        reader = seats[0].reader
        ruled, viewed = bool(lines[:, SLOT].any()), bool(lines[:, VIEW].any())
        kind = Kind(reader, len(reader.views), max(seat.top_k for seat in seats), ruled, viewed)
        return Sheet(kind, [asker for asker, *_ in parts], torch.from_numpy(lines).pin_memory(), max(counts) == 1)

    def _address(self, asker: Asker, mine: np.ndarray, first: int, stop: int) -> None:
        """Fill in where readings go. Those of rows that are computed again are with the client already."""
        watch, watched = asker.wire.watch, asker.watched
        assert watch is not None
        assert watched is not None
        number = watched.told if first >= watched.until else watch.positions.count(first)
        until = number + stop - first
        mine[:, NUMBER] = number + np.arange(stop - first)
        mine[:, MOST], mine[:, KEPT] = watched.most, watch.kept
        mine[:, TERMS] = len(watch.compiled.terms) if watch.compiled.rules else -1
        fresh, watched.until = mine[:, NUMBER] >= watched.told, max(watched.until, stop)
        if not self._delivery.writes or asker.arena is None or asker.left or until <= watched.told:
            return
        region = asker.arena.address + asker.wire.offset
        mine[fresh, BASE] = region + HEADER + watch.place
        mine[-1, COUNTER] = region + ALIGN * READ
        watched.told = min(until, watched.most)

    # --- reading

    def read(self, sheet: Sheet) -> None:
        """Read the rows of a sheet, after the forward and before the next one's taps, on the stream that runs them."""
        here = self._here()
        here.wait_event(self._done)  # the step before may still be reading what is about to be overwritten
        if not sheet.single or len(sheet.lines) > MOST_LINES:
            lines = sheet.lines.to(self._cells.device, non_blocking=True) if sheet.lane is None else sheet.lane.sheet
            sheet.lane = _Lane(lines, lines, lines[:, CELL])  # the same lines again, if the step repeats
            rows = self._cells.index_select(0, sheet.lane.cells)
            tell(lines, self._look(sheet.kind, rows, lines))
            return
        lane = sheet.lane or self._lane(sheet)
        if sheet.lane is None:
            sheet.lane = lane
            lane.sheet.zero_()
            lane.sheet[: len(sheet.lines)].copy_(sheet.lines, non_blocking=True)
        torch.index_select(self._cells, 0, lane.cells, out=lane.rows)
        if sheet.kind.ruled:
            self._run(lane, sheet.kind)
            return
        self._rows_there.record(here)
        self._side.wait_event(self._rows_there)
        with aside(here, self._side):
            self._run(lane, sheet.kind)
        self._done.record(self._side)

    def _lane(self, sheet: Sheet) -> _Lane:
        lines = -(-len(sheet.lines) // _STEP) * _STEP
        key = (sheet.kind, lines)
        if key not in self._lanes:
            if len(self._lanes) >= _MAX_GRAPHS:
                torch.cuda.synchronize(self._cells.device)
                self._lanes.clear()
            device = self._cells.device
            rows = torch.zeros(lines, self._cells.shape[1], dtype=self._cells.dtype, device=device)
            made = torch.zeros(lines, WIDTH, dtype=torch.int64, device=device)
            self._lanes[key] = _Lane(made, rows, made[:, CELL])
        return self._lanes[key]

    def _run(self, lane: _Lane, kind: Kind) -> None:
        if lane.graph is not None:
            lane.graph.replay()
            return
        tell(lane.sheet, self._look(kind, lane.rows, lane.sheet))  # this step; libraries also need it before a capture
        here, graph = torch.cuda.current_stream(self._cells.device), torch.cuda.CUDAGraph()
        self._capturing.wait_stream(here)
        pool = self._pools[kind.ruled]
        with torch.cuda.stream(self._capturing):  # as torch.cuda.graph does, which also waits and collects garbage
            graph.capture_begin(pool=pool.handle(), capture_error_mode="thread_local")
            try:
                tell(lane.sheet, self._look(kind, lane.rows, lane.sheet))
            finally:
                graph.capture_end()
        here.wait_stream(self._capturing)
        pool.add(graph)
        lane.graph = graph

    def _look(self, kind: Kind, rows: Tensor, lines: Tensor) -> StepReadings:
        slot = lines[:, SLOT] if kind.ruled else None
        view = lines[:, VIEW] if kind.viewed else None
        return self.monitor.look(kind.reader, rows, kind.top_k, slot, lines[:, POSITION], view)
