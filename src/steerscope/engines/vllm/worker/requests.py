"""Requests that a worker tracks, and slices of their captured rows."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from steerscope.capture.transport import Arena
from steerscope.core.slot_table import Lease
from steerscope.engines.vllm.wire import Wire, WireCapture, WireWatch
from steerscope.specs.tokens import END, Interval, Positions

if TYPE_CHECKING:
    from steerscope.lenses.monitor import Seat


@dataclass(slots=True)
class Page:
    """Adjacent cells of one decoding request: row i belongs to position `start` + i."""

    cell: int
    start: int
    size: int  # rows
    count: int = 0  # rows written


@dataclass(slots=True)
class WatchState:
    """State of a watched request in the worker that holds its tap."""

    asked: WireWatch
    seat: "Seat"
    gates: list[int]  # the gate of each of its columns
    read_group: int  # of tokens that lenses read and that are not captured
    both_group: int  # of tokens that are read and captured
    max_readings: int
    seen: int = 0  # watched rows computed so far; they lie below a position that never falls
    published: int = 0  # readings that the client has
    until: int = 0  # all published readings belong to positions below this one
    open: dict[int, list[Interval]] = field(default_factory=dict)  # rows on which a column's gate is open, by gate

    def advance(self, position: int) -> None:
        """Record that all watched rows below a position were computed; repeated steps do not count them one by one."""
        self.seen = max(self.seen, self.asked.positions.count(position))
        self.published = max(self.published, min(self.seen, self.max_readings))
        self.until = max(self.until, position)

    def number_of(self, position: int) -> int:
        """Return the number of the reading of a watched position, which may be computed again."""
        return self.published if position >= self.until else self.asked.positions.count(position)

    def switch(self, gate: int, row: int, on: bool) -> None:
        """Record that a rule opened or closed a gate with this row."""
        spans = self.open.setdefault(gate, [])
        if on:
            spans.append((row + 1, END))
        elif spans:
            spans[-1] = (spans[-1][0], row + 1)


@dataclass(slots=True)
class WatchedRows:
    """Rows of a step that lenses read: (request, first token in the batch, start, stop) each."""

    parts: "list[tuple[TrackedRequest, int, int, int]]"
    offset: int = 0  # added to all positions; repeated steps share this object
    reads: Any = None  # what the reader prepared for these rows


@dataclass(slots=True)
class TrackedRequest:
    """A request that steers, captures or is watched."""

    wire: Wire
    leases: list[Lease]
    group: int  # capture group; 0: captures nothing in this worker
    width: int  # captured taps of this worker
    taps_before: int = 0  # captured taps of earlier pipeline stages: their rows come first
    offset: int = 0  # of this worker's rows in the arena
    seen: int = 0  # captured rows computed so far; they lie below a position that never falls
    max_rows: int = 0
    flushed: int = 0  # captured rows that are in the arena or being copied
    next_position: int = 0  # the first position that was never computed
    failed: str | None = None
    left: bool = False  # its region belongs to the client alone
    arena: Arena | None = None
    flag: int = 0  # number of its overflow flag
    cached: bool = False  # its first rows came from the prefix cache
    page: Page | None = None
    watched: WatchState | None = None
    groups: list[Hashable] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every row that the request can have was flushed."""
        return 0 < self.max_rows == self.flushed

    @property
    def steers(self) -> bool:
        return bool(self.leases) and len(self.leases) == len(self.wire.columns)

    # --- what it asks for, by position

    @property
    def capture(self) -> WireCapture:
        """Return what it captures; only of requests that capture."""
        assert self.wire.capture is not None
        return self.wire.capture

    def captures(self, position: int) -> bool:
        return bool(self.group) and position < self.capture.most and position in self.capture.positions

    def rows_to_capture(self, start: int, stop: int) -> list[Interval]:
        """Return the intervals of [start, stop) whose rows are captured. Missing rows before them fail the request."""
        return self._new_rows(self.capture, self, "rows", start, stop)

    def rows_to_read(self, start: int, stop: int) -> list[Interval]:
        """Return the intervals of [start, stop) that lenses read. Missing rows before them fail the request."""
        assert self.watched is not None
        return self._new_rows(self.watched.asked, self.watched, "watched rows", start, stop)

    def _new_rows(
        self, asked: WireCapture | WireWatch, state: "TrackedRequest | WatchState", what: str, start: int, stop: int
    ) -> list[Interval]:
        found = list(asked.positions.within(start, min(stop, asked.most)))  # an extra step has no rows
        if not found:
            return []
        first = found[0][0]
        last = found[-1][1]
        if asked.positions.count(first) > state.seen:
            self.failed = f"{what} before position {first} were never computed"
            return []
        state.seen = max(state.seen, asked.positions.count(last))
        return found

    def gated(self, k: int, recomputed: bool) -> tuple[int, Positions]:
        """Return the gate of column k, and the positions that have it. Gates hold their state after the newest row; for
        recomputed rows the recorded state counts, and the rows that were steered have the gate that is always open."""
        column = self.wire.columns[k]
        if not column.gate:
            return 0, column.positions
        if self.watched is None:
            return 0, Positions()
        if recomputed:
            return 0, column.positions & Positions.of(self.watched.open.get(column.gate, ()))
        return self.watched.gates[k], column.positions

    def stays_equal(self, position: int) -> bool:
        """Return whether it does the same at all later positions as at this one."""
        stop = self.capture.most if self.captures(position) else position + (1 << 30)  # of the fast path
        for asked in (self.wire.capture, self.watched and self.watched.asked):
            if asked and position < asked.most and not _is_constant(asked.positions, position, asked.most):
                return False
        return all(_is_constant(column.positions, position, stop) for column in self.wire.columns)


@dataclass(slots=True)
class RowSlice:
    """Rows of one request: positions [start, stop) are cells [cell, cell + (stop − start) · width)."""

    request: TrackedRequest
    start: int
    stop: int
    cell: int
    n_rows: int  # captured rows of the request that exist once this slice is copied
    n_freed: int  # cells that are free afterwards

    @property
    def freed(self) -> tuple[int, int]:
        """Return the first cell that is free afterwards, and the number of cells."""
        return self.cell, self.n_freed


def make_slice(request: TrackedRequest, start: int, stop: int, cell: int, n_freed: int) -> RowSlice:
    """Return a slice and count its rows as flushed."""
    request.flushed = max(request.flushed, request.capture.positions.count(stop))
    return RowSlice(request, start, stop, cell, request.flushed, n_freed)


def slice_of_page(request: TrackedRequest, page: Page, count: int) -> RowSlice:
    """Return the rows of a page with `count` rows; no more are added to it."""
    return make_slice(request, page.start, page.start + count, page.cell, page.size * request.width)


def _is_constant(positions: Positions, start: int, stop: int) -> bool:
    """Return whether the positions hold either all of [start, stop) or none of it."""
    return list(positions.within(start, stop)) in ([], [(start, stop)])
