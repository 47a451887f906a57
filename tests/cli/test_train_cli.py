"""`steerscope train` and `train sweep`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]
QUICK = ("--epochs", 1, "--batch", 4, "--layers", 1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "jumps.jsonl"
    texts = [{"prompt": f"The {word} ", "response": f"jumps over {word} again."} for word in ("fox", "dog", "week")]
    file.write_text("\n".join(map(json.dumps, texts)))
    return file


def test_train_writes_a_vector_that_generate_takes(cli: Cli, model: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = ("train", "--data", data, "--model", model, "--out", out, *QUICK, "--prompted", "Jump.")
    done = cli(*asked)
    assert done.exit_code == 0, done.output
    assert "prompted: Jump." in done.stdout
    assert "steered, epoch" in done.stdout
    assert "validation perplexity" in done.stderr
    again = cli(*asked, "--json")
    assert json.loads(again.stdout) == json.loads((out / "result.json").read_text())
    steered = cli("generate", model, "The fox", "--max-tokens", 3, "--steer", out / "vector.safetensors")
    assert steered.exit_code == 0, steered.output


def test_sweep_tells_all_runs_and_fails_when_one_did(cli: Cli, model: str, data: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    asked = ("train", "sweep", "--data", data, "--model", model, "--out", root, "--lr", "0.1,0.3", *QUICK)
    done = cli(*asked)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("jumps/L1-lr") == 2
    failed = cli(*asked, "--layers", 9, "--json")
    assert failed.exit_code == 1
    assert ["error" in row for row in json.loads(failed.stdout)["runs"]] == [False, False, True, True]


def test_mistakes_are_told_together(refused: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = refused("train", "--lr", 0, "--layers", "x")
    assert "--data: is missing" in lines[0]
    assert any("'x' is not a layer" in line for line in lines)
    assert any(line.startswith("learning_rate") for line in lines)
    assert any(line.startswith("--out: is missing") for line in lines)
    lines = refused("train", "sweep", "--data", "nowhere", "--out", tmp_path, "--layers", 1, "--lr", "0.1,fast")
    assert len(lines) == 2
    assert "0.1,fast" in lines[0]
