"""The examples of docs/lenses.md run, in order; the benchmark runs on a small pack."""

import json
import re
from pathlib import Path

import pytest

from bench import lens_speed

PAGE = Path(__file__).parents[2] / "docs" / "lenses.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    assert "('animal', 'dog')" in capsys.readouterr().out
    assert (tmp_path / "animals" / "pack.json").is_file()


def test_the_benchmark_compares_every_cell_with_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--lenses", "12", "--hidden", "32", "--widths", "8,4", "--tokens", "1,3", "--rounds", "3"]
    tiers = ["--levels", "2,6,20", "--budget", "12", "--top-k", "3", "--steps", "4"]
    lens_speed.main([*sizes, *tiers, "--out", str(tmp_path / "out" / "lens.json")])
    result = json.loads((tmp_path / "out" / "lens.json").read_text())
    assert list(result["banks"]) == ["1", "3"]
    for cells in result["banks"].values():
        assert cells[lens_speed.SEQUENTIAL]["ratio"] == 1
        assert all(cell["median"] > 0 and len(cell["seconds"]) == 3 for cell in cells.values())
    assert list(result["tiers"]) == ["cold", "prewarm", "warm"]
    assert result["tiers"]["warm"]["hit_rate"] >= result["tiers"]["cold"]["hit_rate"]
    assert "bank int8" in capsys.readouterr().out


def test_the_benchmark_refuses_to_time_a_bank_that_is_wrong(monkeypatch: pytest.MonkeyPatch):
    real = lens_speed.Bank.scores
    monkeypatch.setattr(lens_speed.Bank, "scores", lambda self, rows, out=None: real(self, rows, out).mul_(0.9))
    with pytest.raises(AssertionError, match="bank fp32 differs"):
        lens_speed.main(["--lenses", "4", "--hidden", "8", "--widths", "4", "--tokens", "2", "--levels", ""])
