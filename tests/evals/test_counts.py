"""A run in which answers and scores are missing says so, condition by condition, wherever it is shown."""

import json
from collections import Counter
from pathlib import Path

import pytest

from evals.conftest import QUICK, a_run
from steerscope.engines.sync import SyncEngine
from steerscope.evals import scorers as s
from steerscope.evals.report import write_report
from steerscope.evals.run import EvalRun, generate
from steerscope.evals.scorers import JudgeScorer
from steerscope.evals.scoring import score
from steerscope.extraction.endpoint import Endpoint
from steerscope.extraction.runs import Interrupted
from support.fake_endpoint import endpoint, says

pytestmark = pytest.mark.slow  # make test-fast leaves this file out


@pytest.fixture
def folder(engine: SyncEngine, tmp_path: Path) -> tuple[Path, EvalRun]:
    return tmp_path, generate(engine, a_run({}), tmp_path)[0]


def drop_answers(out: Path, kept: dict[str, int]) -> None:
    """What a run that was killed leaves: of some conditions only the first answers to open questions."""
    lines, seen = [], Counter[str]()
    for line in (out / "rollouts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        one = json.loads(line)
        seen[one["condition"]] += one["dataset"] == "open"
        if one["dataset"] != "open" or seen[one["condition"]] <= kept.get(one["condition"], 6):
            lines.append(line)
    (out / "rollouts.jsonl").write_text("".join(lines), encoding="utf-8")


def counted(summary: dict) -> dict[tuple[str, str], tuple[int, int, int]]:
    name = summary["score"]
    return {
        (one["condition"], one["dataset"]): (one["expected"], one["present"], one["judged"][name])
        for one in summary["counts"]
    }


def test_a_whole_run_is_whole(folder: tuple[Path, EvalRun]) -> None:
    out, run = folder
    score(out, run, [s.keywords(QUICK), s.correct()])
    summary = write_report(out)
    assert (summary["partial"], summary["missing"]) == (False, "")
    assert counted(summary) == {
        (name, dataset): (6, 6, 6) if dataset == "open" else (1, 1, 0)
        for name in ("unsteered", "prompted", "opposite")
        for dataset in ("open", "choice")
    }
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Nothing is missing." in page
    assert "partial" not in page[page.index("<h1>") : page.index("</h1>")]


def test_missing_answers_are_counted_by_condition_and_label_the_report(folder: tuple[Path, EvalRun]) -> None:
    out, run = folder
    drop_answers(out, {"prompted": 2, "opposite": 0})
    score(out, run, [s.keywords(QUICK)])
    summary = write_report(out)
    found = counted(summary)
    assert found["unsteered", "open"] == (6, 6, 6)
    assert found["prompted", "open"] == (6, 2, 2)
    assert found["opposite", "open"] == (6, 0, 0)  # which no mean tells of
    assert summary["partial"] is True
    said = "PARTIAL RUN: 10 of 21 answers are not there (prompted on open 2 of 6, opposite on open 0 of 6)"
    assert summary["missing"].startswith(said)
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "(partial run)</h1>" in page
    assert said in page


def test_a_judge_that_stopped_leaves_a_partial_run_and_replies_without_a_score_do_not(
    folder: tuple[Path, EvalRun],
) -> None:
    out, run = folder
    replies = iter([(200, says("no idea")), (200, says("50")), *[(401, {"error": "no more"})] * 99])
    with endpoint(lambda *_: next(replies)) as (url, _), pytest.raises(Interrupted):
        score(out, run, [JudgeScorer(Endpoint(url, "m", at_once=1), QUICK)])
    summary = write_report(out)
    left = Counter[str]()
    for one in summary["counts"]:
        left.update(one["unjudged"].get("judge", {}))
    n_judged = sum(judged for _, _, judged in counted(summary).values())
    assert left["not scored yet"] + left["no score"] + n_judged == 18
    assert left["does not apply"] == 3
    assert f"answers are not scored yet (judge {left['not scored yet']})" in summary["missing"]
    with endpoint(lambda *_: (200, says("50"))) as (url, _):
        judge = JudgeScorer(Endpoint(url, "m"), QUICK)
        score(out, run, [judge])
        again = write_report(out)
    assert (again["partial"], sum(judged for _, _, judged in counted(again).values())) == (False, 18)
