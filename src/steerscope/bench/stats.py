"""Times into figures: summaries, drift, ratios of paired runs with their interval."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from steerscope.analysis.statistics import mean_interval, median_interval


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
    """Return the ratio of each round, their median and mean, and 95 % intervals of both over rounds."""
    ratios = np.array(other) / np.array(base)
    median = median_interval(ratios)
    mean = mean_interval(ratios)
    return {
        "median": median.estimate,
        "mean": mean.estimate,
        "interval": [median.low, median.high],
        "mean_interval": [mean.low, mean.high],
        "rounds": ratios.tolist(),
    }
