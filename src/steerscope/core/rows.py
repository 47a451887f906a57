"""Rows of one request by absolute position, their labels, and their reductions.

A request with p prompt tokens and g generated ones has p+g−1 rows per site: the last sampled token is never fed back.
`RowBuffer` is allocated for the longest possible request and cut to the computed rows. A missing row is an error.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from steerscope.core.slot_table import Key
from steerscope.specs.errors import RequestFailed
from steerscope.specs.tokens import MessageSpan, Positions

Phase = Literal["prompt", "generated"]


@dataclass(frozen=True, slots=True)
class Label:
    """The label of one row: request, position, token, phase, and message and role in a chat."""

    request: str
    position: int
    token_id: int
    phase: Phase
    message: int | None
    role: str | None


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of rows as columns of equal length; `message` is −1 outside messages."""

    request: str
    position: np.ndarray
    token_id: np.ndarray
    generated: np.ndarray
    message: np.ndarray
    roles: tuple[str, ...] = ()  # by message index

    def __len__(self) -> int:
        return len(self.position)

    def __iter__(self) -> Iterator[Label]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Label:
        message = int(self.message[i])
        return Label(
            request=self.request,
            position=int(self.position[i]),
            token_id=int(self.token_id[i]),
            phase="generated" if self.generated[i] else "prompt",
            message=message if message >= 0 else None,
            role=self.roles[message] if message >= 0 else None,
        )

    def table(self) -> dict[str, list[object]]:
        """Return the labels as columns, e.g. for a data frame."""
        rows = list(self)
        return {name: [getattr(row, name) for row in rows] for name in Label.__dataclass_fields__}

    def take(self, index: np.ndarray) -> "Labels":
        columns = (self.position[index], self.token_id[index], self.generated[index], self.message[index])
        return Labels(self.request, *columns, roles=self.roles)


def make_labels(
    request: str,
    positions: np.ndarray,
    token_ids: Sequence[int],
    prompt_length: int,
    messages: Sequence[MessageSpan] | None,
    open_message: bool,
) -> Labels:
    """Label the given positions of a request whose tokens (prompt, then generated) are `token_ids`."""
    message = np.full(len(positions), -1, dtype=np.int32)
    roles: list[str] = []
    generated = positions >= prompt_length
    if messages is not None:
        roles = [span.role for span in messages]
        for span in messages:
            start, stop = span.content
            message[(positions >= start) & (positions < stop)] = span.index
        if not open_message:
            roles.append("assistant")
        message[generated] = len(roles) - 1
    tokens = np.asarray(token_ids, dtype=np.int64)[positions]
    return Labels(request, positions, tokens, generated, message, tuple(roles))


def selected(positions: Positions, stop: int) -> np.ndarray:
    """Return the selected positions below `stop`, ascending."""
    parts = [np.arange(a, b, dtype=np.int64) for a, b in positions.within(0, stop)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class RowBuffer:
    """Host memory [rows, keys, hidden] for the rows of one request, written by position."""

    def __init__(self, keys: Sequence[Key], positions: Positions, most: int, hidden: int, dtype: torch.dtype) -> None:
        self.keys = tuple(keys)
        self.positions = positions
        self._rows = torch.empty(positions.count(most), len(self.keys), hidden, dtype=dtype)
        self._written = 0

    def write(self, start: int, rows: Tensor) -> None:
        """Write rows [n, keys, hidden] of the first n selected positions from absolute position `start` on."""
        first = self.positions.count(start)
        if first != self._written:
            raise RequestFailed(f"row {self._written} is missing: position {start} would be row {first}")
        self._rows[first : first + len(rows)].copy_(rows)
        self._written += len(rows)

    def restart(self) -> None:
        """Start again from the first row."""
        self._written = 0

    def finish(self, count: int) -> Tensor:
        """Return the first `count` rows."""
        if self._written < count:
            raise RequestFailed(f"{count - self._written} of {count} rows were never computed")
        kept = self._rows[:count]
        # A view would keep the unused tail alive, so the rows are copied where there is one.
        return kept.clone() if count < len(self._rows) else kept


class Reducer:
    """One request's running `mean` or `last` over rows [n, keys, hidden] in ascending order of positions: float32, each
    position counted once, with the number of reduced rows. After a preemption the engine computes positions again;
    those below `next` are skipped."""

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

    def finish(self, count: int) -> Tensor:
        """Return the reduction of `count` rows."""
        if self.n != count:
            raise RequestFailed(f"{self.n} of {count} rows were reduced")
        return self.result()

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
        self.reducer = reducer
        self.hold = hold
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
            self._positions = self._positions[sure:]
            together = together[sure:]
        self._rows = [together.clone()]  # the engine reuses the memory of its rows

    def finish(self, rows: int) -> Reducer:
        """Reduce the held rows at positions below `rows`."""
        if self.reducer.next > rows:
            raise RequestFailed(f"the engine ran {self.reducer.next - rows} rows too far, past the end of the text")
        counted = [position for position in self._positions if position < rows]
        if counted:
            self.reducer.update(counted, torch.cat(self._rows)[: len(counted)])
        self._positions = []
        self._rows = []
        return self.reducer
