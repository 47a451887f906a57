"""The page: everything in it comes from the run, and nothing a model wrote gets out of its place."""

import json
from pathlib import Path

import pytest

from evals.conftest import a_run
from steerscope.engines.sync import SyncEngine
from steerscope.evals import scorers as s
from steerscope.evals.forced import ModelScorer
from steerscope.evals.items import Item
from steerscope.evals.report import _table, curve_figure, frontier_figure, write_report
from steerscope.evals.run import Condition, EvalRun, generate
from steerscope.evals.scoring import compare, score
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.vector import SteeringVector


def test_an_interval_that_nobody_knows_is_not_drawn() -> None:
    """Of one question there is none: no band, no bar, and the table says so."""
    conditions = [Condition(name="unsteered"), Condition(name="a × 1", series="a", at=1.0)]
    run = EvalRun(conditions=tuple(conditions), items=(Item(question="?", dataset="d"),))
    shapes = {}
    for count in (1, 2):
        rows = [
            {
                "condition": one.name,
                "dataset": "d",
                "question": str(q),
                "scores": {"x": q * (1.0 + at), "perplexity": 2.0 + q},
            }
            for at, one in enumerate(conditions)
            for q in range(count)
        ]
        scores, costs = compare(rows, run, "x"), compare(rows, run, "perplexity")
        band, line, *_ = curve_figure(scores, "x", run).data
        bars = frontier_figure(scores, costs, "x").data[0].error_y.array
        shapes[count] = (
            len(band.x),
            line.customdata[0] == "unknown",
            bars[0] is None,
            "unknown" in _table(scores, "x"),
        )
    assert shapes == {1: (0, True, True, True), 2: (2, False, False, False)}


@pytest.mark.slow
def test_the_page_shows_every_score_condition_and_scorer(
    engine: SyncEngine, vectors: dict[str, SteeringVector], tmp_path: Path
) -> None:
    with_marks = a_run(vectors, marks={"learned <here>": 2.0})
    run, _ = generate(engine, with_marks, tmp_path, vectors=vectors)
    with pytest.raises(InvalidRequest, match="there are no scores; run steerscope eval score first"):
        write_report(tmp_path)
    assert run.persona is not None
    score(tmp_path, run, [s.keywords(run.persona), s.correct(), s.repetition(), ModelScorer(engine, vectors)])
    ledger = tmp_path / "rollouts.jsonl"
    ledger.write_text(ledger.read_text().replace('"text": "', '"text": "<script>alert(1)</script>', 1))
    summary = write_report(tmp_path)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    html = (tmp_path / "report.html").read_text()
    body = html[html.index("<h1>") :]
    assert summary["score"] == "keywords"
    for heading in ("open: keywords", "open: other scores", "open: keywords against perplexity", "open: how sure"):
        assert f"<h2>{heading}</h2>" in body
    assert all(one.name in body for one in run.conditions)
    assert all(f"<td>{name}</td>" in body for name in ("keywords", "correct", "repetition", "model"))
    assert "<script>alert" not in body
    assert "<here>" not in body
    assert write_report(tmp_path, "perplexity")["score"] == "perplexity"
    with pytest.raises(InvalidRequest, match="there is no score 'wit'; choose from"):
        write_report(tmp_path, "wit")
