"""The one equation. Every op on a hidden state h with direction v is

    p  = ⟨h, v⟩                                        (float32)
    h' = h + gate · ( c + clip(s·p, lo, hi) − m·p ) · v

`change` is the definition. Every fast path is tested against it, and it is tested against a float64 version that is
written separately, row by row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.specs.steering import Coefficients

NOTHING: Coefficients = (0.0, 0.0, 0.0, float("-inf"), float("inf"))  # row 0 of every coefficient table


class Operands(NamedTuple):
    """The operands of one column of entries: v [n, hidden], the rest [n]."""

    v: Tensor
    c: Tensor
    s: Tensor
    m: Tensor
    lo: Tensor
    hi: Tensor
    gate_id: Tensor
    constant: Tensor | None = None  # the change [n, hidden], where it depends on neither h nor a gate


def look_up(vectors: Tensor, coefficients: Tensor, entries: Tensor) -> list[Operands]:
    """Return the operands of each column of entries."""
    found = []
    for column in entries.unbind(1):
        vector_slot, coefficient_slot, gate_id = column.unbind(-1)
        c, s, m, lo, hi = coefficients.index_select(0, coefficient_slot).unbind(-1)
        found.append(Operands(vectors.index_select(0, vector_slot), c, s, m, lo, hi, gate_id))
    return found


def settle(column: Operands) -> Operands:
    """Compute the change of a column in advance where it does not depend on h: plain additions through gate 0."""
    if (column.s != 0).any() or (column.m != 0).any() or (column.gate_id != 0).any():
        return column
    always_open = torch.ones(1, device=column.v.device)
    return column._replace(constant=_step(torch.zeros_like(column.v), column, always_open))


def _step(h: Tensor, column: Operands, gates: Tensor) -> Tensor:
    v, c, s, m, lo, hi, gate_id, _ = column
    gate = gates.index_select(0, gate_id)
    p = torch.where((s != 0) | (m != 0), (h * v).sum(-1), 0.0)
    amount = gate * (c + torch.minimum(torch.maximum(s * p, lo), hi) - m * p)
    active = (gate != 0) & ((c != 0) | (s != 0) | (m != 0))
    return torch.where(active.unsqueeze(-1), amount.unsqueeze(-1) * v, 0.0)


def apply(h: Tensor, columns: Sequence[Operands], gates: Tensor) -> Tensor:
    """Return the sum that the columns, in order, add to h, in float32."""
    h = h.float()
    total = torch.zeros_like(h)
    for column in columns:
        total = total + (_step(h + total, column, gates) if column.constant is None else column.constant)
    return total


def change(h: Tensor, vectors: Tensor, coefficients: Tensor, entries: Tensor, gates: Tensor) -> Tensor:
    """Return what steering adds to h, in float32.

    h [n, hidden] any float dtype · vectors [V, hidden] float32 · coefficients [C, 5] float32 (c, s, m, lo, hi) ·
    entries [n, K, 3] integers (vector slot, coefficient slot, gate id), applied in order k = 0 … K−1 · gates [G].

    The change is summed separately, because (h + change) − h would lose its small bits. An entry whose gate is 0 or
    whose c, s and m are all 0 is masked, not multiplied, so that a row holding inf stays unchanged. Where s and m are 0
    the projection is not used, so it may be NaN.
    """
    return apply(h, look_up(vectors, coefficients, entries), gates)
