"""The figures of docs/lens-training.md are those of the committed run, and the run reached what was asked of it."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads((ROOT / "bench" / "results" / "lens_fit.json").read_text())


def test_the_page_shows_the_committed_figures(result: dict) -> None:
    text, token, control = result["per_text"], result["per_token"], result["control"]
    rows = [
        ("AUROC on held-out forms, median of concepts", *(f"{each['median']:.3f}" for each in (text, token))),
        ("… quartiles", *(f"{each['lower_quartile']:.3f}–{each['upper_quartile']:.3f}" for each in (text, token))),
        ("… concepts with at least 0.9", *(f"{each['share_at_least_0.9']:.0%}" for each in (text, token))),
        ("the same with shuffled labels, median", *(f"{control[k]['median']:.3f}" for k in ("per_text", "per_token"))),
    ]
    page = (ROOT / "docs" / "lens-training.md").read_text(encoding="utf-8")
    title = f"{result['concepts']} concepts, {result['texts']} texts, {len(result['folds'])} folds"
    lines = [f"| {title} | per text | per token |", "|---|---|---|", *("| " + " | ".join(row) + " |" for row in rows)]
    assert "\n".join(lines) in page, "\n".join(lines)


def test_the_median_concept_is_read_from_forms_never_seen_and_the_control_is_blind(result: dict) -> None:
    assert result["concepts"] >= 100
    assert result["per_text"]["median"] >= 0.9
    assert 0.45 < result["control"]["per_text"]["median"] < 0.55
    assert 0.45 < result["control"]["per_token"]["median"] < 0.55
