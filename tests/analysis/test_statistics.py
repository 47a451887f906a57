from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from steerscope.analysis.statistics import (
    Interval,
    benjamini_hochberg,
    holm,
    least_paired_p,
    mean_interval,
    median_interval,
    permutation,
    share_interval,
    z_scores,
)

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

RANDOM = np.random.default_rng(7)


SHAPES: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], np.ndarray], float, float]] = {
    # how it is drawn, its mean, its median
    "normal": (lambda random, shape: random.normal(0, 1, shape), 0.0, 0.0),
    "exponential": (lambda random, shape: random.exponential(1, shape), 1.0, float(np.log(2))),
    "log-normal": (lambda random, shape: random.lognormal(0, 0.5, shape), float(np.exp(0.125)), 1.0),
}


def coverage(interval: Callable[[np.ndarray], Interval], samples: np.ndarray, truth: float) -> float:
    found = [interval(sample) for sample in samples]
    return sum(one.low <= truth <= one.high for one in found) / len(found)


@pytest.mark.parametrize("n", range(2, 21))
@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_of_2_to_20_values_cover_the_truth_as_often_as_they_say(shape: str, n: int) -> None:
    """Of 1,000 samples 95 % have a standard error of 0.7 %. No interval of so few skewed values covers their mean in
    95 %; of an exponential distribution Student's covers 86 % or more, the percentiles of a bootstrap 50 to 91 %."""
    draw, mean, median = SHAPES[shape]
    samples = draw(np.random.default_rng(n), (1_000, n))
    of_mean = coverage(mean_interval, samples, mean)
    if shape == "normal":
        assert of_mean == pytest.approx(0.95, abs=0.02)
    else:
        assert of_mean >= {"exponential": 0.86, "log-normal": 0.89}[shape]
    assert coverage(median_interval, samples, median) >= (0.93 if n >= 6 or shape == "normal" else 0.88)


def test_a_bootstrap_of_few_values_covers_much_less() -> None:
    """The independent witness that the test above can fail: scipy's percentile interval."""
    samples = np.random.default_rng(5).normal(0, 1, (2_000, 5))
    found = stats.bootstrap(
        (samples,), np.mean, axis=1, n_resamples=999, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert np.mean((found.low <= 0) & (found.high >= 0)) < 0.85


@pytest.mark.parametrize("n", [2, 5, 14, 60])
def test_intervals_agree_with_scipy(n: int) -> None:
    values = RANDOM.normal(3, 2, n)
    ours, theirs = mean_interval(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (ours.estimate, ours.low, ours.high) == pytest.approx((values.mean(), theirs.low, theirs.high))
    ours, theirs = median_interval(values), stats.quantile_test(values).confidence_interval(0.95)
    if n >= 6:
        assert (ours.estimate, ours.low, ours.high) == pytest.approx((np.median(values), theirs.low, theirs.high))
    else:
        assert ours.low < np.median(values) < ours.high


@pytest.mark.parametrize("n", range(1, 21))
def test_intervals_of_shares_cover_the_truth_also_where_all_values_are_the_same(n: int) -> None:
    found = [share_interval([1.0] * ones + [0.0] * (n - ones)) for ones in range(n + 1)]
    for share in (0.01, 0.05, 0.3, 0.5, 0.9):
        covered = [one.low <= share <= one.high for one in found]
        assert stats.binom.pmf(np.arange(n + 1), n, share)[covered].sum() >= 0.95
    for ones, one in enumerate(found):
        theirs = stats.binomtest(ones, n).proportion_ci(0.95)
        assert (one.estimate, one.low, one.high) == pytest.approx((ones / n, theirs.low, theirs.high))


def test_one_value_says_nothing_of_how_far_it_is_off() -> None:
    for found in (mean_interval([3.0]), median_interval([3.0])):
        assert (found.low, found.high) == (-np.inf, np.inf)


@pytest.mark.parametrize(("pairs", "equal"), [(2, 0), (5, 0), (5, 2), (4, 4), (13, 0), (15, 0), (20, 15)])
def test_no_paired_difference_reaches_a_smaller_p_than_is_told(pairs: int, equal: int) -> None:
    """The largest difference there is: all on one side, but for the pairs that are equal."""
    base = np.zeros(pairs)
    other = base + np.arange(pairs) * 100.0 + 1e6
    other[:equal] = 0
    least = least_paired_p(other, base)
    assert permutation(other, base, paired=True) == pytest.approx(least, rel=0.2 if pairs > 13 else 1e-9)
    if pairs <= 13:
        assert least == pytest.approx(
            min(1, stats.binomtest(pairs - equal, pairs - equal).pvalue if pairs > equal else 1)
        )


@pytest.mark.parametrize("paired", [False, True])
def test_permutation_agrees_with_the_t_test_and_a_null_effect_is_rarely_found(paired: bool):
    shared = RANDOM.normal(0, 1, 40)
    a, b = shared + RANDOM.normal(0.5, 1, 40), shared + RANDOM.normal(0, 1, 40)
    theirs = (stats.ttest_rel if paired else stats.ttest_ind)(a, b).pvalue
    assert permutation(a, b, paired=paired) == pytest.approx(theirs, abs=0.01)
    null = [
        permutation(*np.random.default_rng(seed).normal(0, 1, (2, 12)), paired=paired, draws=499) for seed in range(200)
    ]
    assert 0.01 <= np.mean(np.array(null) < 0.05) <= 0.09
    assert stats.kstest(null, "uniform").pvalue > 1e-3


def test_few_values_are_permuted_exactly():
    assert permutation([1, 2, 3], [11, 12, 13]) == pytest.approx(2 / 20)
    assert permutation([1, 2, 3, 4], [11, 12, 13, 14], paired=True) == pytest.approx(2 / 16)


@pytest.mark.parametrize(("ours", "theirs"), [(holm, "holm"), (benjamini_hochberg, "fdr_bh")])
def test_corrections_agree_with_statsmodels(ours, theirs: str):
    for p in (RANDOM.uniform(0, 1, 30), RANDOM.uniform(0, 0.05, 8), np.array([0.04]), np.array([0.01, 0.01, 0.9])):
        assert ours(p) == pytest.approx(multipletests(p, method=theirs)[1])


def test_z_scores_of_noise_are_noise():
    noise = RANDOM.normal(5, 3, (400, 201))
    z = z_scores(noise[:, 0], noise[:, 1:])
    assert np.mean(np.abs(z) > 3) < 0.01
    assert z.std() == pytest.approx(1, abs=0.15)
    assert np.isnan(z_scores(1.0, [2.0, 2.0, 2.0]))


def test_what_cannot_be_computed_is_said():
    with pytest.raises(ValueError, match="at least one number"):
        mean_interval([])
    with pytest.raises(ValueError, match="at least two"):
        z_scores(1.0, [2.0])
