"""The books of the vLLM engine: who asked for what, and what each token of a step must do.

Before every forward the scheduler's own numbers (which requests run, how many tokens, from which position) are turned
into one row of integers per token: where its captured rows go, which group of taps captures it, and its ops. Rows of
tokens nobody claims are zero. Pure numpy, and work only for requests that asked for something.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.wire import Wire
from steerscope.residual.table import Lease
from steerscope.specs.tokens import Interval

CELL, GROUP, ENTRIES = 0, 1, 2  # columns of the index: first cell, group, then three per op


@dataclass(slots=True)
class Asker:
    """A request that steers or captures."""

    wire: Wire
    leases: list[Lease]
    group: int  # 0: captures nothing here
    width: int  # captured taps on this worker
    before: int = 0  # captured taps of earlier pipeline stages: their rows come first
    seen: int = 0  # captured rows computed so far, all below a position that never falls
    moved: int = 0  # captured rows that are there or on their way
    reached: int = 0  # the first position that was never fed
    failed: str | None = None
    left: bool = False  # its region is no longer ours
    arena: Arena | None = None  # where that region is


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one request in one step: positions [start, stop) are cells [cell, cell + (stop − start) · width)."""

    asker: Asker
    start: int
    stop: int
    cell: int
    reached: int  # captured rows that are there when this slice is


@dataclass(slots=True)
class Filled:
    """What one step does: how many tokens have a say, and the rows it will make."""

    tokens: int = 0  # index rows [0, tokens) are written, the rest is zero
    slices: list[Slice] = field(default_factory=list)
    failed: list[Asker] = field(default_factory=list)  # found out in this step
    recomputed: int = 0  # requests that were preempted and begin again
    steered: list[tuple[Asker, int, int]] = field(default_factory=list)  # who steers batch tokens [first, last)


class Books:
    def __init__(self, tokens: int, columns: int) -> None:
        self.columns = columns
        self.index = np.zeros((tokens, ENTRIES + 3 * columns), dtype=np.int32)
        self.askers: dict[str, Asker] = {}
        self._dirty = 0  # index rows [0, dirty) may be non-zero

    def fill(
        self, requests: Sequence[str], starts: np.ndarray, computed: np.ndarray, reserve: Callable[[int], int]
    ) -> Filled:
        """Write the index for a step in which request i feeds tokens [starts[i], starts[i+1]) of the batch, beginning
        at its absolute position computed[i]. `reserve(cells)` gives the first cell of so many in a row."""
        filled = Filled()
        self.clear()
        taken: list[tuple[Asker, int, int, int]] = []  # who, batch token, positions
        for i, name in enumerate(requests):
            asker = self.askers.get(name)
            if asker is None:
                continue
            first, last, at = int(starts[i]), int(starts[i + 1]), int(computed[i])
            self._dirty = filled.tokens = last
            filled.recomputed += at < asker.reached
            asker.reached = max(asker.reached, at + last - first)
            # Also when its rows are void: its keys and values are cached under the salt of its steering.
            if asker.leases and len(asker.leases) == len(asker.wire.columns):
                self._steer(asker, first, at, at + last - first)
                filled.steered.append((asker, first, last))
            if asker.group and asker.wire.capture and not asker.failed:
                taken += [(asker, first + a - at, a, b) for a, b in _captured(asker, at, at + last - first)]
                if asker.failed:
                    filled.failed.append(asker)
        total = sum((b - a) * asker.width for asker, _, a, b in taken)
        cell = reserve(total) if total else 0
        for asker, token, a, b in taken:
            where = slice(token, token + b - a)
            self.index[where, CELL] = cell + asker.width * np.arange(b - a)
            self.index[where, GROUP] = asker.group
            assert asker.wire.capture is not None
            asker.moved = max(asker.moved, asker.wire.capture.positions.count(b))
            filled.slices.append(Slice(asker, a, b, cell, asker.moved))
            cell += (b - a) * asker.width
        return filled

    def _steer(self, asker: Asker, first: int, at: int, stop: int) -> None:
        for k, (column, lease) in enumerate(zip(asker.wire.columns, asker.leases, strict=True)):
            entry = (lease.vector_slot, lease.coefficient_slot, column.gate)
            for a, b in column.positions.within(at, stop):
                where = slice(first + a - at, first + b - at)
                self.index[where, ENTRIES + 3 * k : ENTRIES + 3 * k + 3] = entry

    @property
    def clean(self) -> bool:
        """The index says "nothing to do" for every token."""
        return self._dirty == 0

    def clear(self) -> None:
        self.index[: self._dirty] = 0
        self._dirty = 0


def _captured(asker: Asker, at: int, stop: int) -> Iterator[Interval]:
    """The positions of [at, stop) whose rows are wanted. A gap before them means that rows are missing for good."""
    capture = asker.wire.capture
    assert capture is not None
    for a, b in capture.positions.within(at, min(stop, capture.most)):  # a step too many has rows nobody may see
        if capture.positions.count(a) > asker.seen:
            asker.failed = f"rows before position {a} were never computed"
            return
        asker.seen = max(asker.seen, capture.positions.count(b))
        yield a, b
