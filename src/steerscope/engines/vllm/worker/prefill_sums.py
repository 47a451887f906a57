"""Place captured prompt rows in the pool, and choose those that the taps sum instead of keeping them.

A mean needs only the newest rows one by one (`reductions`). Writing the many other rows of a prompt and reading them
again is expensive, so a tap writes one row of float32 sums for a run of up to ROWS of them.
"""

from dataclasses import dataclass

import numpy as np

from steerscope.engines.vllm.worker.index_layout import CELL, GROUP, ROWS, RUN_NUMBERS
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest, make_slice

_MIN_SUMMED = 4 * ROWS  # fewer rows are not worth summing


@dataclass(slots=True)
class PromptSlice:
    """Captured tokens of one prompt in a step."""

    request: TrackedRequest
    token: int
    start: int
    stop: int
    recomputed: bool  # some of these rows may have been captured before
    summed: int = 0  # number of leading rows that are summed
    sum_cells: int = 0  # cells of their sums
    cell: int = 0  # the first cell of the sums, which the cells of the other rows follow

    @property
    def n_runs(self) -> int:
        return -(-self.summed // ROWS)

    @property
    def n_cells(self) -> int:
        return self.sum_cells + (self.stop - self.start - self.summed) * self.request.width


class PrefillRows:
    """The captured prompt rows of one step."""

    def __init__(self, prompts: list[PromptSlice], span: int) -> None:
        """`span` is the number of cells of one row of sums; 0: the taps of this step sum nothing."""
        self.prompts = prompts
        self._span = span
        if span:
            for prompt in prompts:
                prompt.summed = _rows_to_sum(prompt)
                prompt.sum_cells = prompt.n_runs * span * prompt.request.width
        self.n_cells = sum(prompt.n_cells for prompt in prompts)
        self.summed = sum(prompt.summed for prompt in prompts)

    def place(self, cell: int, index: np.ndarray) -> list[RowSlice]:
        """Give the rows cells from `cell` on, and write their cells and groups to the index."""
        slices = []
        for prompt in self.prompts:
            request = prompt.request
            prompt.cell = cell
            first = cell + prompt.sum_cells
            slices.append(
                make_slice(request, prompt.start, prompt.stop, first, prompt.n_cells, prompt.sum_cells, prompt.summed)
            )
            cell += prompt.n_cells
            kept = slice(prompt.token + prompt.summed, prompt.token + prompt.stop - prompt.start)
            index[kept, CELL] = np.arange(first, cell, request.width)
            index[kept, GROUP] = request.group
        return slices

    def runs(self, tokens: int) -> np.ndarray | None:
        """Return runs that cover the first `tokens` tokens of the batch; None if nothing is summed.

        The tokens of one run lie as far apart as the request has runs, so that tokens that are computed at the same
        time lie side by side."""
        found = []
        done = 0
        for prompt in self.prompts:
            if not prompt.summed:
                continue
            found.append(_runs_without_sums(done, prompt.token))
            number = np.arange(prompt.n_runs, dtype=np.int32)
            done = prompt.token + prompt.summed
            runs = np.empty((prompt.n_runs, RUN_NUMBERS), dtype=np.int32)
            runs[:, 0] = prompt.token + number
            runs[:, 1] = -(-(prompt.summed - number) // prompt.n_runs)
            runs[:, 2] = prompt.n_runs
            runs[:, 3] = prompt.request.group
            runs[:, 4] = prompt.cell + number * (self._span * prompt.request.width)
            found.append(runs)
        return np.concatenate([*found, _runs_without_sums(done, tokens)]) if found else None


def _rows_to_sum(prompt: PromptSlice) -> int:
    capture = prompt.request.capture
    count = prompt.stop - prompt.start
    if prompt.recomputed or prompt.request.watched is not None or capture.reduce != "mean":
        return 0
    return count - capture.hold if count >= capture.hold + _MIN_SUMMED else 0


def _runs_without_sums(start: int, stop: int) -> np.ndarray:
    first = np.arange(start, stop, ROWS, dtype=np.int32)
    runs = np.zeros((len(first), RUN_NUMBERS), dtype=np.int32)
    runs[:, 0], runs[:, 1], runs[:, 2] = first, np.minimum(stop - first, ROWS), 1
    return runs
