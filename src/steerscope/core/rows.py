"""Rows of one request by absolute position, and their labels.

A request with p prompt tokens and g generated ones has p+g−1 rows per site: the last sampled token is never fed back.
`RowBuffer` is allocated for the longest possible request and cut to the computed rows. A missing row is an error.
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
        self.keys, self.positions, self.most = tuple(keys), positions, most
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

    def finish(self, rows: int) -> tuple[np.ndarray, Tensor]:
        """Return the selected positions below `rows`, and their rows."""
        positions = selected(self.positions, min(rows, self.most))
        if self._written < len(positions):
            raise RequestFailed(f"{len(positions) - self._written} of {len(positions)} rows were never computed")
        kept = self._rows[: len(positions)]
        # A view would keep the unused tail alive, so the rows are copied where there is one.
        return positions, kept.clone() if len(kept) < len(self._rows) else kept
