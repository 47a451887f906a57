"""`steerscope analyze`: results in a folder, a table or JSON on stdout, one page; mistakes are reported together."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from steerscope import SteeringVector, load_vector, save_vector
from support import tiny

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for name in ("roles/pirate", "roles/nurse", "traits/calm", "traits/formal"):
        Path(name).parent.mkdir(exist_ok=True)
        vector = SteeringVector({layer: torch.randn(64, generator=generator) for layer in range(4)})
        save_vector(vector, f"{name}.safetensors")
    tiny.model(seed=0).save_pretrained("base")
    tiny.model(seed=1).save_pretrained("tuned")
    return tmp_path


def test_from_vectors_and_checkpoints_to_a_page(cli: Cli, folder: Path) -> None:
    done = cli("analyze", "directions", "roles", "traits", "--out", "out", "--components", 2, "--project", "roles")
    assert done.exit_code == 0, done.output
    assert "pirate" in done.stdout
    assert load_vector(folder / "out/components/pc2.safetensors").layers == (0, 1, 2, 3)
    done = cli("analyze", "susceptibility", "base", "tuned", "roles", "--out", "out", "--random", 20, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["direction"] for row in rows] == ["nurse"] * 3 + ["pirate"] * 3
    assert {path.name for path in (folder / "out").glob("*.json")} == {
        "directions.json",
        "projections.json",
        "susceptibility.json",
    }
    done = cli("analyze", "report", "out")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "out/index.html"
    page = (folder / "out/index.html").read_text()
    assert "Along which directions" in page
    assert "What the vectors mean" in page


@pytest.mark.usefixtures("folder")
def test_all_mistakes_are_told_together(refused: Refused) -> None:
    Path("empty").mkdir()
    lines = refused(
        "analyze",
        "susceptibility",
        "nowhere/at/all",
        "empty",
        "roles/none.safetensors",
        "--out",
        "out",
        "--device",
        "toaster",
    )
    assert len(lines) == 4
    assert "no model directory" in lines[0]
    assert "config.json" in lines[1]
    assert "does not exist" in lines[2]
    assert "toaster" in lines[3]
    (line,) = refused("analyze", "directions", "roles", "--out", "out")
    assert line == "vectors: there are 2; components need at least three"
    (line,) = refused("analyze", "report", "empty")
    assert "steerscope analyze" in line
    (line,) = refused("analyze", "susceptibility", "base", "base", "roles", "--out", "out")
    assert "base is the base itself" in line
