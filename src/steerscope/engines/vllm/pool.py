"""Device memory for the rows of running steps, and their way out.

On the CPU a step's rows are copied to the client's memory as soon as the forward is over, so one step's worth of cells
is enough, and the index that taps read is the very memory the books write.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.settings import Settings
from steerscope.engines.vllm.step import Asker, Filled
from steerscope.specs.errors import CapacityExceeded


class Pool(Protocol):
    cells: Tensor  # [cells, hidden]
    index: Tensor  # [tokens, columns] int32, what the taps read
    faults: Tensor  # [tokens] int32, set by the taps

    def reserve(self, cells: int) -> int:
        """The first of so many cells in a row, for all rows of a step."""
        ...

    def send_index(self, tokens: int) -> None:
        """The books' index holds for this step: rows [0, tokens), zero beyond."""
        ...

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        """[count, width, hidden]: cells of this step."""
        ...

    def move(self, rows: Tensor, target: Tensor, note: Callable[[], None]) -> None:
        """Copy to shared memory, and call this when they are there."""
        ...

    def end_step(self) -> None: ...

    def afterwards(self, note: Callable[[], None]) -> None:
        """Call this when everything moved so far has arrived."""
        ...

    def drain(self) -> None:
        """Return when everything moved has arrived."""
        ...

    def faulty(self, filled: Filled | None) -> list[Asker]:
        """Whose steered rows were found not to be finite; of this step, or of one whose flags have arrived by now."""
        ...

    def pin(self, arena: Arena) -> None: ...

    def unpin(self, arena: Arena) -> None: ...

    def stats(self) -> dict[str, float]: ...


def make_pool(
    device: torch.device, cells: int, hidden: int, dtype: torch.dtype, index: np.ndarray, settings: Settings
) -> Pool:
    size = cells * hidden * dtype.itemsize
    if settings.pool_bytes is not None and size > settings.pool_bytes:
        raise CapacityExceeded(
            f"the rows of one step can take {size >> 20} MiB, pool_bytes is {settings.pool_bytes >> 20} MiB: tap fewer "
            "layers or sites, lower max_num_batched_tokens, or raise pool_bytes"
        )
    if device.type == "cuda":
        from steerscope.engines.vllm.cuda import CudaPool

        return CudaPool(device, cells, hidden, dtype, index)
    return HostPool(cells, hidden, dtype, index)


class HostPool:
    def __init__(self, cells: int, hidden: int, dtype: torch.dtype, index: np.ndarray) -> None:
        self.cells = torch.zeros(cells, hidden, dtype=dtype)
        self.index = torch.from_numpy(index)
        self.faults = torch.zeros(len(index), dtype=torch.int32)

    def reserve(self, cells: int) -> int:
        assert cells <= len(self.cells)
        return 0

    def send_index(self, tokens: int) -> None:
        del tokens  # the taps read the books' own memory

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        return self.cells[cell : cell + count * width].view(count, width, -1)

    def move(self, rows: Tensor, target: Tensor, note: Callable[[], None]) -> None:
        target.copy_(rows)
        note()

    def end_step(self) -> None: ...

    def afterwards(self, note: Callable[[], None]) -> None:
        note()

    def drain(self) -> None: ...

    def faulty(self, filled: Filled | None) -> list[Asker]:
        if filled is None or not filled.steered or not self.faults.any():
            return []
        found = [asker for asker, first, last in filled.steered if self.faults[first:last].any()]
        self.faults.zero_()
        return found

    def pin(self, arena: Arena) -> None:
        del arena

    def unpin(self, arena: Arena) -> None:
        del arena

    def stats(self) -> dict[str, float]:
        return {}
