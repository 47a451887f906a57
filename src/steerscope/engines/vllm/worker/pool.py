"""Device memory for the rows of running steps, and their way out.

On the CPU rows are copied to the client's memory as soon as they are complete, and the index that taps read is the very
memory the books write.
"""

import bisect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.worker.requests import Asker, Slice
from steerscope.engines.vllm.worker.step_index import CELL, STRIDE
from steerscope.specs.errors import CapacityExceeded

_FEW = 4
_SMALL = 16  # such a part of all cells
_PART = 20  # … and of the device's memory, for rows that wait while others come


class Cells:
    """Which cells are free, neighbours merged. What is small (pages of texts that are being written) lies at the end,
    so that the prompts of a whole step find their place at the beginning."""

    def __init__(self, count: int) -> None:
        self._free: list[tuple[int, int]] = [(0, count)]  # (first, behind the last), ascending
        self._small = count // _SMALL

    def take(self, count: int) -> int | None:
        small = count <= self._small
        for i in reversed(range(len(self._free))) if small else range(len(self._free)):
            first, last = self._free[i]
            if last - first >= count:
                left, found = ((first, last - count), last - count) if small else ((first + count, last), first)
                self._free[i : i + 1] = [left] if left[0] < left[1] else []
                return found
        return None

    def give(self, first: int, count: int) -> None:
        if not count:
            return
        at = bisect.bisect(self._free, (first, first))
        last = first + count
        assert at == len(self._free) or last <= self._free[at][0], "cells that are free already"
        assert not at or self._free[at - 1][1] <= first, "cells that are free already"
        if at < len(self._free) and self._free[at][0] == last:
            last = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == first:
            at -= 1
            first = self._free.pop(at)[0]
        self._free.insert(at, (first, last))


class Pool(Protocol):
    cells: Tensor  # [cells + tokens, hidden]: those that are handed out, and behind them the watched rows of a step
    index: Tensor  # [tokens, columns] int32, what the taps read
    faults: Tensor  # [askers] int32, set by the taps

    def take(self, count: int) -> int | None:
        """The first of so many cells in a row; None: there is no room."""
        ...

    def take_late(self, count: int) -> int | None:
        """The same, when enough of what earlier steps left has arrived: beside the step that runs."""
        ...

    def give(self, first: int, count: int) -> None:
        """They are no longer needed, or not once what is queued has read them."""
        ...

    def lay_out(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, requests: int
    ) -> Tensor | None:
        """Before the first step: where what taps do to tokens is laid ready, tap by tap, if it ever is."""
        ...

    def make_stage(self, taps: int, requests: int) -> Tensor | None:
        """Before the first step: where taps leave rows until it ends, [taps, rows, hidden], if they ever do."""
        ...

    def send_index(self, tokens: int, lay: bool = False) -> None:
        """The books' index holds from now on: rows [0, tokens), zero beyond. `lay`: the same will be asked
        for again and again."""
        ...

    def advance(self, tokens: int) -> None:
        """The cell of every token lies one stride further than in the step before, if the taps have not seen to it."""
        ...

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        """[count, width, hidden]"""
        ...

    def move(self, part: Slice, used: int, offset: int, note: Callable[[], None]) -> None:
        """Copy that many cells of a slice to its asker's arena, then give the slice's cells back and call this."""
        ...

    def pump(self, tokens: int) -> None:
        """Beside a step with so many: send some of what waits, and see what has arrived."""
        ...

    def hasten(self) -> None:
        """Behind the forward that was queued last: what waits leaves now, if that is not much."""
        ...

    def afterwards(self, asker: Asker, note: Callable[[], None], event: torch.cuda.Event | None = None) -> None:
        """Call this for it when everything moved so far has arrived, and the event too."""
        ...

    def drain(self, names: set[str] | None = None) -> None:
        """Return when everything moved has arrived; or that of these."""
        ...

    def faulty(self, wait: bool = False) -> list[int]:
        """Numbers of askers whose steered rows were found not to be finite; some steps late unless it waits."""
        ...

    def pin(self, arena: Arena) -> None: ...

    def unpin(self, arena: Arena) -> None: ...

    def stats(self) -> dict[str, float]: ...


def watched_rows(cells: int, index: np.ndarray) -> int:
    """Behind the cells there is a row for every token of a step, where rows are captured at all."""
    return len(index) if cells else 0


def room_for(cells: int, row: int, tokens: int, limit: int | None, memory: int) -> int:
    """Cells of a pool that needs so many: as many as `limit` bytes hold. Where nobody has said, a device with memory of
    its own has up to twice what is needed: while the prompts of one step leave, those of the next are read."""
    most = min(2 * cells, memory // _PART // row) if limit is None else limit // row - tokens
    return max(cells, most) if cells else 0


def make_pool(
    device: torch.device,
    cells: int,
    askers: int,
    hidden: int,
    dtype: torch.dtype,
    index: np.ndarray,
    limit: int | None,
    runner: Any,
) -> Pool:
    """With so many cells, or more (`room_for`)."""
    row = hidden * dtype.itemsize
    size = (cells + watched_rows(cells, index)) * row
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    cells = room_for(cells, row, len(index), limit, memory)
    if limit is not None and size > limit:
        raise CapacityExceeded(
            f"the rows of one step, and those that wait to be sent, can take {size >> 20} MiB, pool_bytes is "
            f"{limit >> 20} MiB: tap fewer layers or sites, lower max_num_batched_tokens, or raise pool_bytes"
        )
    if device.type == "cuda":
        from steerscope.engines.vllm.cuda.pool import CudaPool

        return CudaPool(device, cells, askers, hidden, dtype, index, runner)
    return HostPool(cells, askers, hidden, dtype, index)


def clear_faults(faults: Tensor, numbers: list[int]) -> None:
    """Those of new askers: whoever had the number before may have left one. A launch costs a GPU more than they do."""
    if len(numbers) < _FEW:
        for number in numbers:
            faults[number] = 0
        return
    wanted = torch.tensor(numbers, pin_memory=faults.is_cuda).to(faults.device, non_blocking=True)
    faults.index_fill_(0, wanted, 0)


class HostPool:
    def __init__(self, cells: int, askers: int, hidden: int, dtype: torch.dtype, index: np.ndarray) -> None:
        self.cells = torch.zeros(cells + watched_rows(cells, index), hidden, dtype=dtype)
        self._bytes = self.cells.view(torch.uint8).numpy()  # [cells, bytes]
        self.index = torch.from_numpy(index)
        self.faults = torch.zeros(askers, dtype=torch.int32)
        free = Cells(cells)
        self.take, self.take_late, self.give = free.take, free.take, free.give

    def lay_out(self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, requests: int) -> None:
        del vectors, coefficients, orders, before, requests  # here a look-up costs nothing beside the rest

    def make_stage(self, taps: int, requests: int) -> None:
        del taps, requests

    def send_index(self, tokens: int, lay: bool = False) -> None:
        del lay
        self.faults[0] = tokens > 0  # the taps read the books' own memory, if there is anything to read

    def advance(self, tokens: int) -> None:
        self.index[:tokens, CELL] += self.index[:tokens, STRIDE]

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        return self.cells[cell : cell + count * width].view(count, width, -1)

    def move(self, part: Slice, used: int, offset: int, note: Callable[[], None]) -> None:
        assert part.asker.arena is not None
        source = self._bytes[part.cell : part.cell + used].reshape(-1)
        part.asker.arena.bytes[offset : offset + len(source)] = source
        self.give(*part.room)
        note()

    def pump(self, tokens: int) -> None: ...

    def hasten(self) -> None: ...

    def afterwards(self, asker: Asker, note: Callable[[], None], event: torch.cuda.Event | None = None) -> None:
        del asker, event
        note()

    def drain(self, names: set[str] | None = None) -> None: ...

    def faulty(self, wait: bool = False) -> list[int]:
        del wait
        flags = self.faults[1:]
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
