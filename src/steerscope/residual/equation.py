"""The one equation. Every op on a hidden state h with direction v is

    p  = ⟨h, v⟩                                        (float32)
    h' = h + gate · ( c + clip(s·p, lo, hi) − m·p ) · v

`change` is the definition: every fast path is tested against it, and it against `change_float64`, which is written
apart, row by row, so that the two cannot share a mistake.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from steerscope.specs.steering import Coefficients

NOTHING: Coefficients = (0.0, 0.0, 0.0, float("-inf"), float("inf"))  # row 0 of every coefficient table


def change(h: Tensor, vectors: Tensor, coefficients: Tensor, entries: Tensor, gates: Tensor) -> Tensor:
    """What steering adds to h, in float32.

    h [n, hidden] any float dtype · vectors [V, hidden] float32 · coefficients [C, 5] float32 (c, s, m, lo, hi) ·
    entries [n, K, 3] integers (vector slot, coefficient slot, gate id), applied in order k = 0 … K−1 · gates [G].

    The change is summed apart from h: (h + change) − h would lose the change's small bits. An entry whose gate is 0
    or whose c, s and m are all 0 is masked, not multiplied: a row holding inf must stay as it is.
    """
    h = h.float()
    total = torch.zeros_like(h)
    for k in range(entries.shape[1]):
        vector_slot, coefficient_slot, gate_id = entries[:, k].unbind(-1)
        v = vectors.index_select(0, vector_slot)
        c, s, m, lo, hi = coefficients.index_select(0, coefficient_slot).unbind(-1)
        gate = gates.index_select(0, gate_id)
        p = ((h + total) * v).sum(-1)
        amount = gate * (c + torch.minimum(torch.maximum(s * p, lo), hi) - m * p)
        active = (gate != 0) & ((c != 0) | (s != 0) | (m != 0))
        step = torch.where(active.unsqueeze(-1), amount.unsqueeze(-1) * v, 0.0)
        total = total + step
    return total


def change_float64(h: np.ndarray, ops: Sequence[tuple[np.ndarray, Coefficients, float]]) -> np.ndarray:
    """The oracle: what one row h [hidden] gains from ops (v, coefficients, gate), in float64, in plain steps."""
    start = np.asarray(h, dtype=np.float64)
    now = start.copy()
    for v, (c, s, m, lo, hi), gate in ops:
        if gate == 0 or c == s == m == 0:
            continue
        v = np.asarray(v, dtype=np.float64)
        p = float(np.dot(now, v))
        now = now + gate * (c + min(max(s * p, lo), hi) - m * p) * v
    return now - start
