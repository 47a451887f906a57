"""Plots of training: the losses of one run, and perplexity over learning rates of many."""

import math
from collections.abc import Mapping, Sequence

from steerscope.report.colours import INK, NEUTRAL, PALETTE, POSITIVE
from steerscope.report.svg import HEIGHT, Axes, drawing, text
from steerscope.training.course import Baselines
from steerscope.training.passes import perplexity

# of a plot, and of the room for words on its right
_WIDTH = 640
_WORDS = 130
_COLOURS = (*PALETTE[:4], INK)

Points = Sequence[tuple[float, float]]


def loss_plot(lines: Sequence[Mapping[str, float]], baselines: Baselines) -> str:
    """Return perplexity over steps: of the batches, of the validation texts, and of those without the vector."""
    batches, judged = (
        [(line["step"], perplexity(line[name])) for line in lines if name in line] for name in ("loss", "validation")
    )
    levels = {"unsteered": perplexity(baselines.unsteered)}
    if baselines.best_prompt is not None:
        levels["prompted"] = perplexity(baselines.prompted[baselines.best_prompt])
    last = max(1.0, *(line["step"] for line in lines))
    values = [*(y for _, y in (*batches, *judged)), *levels.values()]
    axes = Axes((0, last), _span(values), _WIDTH - _WORDS, log_y=True)
    _, best = min(judged, key=lambda point: point[1])
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if last / step <= 8)
    steps = [float(step) for step in range(0, int(last) + 1, every)]
    drawn = axes.frame("perplexity", "step", steps, _ticks(values)) + _levels(axes, levels)
    drawn += axes.curve(_finite(batches), "#e3b493") + _marked(axes, _finite(judged), POSITIVE)
    return drawing(drawn + _beside(axes, best, f"steered {best:.1f}", POSITIVE), _WIDTH, HEIGHT)


def sweep_plot(curves: Mapping[str, Points], levels: Mapping[str, float]) -> str:
    """Return validation perplexity over learning rates, a curve per layer and set; the best of each is marked."""
    found = {name: sorted(_finite(curve)) for name, curve in curves.items()}
    points = [point for curve in found.values() for point in curve]
    if not points:
        return drawing(text(_WIDTH / 2, HEIGHT / 2, "no run has finished"), _WIDTH, HEIGHT)
    rates = sorted({rate for rate, _ in points})
    values = [*(y for _, y in points), *levels.values()]
    ends = rates[0] / 10**0.1, rates[-1] * 10**0.1
    axes = Axes(ends, _span(values), _WIDTH - _WORDS, log_x=True, log_y=True)
    drawn = axes.frame("validation perplexity", "learning rate", rates, _ticks(values)) + _levels(axes, levels)
    for i, (name, curve) in enumerate(found.items()):
        if curve:
            colour = _COLOURS[i % len(_COLOURS)]
            drawn += _marked(axes, curve, colour) + _beside(axes, curve[-1][1], name, colour)
    return drawing(drawn, _WIDTH, HEIGHT)


def _marked(axes: Axes, curve: Points, colour: str) -> str:
    """Draw a curve with a dot at every point, and a large one at the lowest."""
    best = sorted(curve, key=lambda point: point[1])[:1]
    return axes.curve(curve, colour) + axes.dots(curve, colour, 3) + axes.dots(best, colour, 6)


def _levels(axes: Axes, levels: Mapping[str, float]) -> str:
    lines = [axes.curve([(end, value) for end in axes.x], NEUTRAL, "6 4") for value in levels.values()]
    words = [_beside(axes, value, f"{name} {value:.1f}", NEUTRAL) for name, value in levels.items()]
    return "".join((*lines, *words))


def _beside(axes: Axes, value: float, words: str, colour: str) -> str:
    return text(axes.right + 10, axes.at(axes.x[1], value)[1] + 4, words, "start", colour)


def _finite(points: Points) -> Points:
    return [point for point in points if math.isfinite(point[1])]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis."""
    finite = [value for value in values if math.isfinite(value)]
    room = max(10**0.05, (max(finite) / min(finite)) ** 0.06)
    return min(finite) / room, max(finite) * room


def _ticks(values: Sequence[float]) -> list[float]:
    """Return 1, 1.5, 2, 3, 5, 7, 10, … where they lie among the values."""
    low, high = _span(values)
    ticks = [digit * 10.0**power for power in range(-1, 13) for digit in (1, 1.5, 2, 3, 5, 7)]
    return [tick for tick in ticks if low <= tick <= high]
