"""The page about MLPs and attention is made of results alone, shows what is in them, and escapes names."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.families import family, named, saved
from steerscope.analysis import figures
from steerscope.analysis.attention import attention_pass
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.layerwise import mlp_pass
from steerscope.analysis.report import analysis_page
from steerscope.analysis.results import AnalysisResult, load_results, where

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnalysisResult]:
    folder = tmp_path_factory.mktemp("layers")
    base, tuned = (Checkpoint(saved(family("llama", seed), folder / str(seed))) for seed in (0, 1))
    directions = replace(
        named(30),
        names=(NASTY, *(f"v{i}" for i in range(1, 27)), "pc1", "pc2", "pc3"),
        groups=("roles",) * 10 + ("<b>traits",) * 17 + ("components",) * 3,
    )
    mlp_pass(base, directions, tuned, random=100, against=named(8, seed=8)).save(folder / "out")
    attention_pass(base, directions, tuned, random=100, distance=3, against=named(8, seed=8)).save(folder / "out")
    return load_results(folder / "out")


def test_the_page_has_the_findings_and_no_markup_of_others(results: dict[str, AnalysisResult]) -> None:
    page = analysis_page(results)
    body = page[page.index("<main>") :]
    assert NASTY not in body
    assert "&lt;img" in body
    assert "<b>traits" not in body
    focus = results["mlp"].about["focus"]
    assert f"largest at layer {focus['change']} (length of the change) and layer {focus['turn']}" in body
    best = where(results["attention"].tables["top"], "by", "against_z").slice(0, 1).to_pylist()[0]
    assert f"<td>{best['layer']}</td><td>{best['head']}</td>" in body
    assert "at a distance of 3" in body
    headings = re.findall(r"<h2>(.*?)</h2>", body)
    assert "Where looking changed" in headings
    assert body.count("against the vectors that were given for comparison") == 2


def test_heat_maps_hold_the_numbers_of_the_tables(results: dict[str, AnalysisResult]) -> None:
    found = results["attention"]
    figure = figures.pairs_figure(found, "z").to_dict()
    heat, buttons = figure["data"][0], figure["layout"]["updatemenus"][0]["buttons"]
    labels = figure["layout"]["yaxis"]["ticktext"]
    assert len(labels) == figures.MOST_SHOWN
    layer = int(buttons[0]["label"].removeprefix("layer "))
    rows = {(r["query"], r["key"]): r["z"] for r in where(found.tables["pairs"], "layer", layer).to_pylist()}
    for i, query in enumerate(labels):
        for j, key in enumerate(labels):
            if "&lt;" not in query + key:
                assert heat["z"][i][j] == pytest.approx(rows[query, key], rel=1e-3)
    largest = max(found.tables["pairs"].to_pylist(), key=lambda row: abs(row["z"]))
    assert layer == largest["layer"], "the layer with the most extreme pair comes first"
    few = figures.pairs_figure(found, "z", most=2).to_dict()["layout"]["updatemenus"][0]["buttons"]
    extreme = {r["layer"]: abs(r["z"]) for r in sorted(found.tables["pairs"].to_pylist(), key=lambda r: abs(r["z"]))}
    assert [b["label"] for b in few] == [f"layer {n}" for n in sorted(extreme, key=lambda n: -extreme[n])[:2]]


def test_profiles_are_means_over_groups_with_the_focus_marked(results: dict[str, AnalysisResult]) -> None:
    found = results["mlp"]
    lines = {line["name"]: line for line in figures.profile_figure(found, "change").to_dict()["data"]}
    table = where(where(found.tables["written"], "sign", 1), "group", "roles")
    means = [np.mean(where(table, "layer", layer)["change"].to_numpy()) for layer in range(4)]
    np.testing.assert_allclose(lines["roles"]["y"], means, rtol=1e-4)
    assert int(np.argmax(lines["roles"]["marker"]["size"])) == found.about["focus"]["change"]


def test_one_checkpoint_and_one_direction_make_a_page(tmp_path: Path) -> None:
    checkpoint = Checkpoint(saved(family("llama"), tmp_path / "model"))
    found = {
        "mlp": mlp_pass(checkpoint, named(1), random=100),
        "attention": attention_pass(checkpoint, named(1), random=100),
    }
    page = analysis_page(found)
    assert "without RoPE" in page
    assert "Where looking changed" not in page
    assert "that were given for comparison" not in page
