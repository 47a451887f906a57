"""Is it there, how large, how sure: intervals, tests and corrections that every room uses. Pure numpy and scipy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def bootstrap(
    values: ArrayLike,
    *,
    groups: Sequence[object] | None = None,
    statistic: Callable[[Floats], float] = np.mean,
    level: float = 0.95,
    draws: int = 2_000,
    seed: int = 0,
) -> Interval:
    """Percentile interval. With `groups` (say, the question of each answer) whole groups are drawn: answers to one
    question are alike; drawing them one by one would make the interval too narrow."""
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not data.size:
        raise ValueError(f"bootstrap needs a list of at least one number, not shape {data.shape}")
    random = np.random.default_rng(seed)
    if groups is None:
        every = random.choice(data, (draws, len(data)))
        found = every.mean(axis=1) if statistic is np.mean else [float(statistic(drawn)) for drawn in every]
    else:
        parts = _parts(data, groups)
        chosen = random.integers(len(parts), size=(draws, len(parts)))
        found = [float(statistic(np.concatenate([parts[part] for part in row]))) for row in chosen]
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(data)), float(low), float(high))


def _parts(data: Floats, groups: Sequence[object]) -> list[Floats]:
    if len(groups) != len(data):
        raise ValueError(f"{len(data)} values and {len(groups)} groups: give each value its group")
    places: dict[object, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return [data[rows] for rows in places.values()]


def permutation(a: ArrayLike, b: ArrayLike, *, paired: bool = False, draws: int = 9_999, seed: int = 0) -> float:
    """Two-sided p of a difference of means; `paired`: a[i] and b[i] belong together. Exact where few ways exist."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    result = stats.permutation_test(
        (first, second),
        lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
        permutation_type="samples" if paired else "independent",
        vectorized=True,
        n_resamples=draws,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def holm(p: ArrayLike) -> Floats:
    """Adjusted p of many tests: below a level, the chance of even one false finding is below it."""
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values)
    stepped = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1)
    return adjusted


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """Adjusted p of many tests: below a level, the expected share of false findings is below it."""
    return np.asarray(stats.false_discovery_control(np.asarray(p, dtype=np.float64)))


def z_scores(values: ArrayLike, baseline: ArrayLike) -> Floats:
    """How many standard deviations of `baseline` (its last axis) each value lies from its mean. With few baseline
    values the result follows a t distribution, not a normal one; nan where the baseline does not vary."""
    random = np.asarray(baseline, dtype=np.float64)
    if random.shape[-1] < 2:
        raise ValueError("a z-score needs at least two baseline values")
    spread = random.std(axis=-1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread > 0, (np.asarray(values, dtype=np.float64) - random.mean(axis=-1)) / spread, np.nan)
