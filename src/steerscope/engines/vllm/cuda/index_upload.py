"""The step index on a GPU, uploaded from pinned memory, with the ops that are precomputed from it."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from steerscope.engines.vllm.cuda.streams import CurrentStream
from steerscope.engines.vllm.worker.index_layout import FLAG, PRECOMPUTED

if TYPE_CHECKING:
    from steerscope.engines.vllm.cuda.precomputed_ops import PrecomputedOps

_STAGES = 8  # steps that may be prepared while earlier ones run


class IndexUpload:
    def __init__(self, index: np.ndarray, device: torch.device, current: CurrentStream) -> None:
        self._host, self._current = index, current
        self.index = torch.zeros(index.shape, dtype=torch.int32, device=device)
        self._stages = [torch.zeros(index.shape, dtype=torch.int32, pin_memory=True) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)]
        self._turn, self._last_tokens = 0, 0
        self._precomputed: PrecomputedOps | None = None

    def make_precomputed(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, max_requests: int
    ) -> Tensor:
        from steerscope.engines.vllm.cuda.precomputed_ops import PrecomputedOps  # needs Triton

        self._precomputed = PrecomputedOps(vectors, coefficients, orders, before, self.index, max_requests)
        return self._precomputed.table

    def upload(self, tokens: int, precompute: bool) -> None:
        """Copy index rows [0, tokens) to the device, and zeros over the rest of the last upload."""
        ops = self._precomputed
        precompute = precompute and ops is not None and tokens <= ops.rows
        if precompute:
            self._host[:tokens, FLAG] |= PRECOMPUTED
        self._copy(tokens)
        if ops is not None:
            ops.compute(tokens if precompute else 0)

    def _copy(self, tokens: int) -> None:
        count, self._last_tokens = max(tokens, self._last_tokens), tokens
        if not count:
            return
        turn, self._turn = self._turn, (self._turn + 1) % _STAGES
        self._copied[turn].synchronize()  # waits only if _STAGES steps were prepared ahead
        stage = self._stages[turn][:count]
        stage.numpy()[:] = self._host[:count]
        self.index[:count].copy_(stage, non_blocking=True)
        self._copied[turn].record(self._current())
