"""Colours of pages and plots, and colour scales of heat maps that few extreme values cannot spoil."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

INK = "#1f2430"
SOFT = "#59606e"
AXIS = "#9aa1ac"
GRID = "#e6e8ec"
BAND = "rgba(31,36,48,0.06)"
POSITIVE = "#c2560c"
NEGATIVE = "#2468a8"
NEUTRAL = "#6b7280"
PALETTE = (POSITIVE, NEGATIVE, "#2f7d5b", "#7c4d9e", "#8a6d1d", NEUTRAL, "#b03a5b", "#1f7a8c")
DIVERGING = [[0.0, "#17497c"], [0.25, "#6ea3d4"], [0.5, "#ffffff"], [0.75, "#f0a35e"], [1.0, "#a94606"]]
SEQUENTIAL = [[0.0, "#ffffff"], [0.5, "#f0a35e"], [1.0, "#a94606"]]

_CLEAR = 0.98  # of the values stay within the colours


@dataclass(frozen=True, slots=True)
class Colours:
    """A linear colour scale from 0, or from -limit where values have a sign, to limit. Values beyond have its last
    colour."""

    limit: float
    signed: bool = True
    most: float = 0.0  # the largest size of a value

    @classmethod
    def of(cls, values: ArrayLike, *, signed: bool, least: float = 0.0) -> "Colours":
        """Return a scale for these values that ends at `least` or higher."""
        sizes = np.abs(np.asarray(values, dtype=float))
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        if not sizes.size:
            return cls(least or 1.0, signed)
        return cls(max(least, float(np.quantile(sizes, _CLEAR, method="lower"))), signed, float(sizes.max()))

    @property
    def note(self) -> str:
        if self.most <= self.limit:
            return ""
        sign = "±" if self.signed else ""
        return f"Colours end at {sign}{_text(self.limit)}; the largest value is {sign}{_text(self.most)}"

    def keywords(self) -> dict[str, object]:
        """Return arguments of a heat map."""
        scale = DIVERGING if self.signed else SEQUENTIAL
        return {"colorscale": scale, "zmin": -self.limit if self.signed else 0.0, "zmax": self.limit}


def _text(value: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
