"""The page: everything in it comes from the run, and nothing a model wrote gets out of its place."""

import json
from pathlib import Path

import pytest

from evals.conftest import a_run
from steerscope.engines.facade import SyncEngine
from steerscope.evals import scorers as s
from steerscope.evals.forced import ModelScorer
from steerscope.evals.report import write_report
from steerscope.evals.run import generate
from steerscope.evals.scoring import score
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.vector import SteeringVector


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
