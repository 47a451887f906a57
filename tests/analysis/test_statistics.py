import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from steerscope.analysis.statistics import benjamini_hochberg, bootstrap, holm, permutation, z_scores

pytestmark = pytest.mark.slow  # as a whole: `make test-fast` is for those who wait for it

RANDOM = np.random.default_rng(7)


def test_bootstrap_agrees_with_scipy():
    values = RANDOM.normal(3, 2, 60)
    ours = bootstrap(values, draws=5_000)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=5_000, method="percentile", rng=1).confidence_interval
    assert ours.estimate == pytest.approx(values.mean())
    assert [ours.low, ours.high] == pytest.approx([theirs.low, theirs.high], abs=0.05)
    assert bootstrap(values) == bootstrap(values)


def test_intervals_cover_the_truth_as_often_as_they_say_and_only_by_groups_where_values_hang_together():
    covered = {"alone": 0, "groups": 0}
    runs, questions, answers = 200, 20, 5
    labels = np.repeat(np.arange(questions), answers).tolist()
    for seed in range(runs):
        random = np.random.default_rng(seed)
        values = (random.normal(0, 1, (questions, 1)) + random.normal(0, 0.3, (questions, answers))).ravel()
        for name, groups in (("alone", None), ("groups", labels)):
            found = bootstrap(values, groups=groups, draws=200)
            covered[name] += found.low <= 0 <= found.high
    assert covered["groups"] / runs == pytest.approx(0.93, abs=0.04)
    assert covered["alone"] / runs < 0.8


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
        bootstrap([])
    with pytest.raises(ValueError, match="give each value its group"):
        bootstrap([1, 2], groups=["a"])
    with pytest.raises(ValueError, match="at least two"):
        z_scores(1.0, [2.0])
