"""The row pool on a GPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.cuda import kernel
from steerscope.engines.vllm.cuda.index_upload import IndexUpload
from steerscope.engines.vllm.cuda.row_copies import RowCopies
from steerscope.engines.vllm.cuda.row_store import make_stage
from steerscope.engines.vllm.cuda.streams import CurrentStream
from steerscope.engines.vllm.worker.pool import Cells, watched_rows
from steerscope.specs.errors import CapacityExceeded

_FLAG_STEPS = 4  # between two copies of the overflow flags
_MAPPED = 2  # cudaHostRegisterMapped


class CudaPool:
    def __init__(
        self,
        device: torch.device,
        cells: int,
        max_flags: int,
        hidden: int,
        dtype: torch.dtype,
        index: np.ndarray,
        runner: Any,
    ) -> None:
        kernel.register()
        self._current = CurrentStream(device)
        try:
            self.cells = torch.zeros(cells + watched_rows(cells, index), hidden, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityExceeded(
                f"no device memory for {cells * hidden * dtype.itemsize >> 20} MiB of rows: tap fewer layers, or "
                "lower max_num_batched_tokens"
            ) from error
        free = Cells(cells)
        self.take, self.give = free.take, free.give
        self._upload = IndexUpload(index, device, self._current)
        self.index, self.make_precomputed = self._upload.index, self._upload.make_precomputed
        self._copies = copies = RowCopies(self.cells, free, runner, self._current)
        self.copy_rows, self.take_late = copies.copy_rows, copies.take_late
        self.copy_some, self.copy_waiting_now = copies.copy_some, copies.copy_waiting_now
        self.after_copies, self.wait_for_copies = copies.after_copies, copies.wait_for_copies
        self.overflow_flags = torch.zeros(max_flags, dtype=torch.int32, device=device)
        self._host_flags = torch.zeros(max_flags, dtype=torch.int32, pin_memory=True)
        self._flags_copied = torch.cuda.Event()
        self._copying_flags, self._steps = False, 0

    def make_stage(self, n_taps: int, max_requests: int) -> Tensor:
        return make_stage(n_taps, max_requests, self.cells)

    def upload_index(self, tokens: int, precompute: bool = False) -> None:
        self._upload.upload(tokens, precompute)

    def advance(self, tokens: int) -> None:
        del tokens  # the last tap of the step before has done it

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        return self.cells[cell : cell + count * width].view(count, width, -1)

    def take_overflows(self, wait: bool = False) -> list[int]:
        """Return flags of a copy that has arrived, and start the next copy every few steps."""
        found: list[int] = []
        if self._copying_flags and (wait or self._flags_copied.query()):
            self._flags_copied.synchronize()
            found, self._copying_flags = self._clear_found(), False
        self._steps += 1
        if not self._copying_flags and (wait or self._steps % _FLAG_STEPS == 0):
            self._host_flags.copy_(self.overflow_flags, non_blocking=True)
            self._flags_copied.record(self._current())
            self._copying_flags = True
            if wait:
                self._flags_copied.synchronize()
                found, self._copying_flags = found + self._clear_found(), False
        return found

    def _clear_found(self) -> list[int]:
        found = self._host_flags.nonzero().flatten().tolist() if self._host_flags.any() else []
        for number in found:
            self.overflow_flags[number] = 0
        return found

    def pin(self, arena: Arena) -> None:
        """Let the GPU write to the shared memory itself."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        code = runtime.cudaHostRegister(arena.address, arena.size, _MAPPED)
        if int(code) != 0:
            raise CapacityExceeded(f"the driver cannot pin {arena.size >> 20} MiB for captured rows (code {code})")

    def unpin(self, arena: Arena) -> None:
        """Unpin memory before it is unmapped, or the driver would treat its address as pinned."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        runtime.cudaHostUnregister(arena.address)

    def stats(self) -> dict[str, float]:
        return {"backlog_bytes": float(self._copies.backlog), "bus_gb_per_s": self._copies.pace.rate / 1e6}
