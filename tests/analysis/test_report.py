"""Results survive their files, and the page is made of them alone, with everything escaped."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from steerscope.analysis import figures
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions, components, project
from steerscope.analysis.report import analysis_page, by_side, extremes, strongest
from steerscope.analysis.results import AnalysisResult, load_results, pivot
from steerscope.analysis.susceptibility import susceptibility
from steerscope.specs.errors import BadFile
from support import tiny

NASTY = "<img src=x onerror=alert(1)>"


def named(count: int = 6) -> Directions:
    rows = np.random.default_rng(0).standard_normal((4, count, 64)).astype(np.float32)
    names = (NASTY, *(f"v{i}" for i in range(1, count)))
    return Directions(names, ("<b>", *("traits",) * (count - 1)), (0, 1, 2, 3), rows)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnalysisResult]:
    folder = tmp_path_factory.mktemp("results")
    tiny.model(seed=0).save_pretrained(folder / "base")
    tiny.model(seed=1).save_pretrained(folder / "tuned")
    source = named()
    found = [components(source, 3, draws=2).result(), project(source, source)]
    base, tuned = Checkpoint(folder / "base"), Checkpoint(folder / "tuned")
    other = source.random(1)
    found.append(susceptibility(base, tuned, source, random=20, against=Directions.of(
        {f"{i}": vector for i, vector in enumerate(components(other, 5, draws=1).vectors().values())}
        | {f"r{i}": vector for i, vector in enumerate(components(source.random(2), 5, draws=1).vectors().values())}
    )))  # fmt: skip
    for result in found:
        result.save(folder / "out")
    return load_results(folder / "out")


def test_results_come_back_from_their_files(tmp_path: Path) -> None:
    made = AnalysisResult("kind", {"summary": "s", "n": 3}, {"t": pa.table({"x": [1.5, None], "name": ["a", "ü"]})})
    assert [path.name for path in made.save(tmp_path / "new")] == ["kind.t.parquet", "kind.json"]
    (tmp_path / "new" / "other.json").write_text('{"a": 1}')
    back = load_results(tmp_path / "new")
    assert list(back) == ["kind"]
    assert back["kind"].about == made.about
    assert back["kind"].tables["t"].equals(made.tables["t"])


def test_a_folder_without_results_or_with_half_of_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="holds no results"):
        load_results(tmp_path)
    AnalysisResult("kind", {}, {"t": pa.table({"x": [1]})}).save(tmp_path)
    (tmp_path / "kind.t.parquet").unlink()
    with pytest.raises(BadFile, match=r"kind.json is not a readable result"):
        load_results(tmp_path)


def test_the_page_holds_every_section_and_nothing_that_others_wrote_unescaped(
    results: dict[str, AnalysisResult],
) -> None:
    page = analysis_page(results)
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Components",
        "Who lies at the ends at layer 2",
        "What the vectors mean in named ones",
        "How much each matrix changed",
        "Along which directions",
        "Over layers",
    ]
    assert "<img src=x" not in page.replace("\\u003c", "<").replace("\\u003e", ">")
    assert page.count("Plotly.newPlot(") >= 6
    assert "against the vectors that were given for comparison everywhere" in page
    alone = analysis_page({"directions": results["directions"]})
    assert "Along which" not in alone


def test_plots_show_the_numbers_of_the_tables(results: dict[str, AnalysisResult]) -> None:
    result = results["susceptibility"]
    rows, layers, grid = pivot(result.tables["changes"], "matrix", "layer", "relative")
    assert layers == [0, 1, 2, 3]
    drawn = figures.change_figure(result).data[0]
    assert list(drawn.x) == ["0", "1", "2", "3"]
    assert np.array(drawn.z, dtype=float) == pytest.approx(grid, rel=1e-3, nan_ok=True)
    one = next(
        row for row in result.tables["changes"].to_pylist() if row["matrix"] == "mlp.up_proj" and row["layer"] == 2
    )
    assert grid[rows.index("mlp.up_proj"), 2] == one["relative"]
    menu = figures.susceptibility_figure(result).layout.updatemenus[0].buttons
    assert len(menu) == 6
    last = [row for row in result.tables["cells"].to_pylist() if row["direction"] == "v5"]
    shown = np.array(menu[-1].args[0]["z"][0], dtype=float)
    assert shown[0][0] == pytest.approx(next(row["z"] for row in last), rel=1e-3)
    profile = figures.peaks_figure(result).data
    assert [trace.name for trace in profile][1] == "v1"


def test_summaries_are_the_extremes_of_the_tables(results: dict[str, AnalysisResult]) -> None:
    scores = [row for row in results["directions"].tables["scores"].to_pylist() if row["layer"] == 2]
    first = max((row for row in scores if row["component"] == 1), key=lambda row: row["score"])
    assert extremes(results["directions"])[0]["highest"].split(", ")[0] == first["name"]
    cells = [row for row in results["susceptibility"].tables["cells"].to_pylist() if row["direction"] == "v2"]
    mine = [row for row in strongest(results["susceptibility"], 3) if row["direction"] == "v2"]
    assert [row["z"] for row in mine] == sorted((row["z"] for row in cells), reverse=True)[:3]


def test_matrices_that_read_and_that_write_are_counted_apart(results: dict[str, AnalysisResult]) -> None:
    cells = results["susceptibility"].tables["cells"].to_pylist()
    rows = by_side(results["susceptibility"])
    assert sum(row["matrices"] for row in rows) == len(cells)
    mine = [row for row in cells if row["direction"] == "v3" and row["side"] == "writes"]
    (found,) = [row for row in rows if row["direction"] == "v3" and row["side"] == "writes"]
    assert {row["matrix"] for row in mine} == {"self_attn.o_proj", "mlp.down_proj", "embedding"}
    assert found["significant"] == sum(row["p"] <= 0.05 for row in mine)
    assert found["against_z"] == pytest.approx(np.median([row["against_z"] for row in mine]))


def test_shared_directions_have_a_page_too() -> None:
    rows = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0)).numpy()
    shared = Directions(("a", "b", "c", "d"), ("",) * 4, (None,), rows)
    page = analysis_page(
        {"directions": components(shared, 2, draws=2).result(), "projections": project(shared, shared)}
    )
    assert "Who lies at the ends<" in page
