"""Small plots as SVG text, for files that must stay small and for pages that show pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from steerscope.report.colours import GRID, INK

# of one panel
WIDTH = 320
HEIGHT = 250
# of the plot in it, beside room for words
_LEFT = 46
_TOP = 34
_BOTTOM = HEIGHT - 42


def drawing(content: str, width: int, height: int) -> str:
    """Return a file of SVG on white."""
    style = f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{style}><rect width="{width}" height="{height}" fill="#ffffff"/>{content}</svg>\n'
    )


@dataclass(frozen=True, slots=True)
class Axes:
    """Map numbers to places in a panel, where wanted by their logarithms."""

    x: tuple[float, float]
    y: tuple[float, float]
    right: float = WIDTH - 14
    log_x: bool = False
    log_y: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = _part(x, self.x, self.log_x)
        up = _part(y, self.y, self.log_y)
        return _LEFT + across * (self.right - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    def frame(self, title: str, below: str, xs: Sequence[float], ys: Sequence[float]) -> str:
        """Draw title, grid and ticks."""
        parts = [text(_LEFT, _TOP - 14, title, "start"), text((_LEFT + self.right) / 2, _BOTTOM + 34, below)]
        for y in ys:
            _, place = self.at(self.x[0], y)
            parts += [line(_LEFT, place, self.right, place, GRID), text(_LEFT - 6, place + 4, f"{y:g}", "end")]
        parts += [text(self.at(x, self.y[0])[0], _BOTTOM + 16, f"{x:g}") for x in xs]
        return "".join(parts)

    def curve(self, points: Sequence[tuple[float, float]], colour: str, dashes: str = "none") -> str:
        places = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in points)
        look = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        return f'<polyline points="{places}" {look}/>'

    def dots(self, points: Sequence[tuple[float, float]], colour: str, radius: float, opacity: float = 1) -> str:
        look = f'r="{radius}" fill="{colour}" fill-opacity="{opacity}"'
        return "".join('<circle cx="{:.1f}" cy="{:.1f}" {}/>'.format(*self.at(x, y), look) for x, y in points)


def _part(value: float, ends: tuple[float, float], log: bool) -> float:
    low, high, value = (math.log10(number) if log else number for number in (*ends, value))
    return (value - low) / (high - low)


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'
