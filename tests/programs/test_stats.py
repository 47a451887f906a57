"""The arithmetic of the figures."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench.gpu.paired import DRIFT_GOAL, FETCH_GOAL, GOALS
from bench.tables import overhead
from bench.tables.gpu import pairs, plot
from steerscope.bench.one import drift, paired, summary

RESULTS = Path(__file__).parents[2] / "bench" / "results"


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


@pytest.mark.parametrize("rounds", [2, 4, 8, 20])
def test_intervals_of_few_rounds_cover_the_true_ratio(rounds: int) -> None:
    rng, covered = np.random.default_rng(rounds), {"interval": 0, "mean_interval": 0}
    for _ in range(1_000):
        found = paired([1.0] * rounds, (1.02 + 0.01 * rng.standard_normal(rounds)).tolist())
        for name in covered:
            low, high = found[name]
            covered[name] += low <= 1.02 <= high
    assert min(covered.values()) >= 930


def test_a_pair_that_was_measured_again_is_not_left_out_of_the_table_of_every_pair(tmp_path: Path) -> None:
    def cell(times: list[tuple[float, float]], again: list[tuple[float, float]]) -> dict:
        base, mine = ([pair[i] for pair in times] for i in (0, 1))
        every = paired(*zip(*times, *again, strict=True))
        known = {name: every[name] for name in ("median", "interval")}
        slow = [[[theirs, 0.1], [ours, 0.1]] for theirs, ours in again]
        return {"baseline_s": base, "tapped_s": mine, "ratio_of_all": known, "measured_again": slow}

    calm = cell([(1.0, 1.0)] * 5, [])
    runs = {
        "before-1": {"noise": calm, "cap": calm},
        "before-2": {"noise": calm, "last": calm},
        "speed": {"noise": calm, "cap": cell([(1.0, 1.01)] * 2, [(1.0, 1.05)] * 3), "mean": {"error": "no room\nat"},
                  "last": cell([(1.0, 1.002)] * 5, [])},
    }  # fmt: skip
    folder = tmp_path / "gpu"
    folder.mkdir()
    assert pairs(tmp_path) == "*No figures yet.*"
    for name, cells in runs.items():
        (folder / f"{name}-qwen2.5-3b.json").write_text(json.dumps({"cells": cells}))
    same = "+0.00 % [+0.00, +0.00], 5 pairs"
    cap = "cap at every layer, one vector per request"
    assert pairs(tmp_path).splitlines() == [
        "| every pair | this run | goal | 1 before it | 2 before it |",
        "|---|---|---|---|---|",
        f"| unmodified vLLM against itself | {same} |  | {same} | {same} |",
        f"| all layers, last prompt token | +0.20 % [+0.20, +0.20], 5 pairs | ≤ +0.5 %: holds | {same} |  |",
        "| all layers, mean | no room |  |  |  |",
        f"| {cap} | +5.00 % [+0.68, +6.12], 5 pairs | ≤ +2.0 %: **missed** |  | {same} |",
    ]


def test_the_plot_is_that_of_the_committed_run() -> None:
    assert (RESULTS.parents[1] / "docs" / "speed.svg").read_text() == plot(RESULTS)
    for name, drawn in overhead.PLOTS.items():
        assert (RESULTS.parents[1] / "docs" / name).read_text() == drawn(RESULTS)


def test_rounds_too_far_off_for_the_plot_are_on_its_edge(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    ratios = [1.0, 1.2, 0.8, 1.01, 1.01, 1.01]
    cell = {"ratio": {"rounds": ratios}}
    (tmp_path / "gpu" / "speed-qwen2.5-3b.json").write_text(json.dumps({"cells": {"noise": cell}}))
    drawn = plot(tmp_path)
    heights = [float(y) for y in re.findall(r'cy="([-\d.]+)"', drawn)]
    middle, top, bottom = heights[:3]
    assert top - middle == pytest.approx(middle - bottom)
    assert (heights[3] - middle) / (top - middle) == pytest.approx(0.2, abs=0.01)
    assert drawn.count("<polyline") == 3


def test_goals_hold_in_the_committed_run() -> None:
    """By the upper ends of its intervals, also with every pair; rows were counted, and are those that were wanted."""
    found = json.loads((RESULTS / "gpu" / "speed-qwen2.5-3b.json").read_text())
    work, cells = found["configuration"], found["cells"]
    assert [work[name] for name in ("model", "batch", "prefill", "decode")] == ["qwen2.5-3b", 32, 512, 128]
    assert next(iter(cells)) == "noise"
    for name in ("zero-layer", "all-layers", "generated", "last", "mean", "add", "cap", "ablate", "watch"):
        assert cells[name]["ratio"]["interval"][1] <= GOALS[name], name
        assert cells[name]["ratio_of_all"]["interval"][1] <= GOALS[name], name
        assert cells[name]["rounds"] >= 20
        assert abs(cells[name]["drift"]) <= DRIFT_GOAL
        assert cells[name].get("verified", True) is True
    assert cells["all-layers"]["verified"]
    assert cells["all-layers"]["rows"] == 32 * (512 + 127) * 36
    assert cells["all-layers"]["fetch_gb_per_s"] >= FETCH_GOAL
    assert cells["all-layers"]["checksum"] == again()["all-layers"]["checksum"]  # of the same rows, to the last bit


def again() -> dict[str, dict]:
    return json.loads((RESULTS / "gpu" / "speed-qwen2.5-3b-again-32x512-128.json").read_text())["cells"]


def test_what_steers_was_seen_to_act_where_it_holds_its_goal_and_copies_are_the_librarys_own() -> None:
    cells = again()
    assert list(cells) == ["noise", "all-layers", "cap", "add", "ablate"]
    for name in ("all-layers", "cap", "add", "ablate"):
        assert cells[name]["verified"] is True
        assert cells[name]["rounds"] >= 20
        assert cells[name]["ratio"]["interval"][1] <= GOALS[name], name
        assert cells[name]["ratio_of_all"]["interval"][1] <= GOALS[name], name
        assert abs(cells[name]["drift"]) <= DRIFT_GOAL
    assert min(cells["all-layers"][f"fetch{how}_gb_per_s"] for how in ("", "_fresh")) >= FETCH_GOAL
