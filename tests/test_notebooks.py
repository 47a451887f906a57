"""The notebooks run from the first cell to the last, on a tiny model, and stay short."""

from pathlib import Path

import nbformat
import papermill
import pytest

import tiny

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
QUICK: dict[str, dict[str, object]] = {
    "directions": {"MODEL": "model", "COMPONENTS": 2, "RANDOM_SETS": 2},
    "susceptibility": {"BASE": "model", "STEPS": 2, "RANDOM": 20},
    "mlp": {"BASE": "model", "STEPS": 2, "COMPONENTS": 3, "RANDOM": 100},
    "attention": {"BASE": "model", "STEPS": 2, "COMPONENTS": 3, "RANDOM": 100},
}


def test_every_notebook_is_run_here_short_and_was_executed() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(QUICK)
    for name, changed in QUICK.items():
        cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells
        assert len(cells) < 25
        assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 400_000, "store fewer numbers in plots"
        (config,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
        assert all(f"\n{key} = " in f"\n{config.source}" for key in changed)
        code = [cell for cell in cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_notebook_runs_on_a_tiny_model(name: str, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    done = papermill.execute_notebook(
        NOTEBOOKS / f"{name}.ipynb", tmp_path / "done.ipynb", QUICK[name], cwd=tmp_path, progress_bar=False
    )
    shown = [out for cell in done.cells if cell.cell_type == "code" for out in cell.outputs]
    assert sum("application/vnd.plotly.v1+json" in out.get("data", {}) for out in shown) >= 3
    assert (tmp_path / "analysis" / "report" / f"{name}.json").is_file()
