"""What docs/analysis.md says of MLPs and attention holds in the committed results."""

import json
from pathlib import Path

DATA = json.loads((Path(__file__).parent.parent.parent / "bench" / "results" / "layers_study.json").read_text())


def test_fewer_than_one_per_cent_of_random_directions_are_called_extreme() -> None:
    found = DATA["calibration"]
    named = {name: shares for name, shares in found.items() if not name.endswith("(plain)")}
    assert all(shares["mean"] < 1 for shares in named.values())
    for name in (name for name in named if f"{name} (plain)" in found):
        assert named[name]["mean"] <= found[f"{name} (plain)"]["mean"], "plain z calls more of them so"


def test_both_passes_over_two_checkpoints_take_minutes() -> None:
    assert sum(DATA[kind]["seconds"]["processor"] for kind in ("mlp", "attention")) < 300
