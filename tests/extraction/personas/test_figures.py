"""The figures of docs/personas.md are those of the committed run, and the run reached what was asked of it."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads((ROOT / "bench" / "results" / "personas.json").read_text())


def rows(result: dict) -> list[tuple[str, str]]:
    first, roles, traits = result["first"], {}, {}
    for name, one in result["heldout"].items():
        if isinstance(one, dict):
            (traits if "pos_neg" in result["all_roles"]["summary"]["personas"][name]["keys"] else roles)[name] = one
    axis, caps = result["all_roles"]["summary"]["axis"], result["caps"]
    aurocs = [one["auroc"] for one in roles.values()]
    shuffled = [one["shuffled"] for one in [*roles.values(), *traits.values()]]
    luckiest = statistics.median(one["shuffled_highest_of_100"] for one in [*roles.values(), *traits.values()])
    places = ", ".join(f"{name} {place:+.0f}" for name, place in axis["projections"].items())
    held = {name: one for name, one in caps.items() if isinstance(one, dict)}
    scores = ", ".join(f"{name} {one['mean_score']:.2f}" for name, one in held.items())
    return [
        ("3 roles and 2 traits, answers", f"{first['requests']} ({first['tokens']:,} tokens)"),
        ("… seconds, of the clock and of the processor", f"{first['seconds']:.0f}, {first['cpu_seconds']:.0f}"),
        ("… the same with `--resume`: requests, files that changed", f"{first['resumed']['requests']}, 0"),
        (f"{len(axis['roles'])} roles on their axis, layer {axis['layer']}", places),
        ("… share of the spread that lies along it", f"{axis['explained']:.0%}"),
        (
            "roles against the default on questions left out, AUROC: median, least, most",
            f"{statistics.median(aurocs):.2f}, {min(aurocs):.2f}, {max(aurocs):.2f}",
        ),
        ("traits against their opposites, AUROC", ", ".join(f"{n} {one['auroc']:.2f}" for n, one in traits.items())),
        (
            "… the same with exchanged labels: mean, and the luckiest of 100 (median of personas)",
            f"{statistics.mean(shuffled):.2f}, {luckiest:.2f}",
        ),
        (f"{', '.join(caps['roles'])} under caps, mean score of {held['none']['answers']} new answers", scores),
    ]


def test_the_page_shows_the_committed_figures(result: dict) -> None:
    page = (ROOT / "docs" / "personas.md").read_text(encoding="utf-8")
    lines = ["| on SmolLM2-135M-Instruct | |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows(result))]
    assert "\n".join(lines) in page, "\n".join(lines)


def test_the_pipeline_ran_in_time_did_nothing_twice_and_was_read_back(result: dict) -> None:
    first = result["first"]
    kinds = [one["kind"] for one in first["summary"]["personas"].values()]
    assert (kinds.count("roles"), kinds.count("traits")) == (3, 2)
    assert first["seconds"] < 15 * 60
    assert first["failures"] == result["all_roles"]["failures"] == 0
    assert first["resumed"] == {"requests": 0, "tokens": 0, "same_files": True}
    keys = {name: one["key"] for name, one in first["read_back"]["vectors"].items()}
    assert sorted(keys.values()) == ["pos_3-default_1"] * 3 + ["pos_neg"] * 2
    assert all(one["layers"] == 30 for one in first["read_back"]["vectors"].values())
    assert all(count == 5 for count in first["read_back"]["experiments"].values())
