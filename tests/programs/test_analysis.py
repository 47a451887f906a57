"""What docs/analysis.md says of the tuned SmolLM2 and of memory holds in the committed results."""

import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent.parent / "bench" / "results"


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_weights_that_write_changed_along_what_was_trained_and_along_nothing_else() -> None:
    data = result("analysis_study")
    losses = data["training"]["losses"]
    assert losses[-1] < losses[0] / 1.5
    sides = {(row["direction"], row["side"]): row for row in data["sides"]}
    trained = sides.pop(("happy_sad", "writes"))
    assert trained["significant"] > trained["matrices"] / 3
    assert trained["against_z"] > 3
    assert all(abs(row["against_z"]) < 2 for row in sides.values())


def test_the_planted_change_is_found_and_alone_stands_out_from_exchanged_labels() -> None:
    data = result("analysis_study")
    planted = data["planted"]

    def strongest(cells: list[dict]) -> dict[tuple[int, str], dict]:
        own = [row for row in cells if row["direction"] == planted["direction"]]
        return {(row["layer"], row["matrix"]): row for row in own}

    place = planted["layer"], planted["matrix"]
    assert place not in strongest(data["cells"])
    found = strongest(planted["cells"])
    best = found.pop(place)
    assert best["p"] < 0.01
    assert best["against_z"] > 5
    assert all(abs(row["against_z"]) < 2 for row in found.values())


def test_the_study_takes_less_than_ten_minutes_of_a_processor() -> None:
    layers = result("layers_study")
    parts = [*result("analysis_study")["seconds"].values(), *(layers[name]["seconds"] for name in ("mlp", "attention"))]
    assert sum(part["processor"] for part in parts) < 600


def test_few_random_directions_are_called_extreme_in_a_real_model() -> None:
    shares = result("layers_study")["calibration"]
    own = {name: share["mean"] for name, share in shares.items() if not name.endswith("(plain)")}
    assert len(own) == 5
    assert max(own.values()) < 1  # per cent beyond |z| = 3


def test_streaming_two_checkpoints_of_a_3b_model_stays_under_two_gibibytes() -> None:
    data = result("checkpoint_memory")
    assert data["shape"]["num_hidden_layers"] == 36
    assert data["bytes"] > 6e9
    assert set(data["passes"]) == {"susceptibility", "mlp", "attention"}
    assert all(one["peak_rss"] < 2 * 2**30 for one in data["passes"].values())
