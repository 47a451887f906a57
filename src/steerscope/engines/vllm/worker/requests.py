"""What a worker knows of each request that asks for something, and the pieces of a step that belong to one."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from steerscope.capture.transport import Arena
from steerscope.core.slot_table import Lease
from steerscope.engines.vllm.wire import Wire
from steerscope.specs.tokens import END, Interval

if TYPE_CHECKING:
    from steerscope.lenses.monitor import Seat


@dataclass(slots=True)
class Page:
    """Cells for rows that follow each other: row i of position start + i."""

    cell: int
    start: int
    size: int
    count: int = 0
    sent: int = 0  # rows that have left it already


@dataclass(slots=True)
class Watched:
    """What a watched request has in the worker that holds its tap."""

    seat: "Seat"
    gates: list[int]  # the gate of each of its columns
    alone: int  # the group of its tokens that are read and not captured
    both: int  # … and of those that are both
    most: int  # readings that there can be
    seen: int = 0  # watched rows computed so far, all below a position that never falls
    told: int = 0  # those that the client has
    until: int = 0  # … all of positions below this
    open: dict[int, list[Interval]] = field(default_factory=dict)  # by gate of a column: rows on which it is open

    def reach(self, count: int, position: int) -> None:
        """So many rows were watched, all below this position: in steps that repeat, nobody counts them one by one."""
        self.seen = max(self.seen, count)
        self.told, self.until = max(self.told, min(self.seen, self.most)), max(self.until, position)

    def switch(self, gate: int, row: int, on: bool) -> None:
        """A rule changed with this row, which is known on the host from now on."""
        spans = self.open.setdefault(gate, [])
        if on:
            spans.append((row + 1, END))
        elif spans:
            spans[-1] = (spans[-1][0], row + 1)


@dataclass(slots=True)
class Looks:
    """The watched rows of a step: whose, from which token of the batch on, positions [start, stop)."""

    parts: "list[tuple[Asker, int, int, int]]"
    moved: int = 0  # all positions lie so much further: steps that repeat share this
    kept: Any = None  # what the reader made of it


@dataclass(slots=True)
class Asker:
    """A request that steers, captures or is watched."""

    wire: Wire
    leases: list[Lease]
    group: int  # 0: captures nothing here
    width: int  # captured taps on this worker
    before: int = 0  # captured taps of earlier pipeline stages: their rows come first
    place: int = 0  # where the rows of this worker begin in its arena
    seen: int = 0  # captured rows computed so far, all below a position that never falls
    most: int = 0  # captured rows that there can be
    moved: int = 0  # captured rows that are there or on their way
    reached: int = 0  # the first position that was never fed
    failed: str | None = None
    left: bool = False  # its region is no longer ours
    arena: Arena | None = None  # where that region is
    number: int = 0  # which fault flag is its own
    cached: bool = False  # its first rows were not computed here
    page: Page | None = None
    watched: Watched | None = None
    groups: list[Hashable] = field(default_factory=list)  # those it holds

    @property
    def complete(self) -> bool:
        """All rows that it can ever have are there or on their way."""
        return 0 < self.most == self.moved

    @property
    def steers(self) -> bool:
        return bool(self.leases) and len(self.leases) == len(self.wire.columns)


@dataclass(slots=True)  # not frozen: there are many of them, and it would take three times as long
class Slice:
    """Rows of one request: positions [start, stop) are cells [cell, cell + (stop − start) · width)."""

    asker: Asker
    start: int
    stop: int
    cell: int
    reached: int  # captured rows that are there when this slice is
    size: int  # cells that are free when it has left; none: their page is still being written
    before: int = 0  # so many of these lie before it: rows that were sent earlier, or sums
    summed: int = 0  # so many of its rows, the first ones, are not there, but in these sums; the cells are the others'

    @property
    def room(self) -> tuple[int, int]:
        """The first of those cells, and their number."""
        return self.cell - self.before, self.size


def sliced(asker: Asker, start: int, stop: int, cell: int, size: int, before: int = 0, summed: int = 0) -> Slice:
    """Rows of it that are on their way from now on."""
    assert asker.wire.capture is not None
    asker.moved = max(asker.moved, asker.wire.capture.positions.count(stop))
    return Slice(asker, start, stop, cell, asker.moved, size, before, summed)


def rest_of(asker: Asker, page: Page, count: int) -> Slice:
    """What of a page with so many rows was not sent; no more will join them."""
    before, size = page.sent * asker.width, page.size * asker.width
    return sliced(asker, page.start + page.sent, page.start + count, page.cell + before, size, before)
