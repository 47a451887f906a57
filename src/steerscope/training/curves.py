"""Plots of training: the losses of one run, and perplexity over learning rates of many."""

import math
from collections.abc import Mapping, Sequence

from steerscope.analysis.svg import HEIGHT, INK, NEUTRAL, POSITIVE, Axes, drawing, text
from steerscope.training.course import Baselines
from steerscope.training.learnable import perplexity

_WIDTH, _WORDS = 640, 130  # of a plot, and of the room for words on its right
_COLOURS = (POSITIVE, "#2468a8", "#2f7d5b", "#7c4d9e", INK)


def loss_plot(lines: Sequence[Mapping[str, float]], baselines: Baselines) -> str:
    """Perplexity over steps: of the batches, of the validation texts, and of those without the vector."""
    batches = [(line["step"], perplexity(line["loss"])) for line in lines if "loss" in line]
    judged = [(line["step"], perplexity(line["validation"])) for line in lines if "validation" in line]
    level = {"unsteered": perplexity(baselines.unsteered)}
    if baselines.best_prompt is not None:
        level["prompted"] = perplexity(baselines.prompted[baselines.best_prompt])
    values = [y for _, y in (*batches, *judged)] + list(level.values())
    last = max(1.0, *(line["step"] for line in lines))
    axes = _axes((0, last), values)
    best = min(judged, key=lambda point: point[1])
    drawn = axes.frame("perplexity", "step", _whole(last), _powers(values))
    for name, value in level.items():
        drawn += axes.curve([(0, math.log10(value)), (last, math.log10(value))], NEUTRAL, "6 4")
        drawn += _beside(axes, value, f"{name} {value:.1f}", NEUTRAL)
    drawn += (
        axes.curve(_log(batches), "#e3b493") + axes.curve(_log(judged), POSITIVE) + axes.dots(_log(judged), POSITIVE, 3)
    )
    drawn += axes.dots(_log([best]), POSITIVE, 6) + _beside(axes, best[1], f"steered {best[1]:.1f}", POSITIVE)
    return drawing(drawn, _WIDTH, HEIGHT)


def sweep_plot(curves: Mapping[str, Sequence[tuple[float, float]]], levels: Mapping[str, float]) -> str:
    """Validation perplexity over learning rates, a curve per layer and set; the best of each is marked."""
    points = [point for curve in curves.values() for point in curve if math.isfinite(point[1])]
    if not points:
        return drawing(text(_WIDTH / 2, HEIGHT / 2, "no run has finished"), _WIDTH, HEIGHT)
    rates = sorted({rate for rate, _ in points})
    values = [y for _, y in points] + list(levels.values())
    low, high = math.log10(rates[0]), math.log10(rates[-1])
    axes = _axes((low - 0.1, high + 0.1), values)
    drawn = axes.frame(
        "validation perplexity", "learning rate", {math.log10(rate): f"{rate:g}" for rate in rates}, _powers(values)
    )
    for name, value in levels.items():
        drawn += axes.curve([(low - 0.1, math.log10(value)), (high + 0.1, math.log10(value))], NEUTRAL, "6 4")
        drawn += _beside(axes, value, f"{name} {value:.1f}", NEUTRAL)
    for i, (name, curve) in enumerate(curves.items()):
        found, colour = [point for point in curve if math.isfinite(point[1])], _COLOURS[i % len(_COLOURS)]
        if found:
            best = min(found, key=lambda point: point[1])
            places = [(math.log10(x), math.log10(y)) for x, y in sorted(found)]
            drawn += axes.curve(places, colour) + axes.dots(places, colour, 3)
            drawn += axes.dots([(math.log10(best[0]), math.log10(best[1]))], colour, 6)
            drawn += _beside(axes, sorted(found)[-1][1], f"{name}", colour)
    return drawing(drawn, _WIDTH, HEIGHT)


def _axes(x: tuple[float, float], values: Sequence[float]) -> Axes:
    finite = [math.log10(value) for value in values if math.isfinite(value)]
    room = max(0.05, 0.06 * (max(finite) - min(finite)))
    return Axes(x, (min(finite) - room, max(finite) + room), _WIDTH - _WORDS)


def _log(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, math.log10(y)) for x, y in points if math.isfinite(y)]


def _beside(axes: Axes, value: float, words: str, colour: str) -> str:
    return text(axes.right + 10, axes.at(0, math.log10(value))[1] + 4, words, "start", colour)


def _whole(last: float) -> list[float]:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if last / step <= 8)
    return [float(x) for x in range(0, int(last) + 1, every)]


def _powers(values: Sequence[float]) -> dict[float, str]:
    """1, 2, 5, 10, … where they lie among the values."""
    finite = [value for value in values if math.isfinite(value)]
    ticks = [digit * 10.0**power for power in range(-1, 13) for digit in (1, 1.5, 2, 3, 5, 7)]
    return {math.log10(tick): f"{tick:g}" for tick in ticks if min(finite) * 0.95 <= tick <= max(finite) * 1.05}
