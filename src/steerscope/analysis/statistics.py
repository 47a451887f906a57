"""Confidence intervals, tests and corrections for many tests, in numpy and scipy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.float64]
DRAWS = 9_999  # of labels, where there are more ways to exchange them
_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def mean_interval(values: ArrayLike) -> Interval:
    """Return the mean and Student's t interval of it, unbounded where there is one value.

    The bootstrap is not used: of 2 to 5 values its 95 % interval covers the mean in 50 to 82 % of all samples, of 15 in
    92 %."""
    data = _checked(values)
    mean = float(data.mean())
    n = len(data)
    if n < 2:
        return Interval(mean, -np.inf, np.inf)
    reach = float(special.stdtrit(n - 1, (1 + _LEVEL) / 2) * data.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - reach, mean + reach)


def median_interval(values: ArrayLike) -> Interval:
    """Return the median between two of the sorted values, exact for every distribution. Where there are too few values
    for that (below 6 at 95 %), the bounds are those of the mean's t interval."""
    data = np.sort(_checked(values))
    rank = int(stats.binom.ppf((1 - _LEVEL) / 2, len(data), 0.5))  # of each bound, counted from its end
    if rank:
        return Interval(float(np.median(data)), float(data[rank - 1]), float(data[-rank]))
    around = mean_interval(data)
    return Interval(float(np.median(data)), around.low, around.high)


def share_interval(values: ArrayLike) -> Interval:
    """Return the share of ones among zeros and ones, and Clopper and Pearson's interval of it: where all are the same,
    a t interval would have no width."""
    data = _checked(values)
    ones = int(data.sum())
    found = stats.binomtest(ones, len(data)).proportion_ci(_LEVEL, method="exact")
    return Interval(ones / len(data), float(found.low), float(found.high))


def _checked(values: ArrayLike) -> Floats:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not data.size:
        raise ValueError(f"an interval needs a list of at least one number, not shape {data.shape}")
    return data


def permutation(a: ArrayLike, b: ArrayLike, *, paired: bool = False, draws: int = DRAWS, seed: int = 0) -> float:
    """Return the two-sided p of a difference of means; exact where there are at most `draws` ways to exchange labels.

    With `paired`, a[i] and b[i] belong together."""
    first = np.asarray(a, dtype=np.float64)
    second = np.asarray(b, dtype=np.float64)
    result = stats.permutation_test(
        (first, second),
        lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
        permutation_type="samples" if paired else "independent",
        vectorized=True,
        n_resamples=draws,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def least_paired_p(a: ArrayLike, b: ArrayLike, *, draws: int = DRAWS) -> float:
    """Return the least p that a paired permutation test of these can reach, however large the difference is: pairs that
    are equal say nothing, and k others can be exchanged in 2 ** k ways."""
    different = int(np.count_nonzero(np.asarray(a, dtype=np.float64) != np.asarray(b, dtype=np.float64)))
    exact = 2.0**-different
    return min(1.0, 2 * max(exact, 1 / (draws + 1) if 2.0 ** np.size(a) > draws else 0.0))


def holm(p: ArrayLike) -> Floats:
    """Return adjusted p of many tests: below a level, the chance of even one false finding is below it."""
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values)
    stepped = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1)
    return adjusted


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """Return adjusted p of many tests: below a level, the expected share of false findings is below it."""
    return np.asarray(stats.false_discovery_control(np.asarray(p, dtype=np.float64)))


def z_scores(values: ArrayLike, baseline: ArrayLike) -> Floats:
    """Return the distance of each value from the mean of `baseline` (its last axis) in standard deviations.

    With few baseline values it follows a t distribution, not a normal one; nan where the baseline does not vary."""
    random = np.asarray(baseline, dtype=np.float64)
    if random.shape[-1] < 2:
        raise ValueError("a z-score needs at least two baseline values")
    spread = random.std(axis=-1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread > 0, (np.asarray(values, dtype=np.float64) - random.mean(axis=-1)) / spread, np.nan)
