"""The row pool on a GPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.cuda.fused_norm import register
from steerscope.engines.vllm.cuda.precomputed_ops import PrecomputedOps
from steerscope.engines.vllm.cuda.row_copies import RowCopies
from steerscope.engines.vllm.worker.index_layout import FLAG, PRECOMPUTED
from steerscope.specs.errors import CapacityExceeded

_STAGES = 8  # steps that may be prepared while earlier ones run
_FLAG_STEPS = 4  # between two copies of the overflow flags
_MAPPED = 2  # cudaHostRegisterMapped


class CudaPool(RowCopies):
    def __init__(
        self, device: torch.device, cells: int, max_flags: int, hidden: int, dtype: torch.dtype, index: np.ndarray
    ) -> None:
        register()
        super().__init__(device, cells, max_flags, hidden, dtype, index)
        self.index = torch.zeros(index.shape, dtype=torch.int32, device=device)
        self._host_index = index
        self._stages = [torch.zeros(index.shape, dtype=torch.int32, pin_memory=True) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)]
        self._turn = 0
        self._last_tokens = 0
        self._precomputed: PrecomputedOps | None = None
        self._host_flags = torch.zeros(max_flags, dtype=torch.int32, pin_memory=True)
        self._flags_copied = torch.cuda.Event()
        self._copying_flags = False
        self._steps = 0

    # --- what the taps read

    def make_precomputed(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, max_requests: int
    ) -> Tensor:
        self._precomputed = PrecomputedOps(vectors, coefficients, orders, before, self.index, max_requests)
        return self._precomputed.table

    def upload_index(self, tokens: int, precompute: bool = False) -> None:
        ops = self._precomputed
        precompute = precompute and ops is not None and tokens <= ops.rows
        if precompute:
            self._host_index[:tokens, FLAG] |= PRECOMPUTED
        self._copy_index(tokens)
        if ops is not None:
            ops.compute(tokens if precompute else 0)

    def _copy_index(self, tokens: int) -> None:
        """Copy index rows [0, tokens) to the device, and zeros over the rest of the last upload."""
        count = max(tokens, self._last_tokens)
        self._last_tokens = tokens
        if not count:
            return
        turn = self._turn
        self._turn = (self._turn + 1) % _STAGES
        self._copied[turn].synchronize()  # waits only if _STAGES steps were prepared ahead
        stage = self._stages[turn][:count]
        stage.numpy()[:] = self._host_index[:count]
        self.index[:count].copy_(stage, non_blocking=True)
        self._copied[turn].record(self._current())

    def advance(self, tokens: int) -> None:
        del tokens  # the last tap of the step before has done it

    # --- overflow flags

    def take_overflows(self, wait: bool = False) -> list[int]:
        """Return flags of a copy that has arrived, and start the next copy every few steps."""
        found: list[int] = []
        if self._copying_flags and (wait or self._flags_copied.query()):
            found = self._flags_that_arrived()
        self._steps += 1
        if not self._copying_flags and (wait or self._steps % _FLAG_STEPS == 0):
            self._host_flags.copy_(self.overflow_flags, non_blocking=True)
            self._flags_copied.record(self._current())
            self._copying_flags = True
            if wait:
                found += self._flags_that_arrived()
        return found

    def _flags_that_arrived(self) -> list[int]:
        self._flags_copied.synchronize()
        self._copying_flags = False
        found = self._host_flags.nonzero().flatten().tolist() if self._host_flags.any() else []
        for number in found:
            self.overflow_flags[number] = 0
        return found

    # --- shared memory

    def pin(self, arena: Arena) -> None:
        """Let the GPU write to the shared memory itself."""
        runtime: Any = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(arena.address, arena.size, _MAPPED)):
            raise CapacityExceeded(f"the driver cannot pin {arena.size >> 20} MiB for captured rows (code {code})")

    def unpin(self, arena: Arena) -> None:
        """Unpin memory before it is unmapped, or the driver would treat its address as pinned."""
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(arena.address)

    def stats(self) -> dict[str, float]:
        return {"backlog_bytes": float(self.backlog), "bus_gb_per_s": self.pace.rate / 1e6}
