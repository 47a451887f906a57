"""Reductions of rows on the device: float32, every position counted once, with the number of rows they stand for.

A position watermark makes recomputation harmless: after a preemption the engine feeds positions again, and those
below the mark are passed over.
"""

from typing import Literal

import torch
from torch import Tensor


class Reducer:
    """One request's running `mean` or `last` over rows [n, keys, hidden] that come in ascending position order."""

    def __init__(self, kind: Literal["mean", "last"], keys: int, hidden: int, device: torch.device) -> None:
        self.kind = kind
        self.n = 0
        self._next = 0
        self._value = torch.zeros(keys, hidden, dtype=torch.float32, device=device)

    def update(self, positions: range | list[int], rows: Tensor) -> None:
        fresh = [i for i, position in enumerate(positions) if position >= self._next]
        if not fresh:
            return
        rows = rows[fresh[0] :].float()
        if self.kind == "mean":
            self._value += rows.sum(0)
        else:
            self._value.copy_(rows[-1])
        self.n += len(fresh)
        self._next = positions[-1] + 1

    def result(self) -> Tensor:
        """[keys, hidden] float32 on the host."""
        if self.n == 0:
            return torch.full_like(self._value, torch.nan).cpu()  # a zero vector would pass for a measurement
        value = self._value / self.n if self.kind == "mean" else self._value.clone()
        return value.cpu()
