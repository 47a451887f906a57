"""Small plots as SVG text, for files that must stay small and for pages that show pictures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from steerscope.report.colours import GRID, INK

WIDTH, HEIGHT = 320, 250  # of one panel
_LEFT, _TOP = 46, 34  # room for its words


def drawing(content: str, width: int, height: int) -> str:
    """Return a file of SVG on white."""
    style = f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{style}><rect width="{width}" height="{height}" fill="#ffffff"/>{content}</svg>\n'
    )


class Axes:
    """Map numbers to places in a panel, where wanted by their logarithms."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        right: float = WIDTH - 14,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        self.x = x
        self.y = y
        self.log_x = log_x
        self.log_y = log_y
        self.right = right
        self.bottom = HEIGHT - 42

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = _part(x, self.x, self.log_x)
        up = _part(y, self.y, self.log_y)
        return _LEFT + across * (self.right - _LEFT), self.bottom - up * (self.bottom - _TOP)

    def frame(
        self,
        title: str,
        below: str,
        xs: Sequence[float] | Mapping[float, str],
        ys: Sequence[float] | Mapping[float, str],
    ) -> str:
        """Draw title, grid and ticks; ticks are numbers, or numbers with their labels."""
        parts = [text(_LEFT, _TOP - 14, title, "start"), text((_LEFT + self.right) / 2, self.bottom + 34, below)]
        for y, label in _ticks(ys):
            _, place = self.at(self.x[0], y)
            parts += [line(_LEFT, place, self.right, place, GRID), text(_LEFT - 6, place + 4, label, "end")]
        parts += [text(self.at(x, self.y[0])[0], self.bottom + 16, label) for x, label in _ticks(xs)]
        return "".join(parts)

    def curve(self, points: Sequence[tuple[float, float]], colour: str, dashes: str = "none") -> str:
        places = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in points)
        return (
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )

    def dots(self, points: Sequence[tuple[float, float]], colour: str, radius: float, opacity: float = 1) -> str:
        places = [self.at(x, y) for x, y in points]
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="{opacity}"/>'
            for x, y in places
        )


def _part(value: float, ends: tuple[float, float], log: bool) -> float:
    low, high, value = (math.log10(number) if log else number for number in (*ends, value))
    return (value - low) / (high - low)


def _ticks(ticks: Sequence[float] | Mapping[float, str]) -> Iterable[tuple[float, str]]:
    return ticks.items() if isinstance(ticks, Mapping) else [(tick, f"{tick:g}") for tick in ticks]


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'
