"""Reductions of rows on the device: float32, every position counted once, with the number of reduced rows.

After a preemption the engine computes positions again; those below the reducer's next position are skipped.
"""

from bisect import bisect_left
from typing import Literal

import torch
from torch import Tensor

from steerscope.specs.errors import RequestFailed


class Reducer:
    """One request's running `mean` or `last` over rows [n, keys, hidden] in ascending order of positions."""

    def __init__(self, kind: Literal["mean", "last"], keys: int, hidden: int, device: torch.device) -> None:
        self.kind = kind
        self.n = 0
        self.next = 0  # positions below this have been counted
        self._value = torch.zeros(keys, hidden, dtype=torch.float32, device=device)

    def update(self, positions: range | list[int], rows: Tensor) -> None:
        known = bisect_left(positions, self.next)
        if known == len(positions):
            return
        rows = rows[known:]
        if self.kind == "mean":
            self._value += rows.sum(0, dtype=torch.float32)
        else:
            self._value.copy_(rows[-1])
        self.n += len(positions) - known
        self.next = positions[-1] + 1

    def restart(self) -> None:
        """Start again from the first row."""
        self.n = self.next = 0
        self._value.zero_()

    def result(self) -> Tensor:
        """Return the reduction [keys, hidden] as float32 on the host."""
        if self.n == 0:
            return torch.full_like(self._value, torch.nan).cpu()  # a zero vector would pass for a measurement
        value = self._value / self.n if self.kind == "mean" else self._value.clone()
        return value.cpu()


class HeldBack:
    """A reducer that holds the newest rows back until the end of the text is known.

    An engine that schedules ahead computes rows past the end of a text. Those must not be reduced, so the last `hold`
    rows are kept apart, and `finish` reduces those before the end.
    """

    def __init__(self, reducer: Reducer, hold: int) -> None:
        self.reducer, self.hold = reducer, hold
        self._positions: list[int] = []
        self._rows: list[Tensor] = []
        self._next = 0

    def push(self, positions: range | list[int], rows: Tensor) -> None:
        """Add rows [n, keys, hidden]. Known positions are skipped; the rows are copied."""
        known = bisect_left(positions, self._next)
        if known == len(positions):
            return
        self._next = positions[-1] + 1
        self._positions += positions[known:]
        sure = len(self._positions) - self.hold
        self._rows.append(rows[known:])
        together = torch.cat(self._rows) if len(self._rows) > 1 else self._rows[0]
        if sure > 0:
            self.reducer.update(self._positions[:sure], together[:sure])
            self._positions, together = self._positions[sure:], together[sure:]
        self._rows = [together.clone()]  # the engine reuses the memory of its rows

    def finish(self, rows: int) -> Reducer:
        """Reduce the held rows at positions below `rows`."""
        if self.reducer.next > rows:
            raise RequestFailed(f"the engine ran {self.reducer.next - rows} rows too far, past the end of the text")
        counted = [position for position in self._positions if position < rows]
        if counted:
            self.reducer.update(counted, torch.cat(self._rows)[: len(counted)])
        self._positions, self._rows = [], []
        return self.reducer
