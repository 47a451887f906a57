"""The one equation in float64, row by row: the oracle of `core.equation.change`, with which it shares no line."""

from collections.abc import Sequence

import numpy as np

from steerscope.specs.steering import Coefficients


def change_float64(h: np.ndarray, ops: Sequence[tuple[np.ndarray, Coefficients, float]]) -> np.ndarray:
    """Return the change of one row h [hidden] by ops (v, coefficients, gate), in float64."""
    start = np.asarray(h, dtype=np.float64)
    now = start.copy()
    for v, (c, s, m, lo, hi), gate in ops:
        if gate == 0 or c == s == m == 0:
            continue
        v = np.asarray(v, dtype=np.float64)
        p = float(np.dot(now, v)) if s or m else 0.0
        now = now + gate * (c + min(max(s * p, lo), hi) - m * p) * v
    return now - start
