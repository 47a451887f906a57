"""Device memory for the rows of running steps, and the way from there to the clients.

On a CPU rows are copied to the client's memory as soon as they are complete, and taps read the memory of the step index
itself.
"""

import bisect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.worker.index_layout import CELL, STRIDE
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest
from steerscope.specs.errors import CapacityExceeded

_FEW_FLAGS = 4
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


class Pool(Protocol):
    cells: Tensor  # [cells + tokens, hidden]: cells to be taken, and behind them the watched rows of a step
    index: Tensor  # [tokens, columns] int32, read by the taps
    overflow_flags: Tensor  # [requests] int32, set by the taps

    def take(self, count: int) -> int | None:
        """Return the first of `count` adjacent cells; None if there is no room."""
        ...

    def take_late(self, count: int) -> int | None:
        """Do the same, and wait for copies of earlier steps if need be."""
        ...

    def give(self, first: int, count: int) -> None:
        """Free cells; they are written again only after everything queued has read them."""
        ...

    def make_precomputed(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, max_requests: int
    ) -> Tensor | None:
        """Return the memory for precomputed ops [taps, …], if there are any. Called before the first step."""
        ...

    def make_stage(self, n_taps: int, max_requests: int) -> Tensor | None:
        """Return the memory where taps leave rows until the step ends [taps, rows, hidden], if they do. Called before
        the first step."""
        ...

    def upload_index(self, tokens: int, precompute: bool = False) -> None:
        """Give the taps index rows [0, tokens), and zeros beyond. `precompute`: the same ops will run in many steps."""
        ...

    def advance(self, tokens: int) -> None:
        """Move the cell of every token by its stride, unless the taps have done so."""
        ...

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        """Return rows [count, width, hidden]."""
        ...

    def copy_rows(self, part: RowSlice, n_cells: int, offset: int, publish: Callable[[], None]) -> None:
        """Queue a copy of cells of a slice to its request's arena; after it free the slice's cells and call
        `publish`."""
        ...

    def copy_some(self, tokens: int) -> None:
        """Start copies beside a step with so many tokens, and publish what has arrived."""
        ...

    def copy_waiting_now(self) -> None:
        """Start the waiting copies behind the forward that was queued last, if they are few."""
        ...

    def after_copies(
        self, request: TrackedRequest, call: Callable[[], None], event: torch.cuda.Event | None = None
    ) -> None:
        """Call a function once everything queued so far has arrived, and the event is reached."""
        ...

    def wait_for_copies(self, names: set[str] | None = None) -> None:
        """Return when all copies have arrived, or those of the named requests."""
        ...

    def take_overflows(self, wait: bool = False) -> list[int]:
        """Return and clear the overflow flags that are set; without `wait` some steps late."""
        ...

    def pin(self, arena: Arena) -> None: ...

    def unpin(self, arena: Arena) -> None: ...

    def stats(self) -> dict[str, float]: ...


def watched_rows(cells: int, index: np.ndarray) -> int:
    """Return the number of rows behind the cells: one for each token of a step, if rows are captured at all."""
    return len(index) if cells else 0


def pool_cells(cells: int, row_bytes: int, tokens: int, max_bytes: int | None, memory: int) -> int:
    """Return the number of cells of a pool that needs at least `cells`: as many as fit `max_bytes`. Without a limit a
    GPU gets up to twice as many, so that the rows of one prompt step are copied while the next one runs."""
    most = min(2 * cells, memory // _MEMORY_PART // row_bytes) if max_bytes is None else max_bytes // row_bytes - tokens
    return max(cells, most) if cells else 0


def make_pool(
    device: torch.device,
    cells: int,
    max_flags: int,
    hidden: int,
    dtype: torch.dtype,
    index: np.ndarray,
    max_bytes: int | None,
    runner: Any,
) -> Pool:
    """Return a pool of at least `cells` cells."""
    row_bytes = hidden * dtype.itemsize
    size = (cells + watched_rows(cells, index)) * row_bytes
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    cells = pool_cells(cells, row_bytes, len(index), max_bytes, memory)
    if max_bytes is not None and size > max_bytes:
        raise CapacityExceeded(
            f"the rows of one step, and those that wait to be sent, can take {size >> 20} MiB, pool_bytes is "
            f"{max_bytes >> 20} MiB: tap fewer layers or sites, lower max_num_batched_tokens, or raise pool_bytes"
        )
    if device.type == "cuda":
        from steerscope.engines.vllm.cuda.pool import CudaPool

        return CudaPool(device, cells, max_flags, hidden, dtype, index, runner)
    return HostPool(cells, max_flags, hidden, dtype, index)


def clear_overflow_flags(overflow_flags: Tensor, numbers: list[int]) -> None:
    """Clear the flags of new requests, which earlier owners may have left set. One launch for many flags."""
    if len(numbers) < _FEW_FLAGS:
        for number in numbers:
            overflow_flags[number] = 0
        return
    on_device = torch.tensor(numbers, pin_memory=overflow_flags.is_cuda).to(overflow_flags.device, non_blocking=True)
    overflow_flags.index_fill_(0, on_device, 0)


class HostPool:
    def __init__(self, cells: int, max_flags: int, hidden: int, dtype: torch.dtype, index: np.ndarray) -> None:
        self.cells = torch.zeros(cells + watched_rows(cells, index), hidden, dtype=dtype)
        self._bytes = self.cells.view(torch.uint8).numpy()  # [cells, bytes]
        self.index = torch.from_numpy(index)
        self.overflow_flags = torch.zeros(max_flags, dtype=torch.int32)
        free = Cells(cells)
        self.take, self.take_late, self.give = free.take, free.take, free.give

    def make_precomputed(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, max_requests: int
    ) -> None:
        del vectors, coefficients, orders, before, max_requests  # looking ops up costs little on a CPU

    def make_stage(self, n_taps: int, max_requests: int) -> None:
        del n_taps, max_requests

    def upload_index(self, tokens: int, precompute: bool = False) -> None:
        del precompute
        self.overflow_flags[0] = tokens > 0  # on a CPU, flag 0 says whether the index has any row

    def advance(self, tokens: int) -> None:
        self.index[:tokens, CELL] += self.index[:tokens, STRIDE]

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        return self.cells[cell : cell + count * width].view(count, width, -1)

    def copy_rows(self, part: RowSlice, n_cells: int, offset: int, publish: Callable[[], None]) -> None:
        assert part.request.arena is not None
        source = self._bytes[part.cell : part.cell + n_cells].reshape(-1)
        part.request.arena.bytes[offset : offset + len(source)] = source
        self.give(*part.freed)
        publish()

    def copy_some(self, tokens: int) -> None: ...

    def copy_waiting_now(self) -> None: ...

    def after_copies(
        self, request: TrackedRequest, call: Callable[[], None], event: torch.cuda.Event | None = None
    ) -> None:
        del request, event
        call()

    def wait_for_copies(self, names: set[str] | None = None) -> None: ...

    def take_overflows(self, wait: bool = False) -> list[int]:
        del wait
        flags = self.overflow_flags[1:]
        if not flags.any():
            return []
        found = (flags.nonzero().flatten() + 1).tolist()
        flags.zero_()
        return found

    def pin(self, arena: Arena) -> None:
        del arena

    def unpin(self, arena: Arena) -> None:
        del arena

    def stats(self) -> dict[str, float]:
        return {}
