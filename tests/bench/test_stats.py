"""The arithmetic of the figures."""

import json
from pathlib import Path

import numpy as np
import pytest

from steerscope.bench.gpu_tables import again
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


def test_no_round_of_a_complete_run_is_left_out_and_others_are_not_counted(tmp_path: Path) -> None:
    """Pairs that were measured again count; a run without noise, made of what came out badly, does not."""

    def cell(times: list[tuple[float, float]], again: list[tuple[float, float]]) -> dict:
        base, mine = ([pair[i] for pair in times] for i in (0, 1))
        every = paired(*zip(*times, *again, strict=True))
        known = {name: every[name] for name in ("median", "interval")}
        slow = [[[theirs, 0.1], [ours, 0.1]] for theirs, ours in again]
        return {"baseline_s": base, "tapped_s": mine, "ratio_of_all": known, "measured_again": slow}

    calm = cell([(1.0, 1.0)] * 5, [])
    runs = [
        {"noise": calm, "cap": cell([(1.0, 1.01)] * 2, [(1.0, 1.05)] * 3), "mean": {"error": "no room\nat all"}},
        {"cap": calm, "mean": calm},
        {"noise": calm, "last": cell([(1.0, 1.002)] * 5, [])},
    ]
    folder = tmp_path / "gpu"
    folder.mkdir()
    for i, cells in enumerate(runs):
        (folder / f"again-{i}-qwen2.5-3b.json").write_text(json.dumps({"cells": cells}))
    lines = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in again(tmp_path).splitlines()
    }
    one = "+0.00 % [+0.00, +0.00], 5"
    assert lines["untouched against itself"][-1] == "+0.00 % [+0.00, +0.00], 10"
    assert lines["cap, likewise"] == [
        "+5.00 % [+1.00, +5.00], 5", one, "", "+5.00 % [+1.00, +5.00], 5", "≤ +2.0 %: **missed**"
    ]  # fmt: skip
    assert lines["all layers, mean"] == ["no room", one]
    assert lines["all layers, last prompt token"][-2:] == ["+0.20 % [+0.20, +0.20], 5", "≤ +0.5 %: holds"]
