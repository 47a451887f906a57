"""What a step does, and decoding requests as arrays: a step that is the last one, a token later, needs a comparison and
a few sums, whatever the number of requests. (An operation on arrays takes longer, however small they are, and where the
host is slower than the device every step waits for it.)"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steerscope.engines.vllm.worker.requests import Asker, Looks, Slice

_FORESEEN = 64  # steps
NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class Filled:
    """What one step does: how many tokens have a say, and the rows that are complete with it."""

    tokens: int = 0  # index rows [0, tokens) are written, the rest is zero
    slices: list[Slice] = field(default_factory=list)
    failed: list[Asker] = field(default_factory=list)  # found out in this step
    looks: Looks | None = None  # rows that lenses read
    recomputed: int = 0  # requests that were preempted and begin again
    summed: int = 0  # rows that taps sum
    columns: int = 0  # of ops, that a token may have at most
    steers: bool = False
    keeps: bool = False  # rows are captured or read
    busy: bool = False  # the taps have something to do: one or the other
    same: bool = False  # the index says what it said in the last step
    runs: np.ndarray | None = None  # of tokens that taps sum, and of the others
    advance: bool = False  # it does when every token's cell is moved on by its stride


@dataclass(slots=True)
class Steady:
    """Decoding requests, as arrays over the askers of a batch."""

    names: list[str]
    askers: list[Asker]
    request: np.ndarray  # its number in the batch
    token: np.ndarray
    first: np.ndarray  # its position in the first of these steps
    width: np.ndarray  # 0: captures nothing any more
    cell: np.ndarray  # of the next row, `lag` steps ago
    room: np.ndarray  # rows left in its page, likewise
    most: np.ndarray
    filled: Filled  # a step that changes nothing else
    everybody: bool  # who is in the batch asks for something
    alone: bool  # nobody feeds more than one token
    turn: np.ndarray  # so many rows before its last one, and before others that count from there, what is there leaves
    left: int = 0  # steps until the first page is full
    due: int = 0  # … and until rows leave one that is not
    lag: int = 0
    steps: int = 0  # so far
    _foreseen: list[bytes] = field(default_factory=list)  # what the scheduler will say of the positions, step by step

    @property
    def position(self) -> np.ndarray:
        """The next one of each."""
        return self.first + self.steps

    def fits(self, names: Sequence[str], starts: np.ndarray, computed: np.ndarray) -> bool:
        """The batch is the last one, a token later."""
        if names != self.names:
            return False
        count, at = len(names), self.steps % _FORESEEN
        if starts.item(count) == count:  # everybody feeds one token
            same = self.alone
        else:
            same = bool((starts[self.request] == self.token).all())
            same = same and bool((starts[self.request + 1] == self.token + 1).all())
        if not at:
            ahead = self.position + np.arange(_FORESEEN)[:, None]
            self._foreseen = [positions.tobytes() for positions in ahead.astype(computed.dtype)]
        found = computed if self.everybody else computed[self.request]
        return same and found.tobytes().startswith(self._foreseen[at])

    @property
    def left_behind(self) -> np.ndarray:
        """Rows that each can have after the next one, but for those of its turn."""
        return self.most - self.position - 1 - self.turn

    def next_due(self, period: int) -> int:
        """Steps until that is a multiple of the period, for anybody."""
        left = self.left_behind
        return int(np.where(left > 0, (left - 1) % period + 1, NEVER).min())

    def wanted(self) -> bool:
        """Whether anybody wants something, now or if a part of it is computed again. Rows are had once; but what was
        steered once must be steered again."""
        return self.filled.busy or not self.filled.same or any(asker.wire.columns for asker in self.askers)

    def catch_up(self) -> None:
        self.cell += self.lag * self.width
        self.room -= self.lag * (self.width > 0)
        self.lag = 0

    def count(self) -> None:
        """One more row in every page."""
        self.steps += 1
        self.lag += 1
        self.catch_up()
        self.left = int(self.room[self.width > 0].min())
