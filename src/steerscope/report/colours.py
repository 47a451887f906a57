"""Colours of pages and plots, and colour scales of heat maps that one extreme value cannot spoil.

Where the largest value is far beyond nearly all others, a linear scale makes the rest one colour, and a scale that is
cut makes all large values one colour. So colours are linear up to a bend, which nine tenths of the values stay below,
and logarithmic from there to the largest value.
"""

from collections.abc import Sequence
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

_FAR = 4.0  # a largest value beyond this many bends makes the scale bend
_LINEAR = 0.7  # of the colours belong to values below the bend
_STOPS = 24  # of the colours on either side of 0


@dataclass(frozen=True, slots=True)
class Colours:
    """A colour scale from 0, or from -limit where values have a sign, to limit; linear where there is no bend."""

    limit: float
    bend: float | None = None
    signed: bool = True

    @classmethod
    def of(cls, values: ArrayLike, *, signed: bool, least: float = 0.0) -> "Colours":
        """Return a scale for these values; up to `least` it is always linear."""
        sizes = np.abs(np.asarray(values, dtype=float))
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        if not sizes.size:
            return cls(least or 1.0, None, signed)
        limit = max(least, float(sizes.max()))
        bend = max(least, float(np.quantile(sizes, 0.9, method="lower")))
        return cls(limit, bend if limit > _FAR * bend else None, signed)

    @property
    def scale(self) -> Sequence[Sequence[float | str]]:
        return DIVERGING if self.signed else SEQUENTIAL

    @property
    def note(self) -> str:
        if self.bend is None:
            return ""
        sign = "±" if self.signed else ""
        return f"Colours: linear up to {sign}{_text(self.bend)}, logarithmic from there to {sign}{_text(self.limit)}"

    @property
    def ticks(self) -> dict[float, str]:
        """Places in the colours of a scale with a bend, and the values there."""
        bend = self.bend or self.limit
        above = [bend / 2, bend, float(np.sqrt(bend * self.limit)), self.limit]
        below = [-tick for tick in reversed(above)] if self.signed else []
        return {self.place(tick): _text(tick) for tick in (*below, 0.0, *above)}

    def place(self, value: float) -> float:
        """Return where in the colours a value lies, from -1 or 0 to 1."""
        return float(np.sign(value) * np.interp(abs(value), *self._stops()))

    def _stops(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sizes from 0 to the limit, and their places in the colours from 0 to 1."""
        places = np.linspace(0.0, 1.0, _STOPS + 1)
        if self.bend is None:
            return places * self.limit, places
        beyond = (places - _LINEAR) / (1 - _LINEAR)
        logarithmic = self.bend * (self.limit / self.bend) ** beyond
        return np.where(beyond > 0, logarithmic, places / _LINEAR * self.bend), places

    def keywords(self) -> dict[str, object]:
        """Return arguments of a heat map of the values as they are: the colours are moved, not the values."""
        lowest = -self.limit if self.signed else 0.0
        if self.bend is None:
            return {"colorscale": self.scale, "zmin": lowest, "zmax": self.limit}
        from plotly.colors import sample_colorscale

        sizes, places = self._stops()
        if self.signed:
            sizes = np.concatenate([-sizes[:0:-1], sizes])
            places = (np.concatenate([-places[:0:-1], places]) + 1) / 2
        stops = (sizes - lowest) / (self.limit - lowest)
        stops[0] = 0.0  # without a rounding error
        stops[-1] = 1.0
        colours = list(map(list, zip(stops.tolist(), sample_colorscale(self.scale, places.tolist()), strict=True)))
        return {"colorscale": colours, "zmin": lowest, "zmax": self.limit, "showscale": False}


def _text(value: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
