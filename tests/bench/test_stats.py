"""The arithmetic of the figures."""

import numpy as np
import pytest

from steerscope.bench.stats import drift, line, paired, summary


def test_a_summary_has_median_least_spread_and_drift() -> None:
    found = summary([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (found["median"], found["min"]) == (3.5, 1.0)
    assert found["spread"] == pytest.approx((4.75 - 2.25) / 3.5)
    assert found["drift"] == pytest.approx(5.5 / 1.5 - 1)


def test_one_run_neither_spreads_nor_drifts() -> None:
    assert summary([2.0]) == {"median": 2.0, "min": 2.0, "spread": 0.0, "drift": 0.0}
    assert drift([1.0, 9.0]) == 8.0


def test_ratios_are_taken_per_round() -> None:
    """A machine that becomes four times slower leaves the ratio alone."""
    base = np.geomspace(1, 4, 20)
    found = paired(base.tolist(), (1.02 * base).tolist())
    assert found["median"] == pytest.approx(1.02)
    assert found["interval"] == pytest.approx([1.02, 1.02])


def test_the_interval_covers_the_truth_and_narrows_with_rounds() -> None:
    rng = np.random.default_rng(5)
    few, many = ([1 + 0.01 * rng.standard_normal() for _ in range(n)] for n in (8, 400))
    ratios = [paired([1.0] * len(x), x)["interval"] for x in (few, many)]
    (low, high), (left, right) = ratios
    assert low < 1 < high
    assert right - left < (high - low) / 2


def test_a_line_goes_through_its_points() -> None:
    assert line([0, 4, 8], [1.0, 3.0, 5.0]) == pytest.approx((0.5, 1.0))
