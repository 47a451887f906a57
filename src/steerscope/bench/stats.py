"""Times into figures: summaries, drift, ratios of paired runs with their interval, a line through points."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """`spread` is the distance of the quartiles over the median."""
    low, high = np.quantile(seconds, [0.25, 0.75])
    median = statistics.median(seconds)
    return {"median": median, "min": min(seconds), "spread": float(high - low) / median, "drift": drift(seconds)}


def drift(seconds: Sequence[float]) -> float:
    """How much slower the last third is than the first."""
    third = max(1, len(seconds) // 3)
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1


def paired(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """The ratio of each round, their median and mean, and 95 % intervals of both by bootstrap over rounds."""
    ratios = np.array(other) / np.array(base)
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    intervals = {
        name: [float(edge) for edge in np.quantile(how(drawn, axis=1), [0.025, 0.975])]
        for name, how in (("interval", np.median), ("mean_interval", np.mean))
    }
    return {"median": float(np.median(ratios)), "mean": float(ratios.mean()), **intervals, "rounds": ratios.tolist()}


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the least squares line."""
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)
