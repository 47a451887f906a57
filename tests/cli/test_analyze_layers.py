"""`steerscope analyze mlp` and `attention`: results in a folder, main rows on the terminal, mistakes told together."""

import json
from pathlib import Path

import pytest

import tiny
from cli.conftest import Cli
from steerscope.analysis.results import load_results


def test_mlp_and_attention_fill_a_folder_that_report_turns_into_a_page(
    cli: Cli, model: str, vector: str, tmp_path: Path
) -> None:
    tiny.model(seed=1).save_pretrained(tmp_path / "tuned")
    asked = [model, vector, "--tuned", tmp_path / "tuned", "--random", 100, "--out", tmp_path / "out"]
    told = cli("analyze", "mlp", *asked, "--json")
    assert told.exit_code == 0, told.output
    rows = json.loads(told.stdout)["rows"]
    assert [(row["measure"], row["rank"], row["name"]) for row in rows[:2]] == [
        ("change", 1, "happy"),
        ("turn", 1, "happy"),
    ]
    assert cli("analyze", "attention", *asked, "--distance", 2, "--layer", 1).exit_code == 0
    found = load_results(tmp_path / "out")
    assert set(found["mlp"].tables["written"]["layer"].to_pylist()) == {1, 2}, "the layers the vector has"
    assert set(found["attention"].tables["written"]["layer"].to_pylist()) == {0, 1, 2, 3}
    assert found["attention"].about["distance"] == 2
    assert cli("analyze", "report", tmp_path / "out").exit_code == 0
    assert "Where looking changed" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["mlp", "attention"])
def test_all_mistakes_are_told_at_once(cli: Cli, command: str, tmp_path: Path) -> None:
    told = cli("analyze", command, tmp_path / "none", tmp_path / "no.safetensors", "--out", tmp_path / "out")
    assert told.exit_code == 2
    assert len([line for line in told.stderr.splitlines() if line.startswith("error: ")]) == 2
    assert not (tmp_path / "out").exists()
