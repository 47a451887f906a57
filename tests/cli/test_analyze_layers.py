"""`steerscope analyze mlp` and `attention`: results in a folder, main rows on the terminal, mistakes told together."""

import json
from pathlib import Path

import pytest
import torch

from cli.conftest import Cli
from steerscope import SteeringVector, save_vector
from steerscope.analysis.results import load_results
from support import tiny


def test_mlp_and_attention_fill_a_folder_that_report_turns_into_a_page(
    cli: Cli, model: str, vector: str, tmp_path: Path
) -> None:
    (tmp_path / "others").mkdir()
    tiny.model(seed=1).save_pretrained(tmp_path / "tuned")
    asked = [model, vector, "--tuned", tmp_path / "tuned", "--random", 100, "--out", tmp_path / "out"]
    told = cli("analyze", "mlp", *asked, "--json")
    assert told.exit_code == 0, told.output
    rows = json.loads(told.stdout)["rows"]
    assert [(row["measure"], row["rank"], row["name"]) for row in rows[:2]] == [
        ("change", 1, "happy"),
        ("turn", 1, "happy"),
    ]
    for i in range(8):
        save_vector(SteeringVector.shared(torch.randn(64)), tmp_path / "others" / f"{i}.safetensors")
    against = ["--against", tmp_path / "others"]
    assert cli("analyze", "attention", *asked, "--distance", 2, "--layer", 1, *against).exit_code == 0
    found = load_results(tmp_path / "out")
    assert set(found["mlp"].tables["written"]["layer"].to_pylist()) == {1, 2}, "the layers the vector has"
    assert set(found["attention"].tables["written"]["layer"].to_pylist()) == {0, 1, 2, 3}
    assert (found["attention"].about["distance"], found["attention"].about["against"]) == (2, 8)
    assert cli("analyze", "report", tmp_path / "out").exit_code == 0
    assert "Where looking changed" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["mlp", "attention"])
def test_all_mistakes_are_told_at_once(cli: Cli, command: str, tmp_path: Path) -> None:
    told = cli("analyze", command, tmp_path / "none", tmp_path / "no.safetensors", "--out", tmp_path / "out",
               "--against", tmp_path / "none", "--device", "toaster")  # fmt: skip
    assert told.exit_code == 2
    lines = [line for line in told.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 4
    assert "toaster" in lines[3]
    assert not (tmp_path / "out").exists()
