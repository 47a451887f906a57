"""Rows of prompts: where a step keeps them, and which of them the taps sum at once.

Of a mean only the newest rows must be there one by one (`reducing`). With the many tokens of prompts it costs to write
the others, and to read them again; so a tap that meets them writes one row of float32 for a run of up to ROWS of them.
"""

from dataclasses import dataclass

import numpy as np

from steerscope.engines.vllm.worker.requests import Asker, Slice, sliced

FEW = 512  # tokens of a step in which taps sum nothing, at most
ROWS = 16  # of a run, at most
# What a run is: its first token, how many there are, how far each lies behind the one before, the group that captures
# them (0: they are not summed, each does what the index says), and the first cell of their sums.
LINE = 5
_WORTH = 4 * ROWS  # rows, at least


@dataclass(slots=True)
class Taken:
    """Captured tokens of a prompt."""

    asker: Asker
    token: int
    start: int
    stop: int
    again: bool  # some of these rows may have come before
    summed: int = 0  # so many of them, the first ones, are not kept
    sums: int = 0  # cells of their sums
    cell: int = 0  # the first of these, and of the rows behind them

    @property
    def runs(self) -> int:
        return -(-self.summed // ROWS)

    @property
    def size(self) -> int:
        return self.sums + (self.stop - self.start - self.summed) * self.asker.width


class Prompts:
    """Those of one step."""

    def __init__(self, taken: list[Taken], span: int) -> None:
        """A row of float32 needs `span` cells; 0: the taps of this step sum nothing."""
        self.taken, self._span = taken, span
        for one in taken if span else ():
            one.summed = _summed(one)
            one.sums = one.runs * span * one.asker.width
        self.cells, self.summed = sum(one.size for one in taken), sum(one.summed for one in taken)

    def place(self, cell: int, index: np.ndarray, at: int, group: int) -> list[Slice]:
        """Give them cells from this one on, and write these and their groups to those columns of the index: what
        follows each other there and in the batch at once."""
        spans: list[tuple[Taken, int, int, int]] = []  # of one group, first token, how many, first cell
        slices = []
        for one in self.taken:
            asker, one.cell = one.asker, cell
            slices.append(sliced(asker, one.start, one.stop, cell + one.sums, one.size, one.sums, one.summed))
            token, count, first = one.token + one.summed, one.stop - one.start - one.summed, cell + one.sums
            cell += one.size
            if spans and spans[-1][0].asker.group == asker.group:
                _, t, n, c = spans[-1]
                if (t + n, c + n * asker.width) == (token, first):
                    token, count, first = t, n + count, c
                    spans.pop()
            spans.append((one, token, count, first))
        for one, token, count, first in spans:
            width = one.asker.width
            index[token : token + count, at] = np.arange(first, first + count * width, width)
            index[token : token + count, group] = one.asker.group
        return slices

    def runs(self, tokens: int) -> np.ndarray | None:
        """The first so many tokens of the batch, each in a run; None: nothing is summed. Tokens of one run lie as far
        apart as there are runs of that request: those that are worked on at a time lie side by side."""
        found, done = [], 0
        for one in self.taken:
            if not one.summed:
                continue
            found.append(_others(done, one.token))
            number, done = np.arange(one.runs, dtype=np.int32), one.token + one.summed
            mine = np.empty((one.runs, LINE), dtype=np.int32)
            mine[:, 0], mine[:, 1] = one.token + number, -(-(one.summed - number) // one.runs)
            mine[:, 2], mine[:, 3] = one.runs, one.asker.group
            mine[:, 4] = one.cell + number * (self._span * one.asker.width)
            found.append(mine)
        return np.concatenate([*found, _others(done, tokens)]) if found else None


def _summed(one: Taken) -> int:
    capture, count = one.asker.wire.capture, one.stop - one.start
    assert capture is not None
    if one.again or one.asker.watched is not None or capture.reduce != "mean":
        return 0
    return count - capture.hold if count >= capture.hold + _WORTH else 0


def _others(start: int, stop: int) -> np.ndarray:
    """Tokens that are not summed."""
    first = np.arange(start, stop, ROWS, dtype=np.int32)
    found = np.zeros((len(first), LINE), dtype=np.int32)
    found[:, 0], found[:, 1], found[:, 2] = first, np.minimum(stop - first, ROWS), 1
    return found
