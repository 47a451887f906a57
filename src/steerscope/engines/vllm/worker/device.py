"""What a worker needs of its device: memory for the rows of running steps and their way to the clients, the step index
that the taps read, and reductions.

This is the implementation on a CPU, where rows are copied to the client's memory as soon as they are complete and taps
read the memory of the step index itself. `cuda.pool` and `cuda.reductions` override what differs on a GPU.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.core.rows import HeldBack, Reducer
from steerscope.engines.vllm.wire import WireCapture
from steerscope.engines.vllm.worker.index_layout import CELL, STRIDE
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest
from steerscope.specs.errors import CapacityExceeded

_SMALL = 16  # blocks of at most this part of all cells are taken from the end
_MEMORY_PART = 20  # of the device's memory, for rows that wait to be copied


class Cells:
    """The free cells, as merged intervals. Small blocks (pages of decoding requests) are taken from the end, so that
    the prompts of a whole step find room at the beginning."""

    def __init__(self, count: int) -> None:
        self._free: list[tuple[int, int]] = [(0, count)]  # (first, behind the last), ascending
        self._small = count // _SMALL

    def take(self, count: int) -> int | None:
        small = count <= self._small
        for i in reversed(range(len(self._free))) if small else range(len(self._free)):
            first, last = self._free[i]
            if last - first >= count:
                left, taken = ((first, last - count), last - count) if small else ((first + count, last), first)
                self._free[i : i + 1] = [left] if left[0] < left[1] else []
                return taken
        return None

    def give(self, first: int, count: int) -> None:
        if not count:
            return
        at = bisect.bisect(self._free, (first, first))
        last = first + count
        assert at == len(self._free) or last <= self._free[at][0], "the cells are free already"
        assert not at or self._free[at - 1][1] <= first, "the cells are free already"
        if at < len(self._free) and self._free[at][0] == last:
            last = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == first:
            at -= 1
            first = self._free.pop(at)[0]
        self._free.insert(at, (first, last))


class RowPool:
    """Cells of device memory for rows, the index, and overflow flags. On a CPU nothing is queued, so that methods about
    copies do little here."""

    def __init__(
        self, device: torch.device, cells: int, max_flags: int, hidden: int, dtype: torch.dtype, index: np.ndarray
    ) -> None:
        self.cells = self._zeros(cells + watched_rows(cells, index), hidden, dtype, device)
        self.index = torch.from_numpy(index)  # [tokens, columns] int32, read by the taps
        self.overflow_flags = torch.zeros(max_flags, dtype=torch.int32, device=device)  # set by the taps
        self.free = Cells(cells)  # behind them are the watched rows of a step

    @staticmethod
    def _zeros(cells: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return torch.zeros(cells, hidden, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityExceeded(
                f"no device memory for {cells * hidden * dtype.itemsize >> 20} MiB of rows: tap fewer layers, or "
                "lower max_num_batched_tokens"
            ) from error

    # --- cells

    def take(self, count: int) -> int | None:
        """Return the first of `count` adjacent cells; None if there is no room."""
        return self.free.take(count)

    def take_late(self, count: int) -> int | None:
        """Do the same, and wait for copies of earlier steps if need be."""
        return self.free.take(count)

    def give(self, first: int, count: int) -> None:
        """Free cells; they are written again only after everything queued has read them."""
        self.free.give(first, count)

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        """Return rows [count, width, hidden]."""
        return self.cells[cell : cell + count * width].view(count, width, -1)

    # --- what the taps read

    def make_precomputed(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, max_requests: int
    ) -> Tensor:
        """Return the memory for precomputed ops [taps, rows, …], without rows on a CPU, where looking ops up costs
        little. Called before the first step."""
        del coefficients, orders, before, max_requests
        return torch.zeros(len(vectors), 0)

    def upload_index(self, tokens: int, precompute: bool = False) -> None:
        """Give the taps index rows [0, tokens), and zeros beyond. `precompute`: the same ops will run in many steps."""
        del precompute
        self.overflow_flags[0] = tokens > 0  # on a CPU, flag 0 says whether the index has any row

    def advance(self, tokens: int) -> None:
        """Move the cell of every token by its stride, unless the taps have done so."""
        self.index[:tokens, CELL] += self.index[:tokens, STRIDE]

    def take_overflows(self, wait: bool = False) -> list[int]:
        """Return and clear the overflow flags that are set; without `wait` some steps late on a GPU."""
        del wait
        flags = self.overflow_flags[1:]
        if not flags.any():
            return []
        found = (flags.nonzero().flatten() + 1).tolist()
        flags.zero_()
        return found

    # --- copies to the clients

    def copy_rows(self, part: RowSlice, n_cells: int, offset: int, publish: Callable[[], None]) -> None:
        """Queue a copy of cells of a slice to its request's arena; after it free the slice's cells and call
        `publish`."""
        assert part.request.arena is not None
        source = self.cells[part.cell : part.cell + n_cells].view(torch.uint8).numpy().reshape(-1)
        part.request.arena.bytes[offset : offset + len(source)] = source
        self.give(*part.freed)
        publish()

    def copy_some(self, tokens: int) -> None:
        """Start copies beside a step with this number of tokens, and publish what has arrived."""

    def after_copies(
        self, request: TrackedRequest, call: Callable[[], None], event: torch.cuda.Event | None = None
    ) -> None:
        """Call a function once everything queued so far has arrived, and the event is reached."""
        del request, event
        call()

    def wait_for_copies(self, names: set[str] | None = None) -> None:
        """Return when all copies have arrived, or those of the named requests."""

    def pin(self, arena: Arena) -> None:
        """Let the device write to shared memory."""

    def unpin(self, arena: Arena) -> None:
        """Do so before the memory is unmapped."""

    def stats(self) -> dict[str, float]:
        return {}


def watched_rows(cells: int, index: np.ndarray) -> int:
    """Return the number of rows behind the cells: one for each token of a step, if rows are captured at all."""
    return len(index) if cells else 0


def pool_cells(cells: int, row_bytes: int, tokens: int, max_bytes: int | None, memory: int) -> int:
    """Return the number of cells of a pool that needs at least `cells`: as many as fit `max_bytes`. Without a limit a
    GPU gets up to twice as many, so that the rows of one prompt step are copied while the next one runs."""
    if max_bytes is None:
        most = min(2 * cells, memory // _MEMORY_PART // row_bytes)
    elif (cells + tokens) * row_bytes <= max_bytes or not cells:
        most = max_bytes // row_bytes - tokens
    else:
        raise CapacityExceeded(
            f"the rows of one step and rows waiting to be copied can take {(cells + tokens) * row_bytes >> 20} MiB, "
            f"pool_bytes is {max_bytes >> 20} MiB: tap fewer layers or sites, lower max_num_batched_tokens, or raise "
            "pool_bytes"
        )
    return max(cells, most) if cells else 0


class Reductions:
    """Reductions of captured rows.

    An engine that schedules ahead computes rows past the end of a text before it hears of the end, and these must not
    be reduced: the newest `hold` rows of a request are kept apart. `core.rows.HeldBack` is the definition, and
    the implementation on a CPU; on a GPU one kernel reduces the rows of all requests.
    """

    def __init__(self, cells: Tensor) -> None:
        self._cells = cells

    def start(self, capture: WireCapture, width: int) -> Any:
        """Return the partial result of a request with `width` taps."""
        assert capture.reduce is not None
        return HeldBack(Reducer(capture.reduce, width, self._cells.shape[1], self._cells.device), capture.hold)

    def push(self, parts: Sequence[tuple[Any, RowSlice]]) -> None:
        """Add rows to partial results. Their cells may be written again after the next `join`."""
        for partial, part in parts:
            count = part.stop - part.start
            width = part.request.width
            rows = self._cells[part.cell : part.cell + count * width].view(count, width, -1)
            partial.push(range(part.start, part.stop), rows)

    def join(self) -> None:
        """Let the next forward wait for everything pushed: it may write to the same cells."""

    def finish(self, partial: Any, rows: int, counted: int, arena: Arena, place: int) -> int:
        """Queue the result [taps, hidden] of `counted` rows, all at positions below `rows`, to be written by `flush`;
        return the number of rows that it reduces."""
        del counted  # the partial result knows it
        reducer = partial.finish(rows)
        _write(reducer, arena, place)
        return reducer.n

    def flush(self) -> None:
        """Write all queued results."""

    def release(self, partial: Any) -> None:
        """Free a partial result."""


def _write(reducer: Reducer, arena: Arena, place: int) -> None:
    result = reducer.result()
    arena.view(place, tuple(result.shape), torch.float32).copy_(result)
