"""Colours of heat maps that one extreme value cannot spoil.

Where the largest value is far beyond nearly all others, a linear scale makes the rest one colour, and a scale that is
cut makes all large values one colour. So colours are linear up to a bend, which nine tenths of the values stay below,
and logarithmic from there to the largest value. The key and a note under the map say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.colors import sample_colorscale

_FAR = 4.0  # a largest value beyond this many bends makes the scale bend
_LINEAR = 0.7  # of the colours belong to values below the bend
_NOTE_ROOM = 34  # pixels above the map
_STOPS = 24  # of the colours on either side of 0
Scale = Sequence[Sequence[float | str]]


@dataclass(frozen=True, slots=True)
class Colours:
    """Values from 0, or from -limit where they have a sign, to limit; without a bend all of them linear."""

    limit: float
    bend: float | None = None
    signed: bool = True

    @classmethod
    def of(cls, values: ArrayLike, *, signed: bool, least: float = 0.0) -> "Colours":
        """A scale for these values. Up to `least` it is linear, whatever they are."""
        sizes = np.abs(np.asarray(values, dtype=float))
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        if not sizes.size:
            return cls(least or 1.0, None, signed)
        limit, bend = max(least, float(sizes.max())), max(least, float(np.quantile(sizes, 0.9, method="lower")))
        return cls(limit, bend if limit > _FAR * bend else None, signed)

    @property
    def note(self) -> str:
        if self.bend is None:
            return ""
        sign = "±" if self.signed else ""
        return f"Colours: linear up to {sign}{_text(self.bend)}, logarithmic from there to {sign}{_text(self.limit)}"

    def place(self, value: float) -> float:
        """Where in the colours a value lies, from -1 or 0 to 1."""
        size = min(abs(value), self.limit)
        if self.bend is None:
            return float(np.sign(value)) * size / self.limit
        if size <= self.bend:
            return float(np.sign(value)) * _LINEAR * size / self.bend
        beyond = np.log(size / self.bend) / np.log(self.limit / self.bend)
        return float(np.sign(value) * (_LINEAR + (1 - _LINEAR) * beyond))

    def _value(self, place: float) -> float:
        """The value that lies there: the inverse of `place`."""
        if self.bend is None:
            return place * self.limit
        beyond = (abs(place) - _LINEAR) / (1 - _LINEAR)
        size = abs(place) / _LINEAR * self.bend if beyond <= 0 else self.bend * (self.limit / self.bend) ** beyond
        return float(np.sign(place) * size)

    def keywords(self, scale: Scale) -> dict[str, object]:
        """For a heat map of the values as they are: the colours are moved, not the values."""
        lowest = -self.limit if self.signed else 0.0
        if self.bend is None:
            return {"colorscale": scale, "zmin": lowest, "zmax": self.limit}
        places = np.linspace(-1.0 if self.signed else 0.0, 1.0, _STOPS * (2 if self.signed else 1) + 1)
        along = (places + 1) / 2 if self.signed else places
        stops = [(self._value(float(place)) - lowest) / (self.limit - lowest) for place in places]
        colours = [list(pair) for pair in zip(stops, sample_colorscale(scale, along.tolist()), strict=True)]
        colours[0][0], colours[-1][0] = 0.0, 1.0
        return {"colorscale": colours, "zmin": lowest, "zmax": self.limit, "showscale": False}

    def explain(self, figure: go.Figure, scale: Scale) -> None:
        """Add a key with the values at their places, and the note above the map; nothing where all is linear."""
        if self.bend is None:
            return
        ticks = [self.bend / 2, self.bend, float(np.sqrt(self.bend * self.limit)), self.limit]
        ticks = [*(-tick for tick in reversed(ticks) if self.signed), 0.0, *ticks]
        bar = {
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": [self.place(tick) for tick in ticks],
            "ticktext": [_text(tick) for tick in ticks],
        }
        lowest = -1.0 if self.signed else 0.0
        marker = {"color": [0.0], "cmin": lowest, "cmax": 1.0, "colorscale": scale, "colorbar": bar, "showscale": True}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", name="key"))
        about = {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom"}
        figure.add_annotation(text=self.note, showarrow=False, font={"size": 11}, yshift=6, **about)
        layout: Any = figure.layout  # plotly makes its attributes at run time
        above = layout.margin.t or 0
        layout.update(margin_t=max(above, _NOTE_ROOM), height=layout.height + max(0, _NOTE_ROOM - above))


def _text(value: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
