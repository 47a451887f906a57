"""Plan repeated decoding steps with array operations.

While the same requests decode, a step differs from the last one only by one token per request. Such a step is planned
by one comparison and a few sums, whatever the number of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest, WatchedRows

_EXPECTED_STEPS = 64  # positions are computed for this many steps at once
NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class StepPlan:
    """What the taps do in one step, and the rows that are complete after it."""

    tokens: int = 0  # index rows [0, tokens) are written, the rest is zero
    slices: list[RowSlice] = field(default_factory=list)
    failed: list[TrackedRequest] = field(default_factory=list)  # requests that failed in this step
    watched_rows: WatchedRows | None = None
    recomputed: int = 0  # requests that were preempted and begin again
    columns: int = 0  # largest number of op columns of a token
    keeps: bool = False  # rows are captured or read
    same: bool = False  # the index equals that of the last step
    advance: bool = False  # the index is right once the cell of every token has moved by its stride

    @property
    def steers(self) -> bool:
        return self.columns > 0

    @property
    def busy(self) -> bool:
        return self.steers or self.keeps


@dataclass(slots=True)
class DecodeFastPath:
    """Decoding requests as arrays, one element per tracked request of the batch."""

    names: list[str]
    requests: list[TrackedRequest]
    batch_row: np.ndarray  # number of the request in the batch
    token: np.ndarray
    first: np.ndarray  # position in the first of these steps
    width: np.ndarray  # 0: captures nothing any more
    cell: np.ndarray  # of the next row, `lag` steps ago
    room: np.ndarray  # rows left in the page, `lag` steps ago
    most: np.ndarray  # positions of captured rows are below this
    plan: StepPlan  # of a step that changes nothing else
    all_tracked: bool  # every request of the batch is tracked
    only_decodes: bool  # every request of the batch computes one token
    left: int = 0  # steps until the first page is full
    lag: int = 0
    steps: int = 0  # planned so far
    _expected: list[bytes] = field(default_factory=list)  # the scheduler's positions for the next steps

    @property
    def position(self) -> np.ndarray:
        """Return the next position of each request."""
        return self.first + self.steps

    def matches(self, names: Sequence[str], starts: np.ndarray, computed: np.ndarray) -> bool:
        """Return whether the batch is the last one, one token later."""
        if names != self.names:
            return False
        count = len(names)
        step = self.steps % _EXPECTED_STEPS
        if starts.item(count) == count:
            same_tokens = self.only_decodes
        else:
            same_tokens = bool((starts[self.batch_row] == self.token).all())
            same_tokens = same_tokens and bool((starts[self.batch_row + 1] == self.token + 1).all())
        if step == 0:
            ahead = self.position + np.arange(_EXPECTED_STEPS)[:, None]
            self._expected = [positions.tobytes() for positions in ahead.astype(computed.dtype)]
        found = computed if self.all_tracked else computed[self.batch_row]
        return same_tokens and found.tobytes().startswith(self._expected[step])

    def has_work(self) -> bool:
        """Return whether a request needs the index, now or when a part of it is computed again: rows are captured once,
        but what was steered once must be steered again."""
        return self.plan.busy or not self.plan.same or any(request.wire.columns for request in self.requests)

    def catch_up(self) -> None:
        self.cell += self.lag * self.width
        self.room -= self.lag * (self.width > 0)
        self.lag = 0

    def add_row(self) -> None:
        """Count one more row in every page."""
        self.steps += 1
        self.lag += 1
        self.catch_up()
        self.left = int(self.room[self.width > 0].min())
