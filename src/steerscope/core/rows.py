"""Rows of one request, found by absolute position, and their labels.

A request with p prompt tokens and g generated ones has p+g−1 rows per site: the last sampled token is never fed back.
`RowBuffer` is reserved for the longest possible request and cut to what was really computed; a row that is missing
then is an error, never a silent gap.
"""

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
    """What one row is: request, position, token, phase, and message and role when there was a chat."""

    request: str
    position: int
    token_id: int
    phase: Phase
    message: int | None
    role: str | None


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of rows as columns of equal length; `message` is −1 where there is none."""

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
        """Plain columns, e.g. for a data frame."""
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
    """The selected positions below `stop`, ascending."""
    parts = [np.arange(a, b, dtype=np.int64) for a, b in positions.within(0, stop)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class RowBuffer:
    """Host memory for the rows of one request: [rows, keys, hidden], written by position."""

    def __init__(self, keys: Sequence[Key], positions: Positions, most: int, hidden: int, dtype: torch.dtype) -> None:
        self.keys, self.positions, self.most = tuple(keys), positions, most
        self._rows = torch.empty(positions.count(most), len(self.keys), hidden, dtype=dtype)
        self._written = 0

    def write(self, start: int, rows: Tensor) -> None:
        """Rows [n, keys, hidden] of the n selected positions that follow absolute position `start`."""
        first = self.positions.count(start)
        if first != self._written:
            raise RequestFailed(f"row {self._written} is missing: position {start} would be row {first}")
        self._rows[first : first + len(rows)].copy_(rows)
        self._written += len(rows)

    def restart(self) -> None:
        """The rows will come again from the first."""
        self._written = 0

    def finish(self, rows: int) -> tuple[np.ndarray, Tensor]:
        """The positions below `rows` that were selected, and their rows."""
        positions = selected(self.positions, min(rows, self.most))
        if self._written < len(positions):
            raise RequestFailed(f"{len(positions) - self._written} of {len(positions)} rows were never computed")
        kept = self._rows[: len(positions)]
        # The unused tail would stay alive behind a view; give it back when it is worth a copy.
        return positions, kept.clone() if len(kept) < len(self._rows) else kept
