"""A judge behind an endpoint that fails in every way: nothing lost, all counted, resumable."""

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

from evals.conftest import QUICK, a_run
from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.evals import scoring
from steerscope.evals.run import EvalRun, answers_of, generate
from steerscope.evals.scorers import JudgeScorer, Scored, rubric
from steerscope.evals.scoring import score, scored_answers, scorer_facts
from steerscope.extraction.endpoint import Endpoint
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import Interrupted
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from steerscope.specs.errors import InvalidRequest
from support import tiny
from support.fake_endpoint import endpoint, says
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out


@pytest.fixture(scope="module")
def folder(engine: SyncEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvalRun]:
    out = tmp_path_factory.mktemp("judged")
    return out, generate(engine, a_run({}), out)[0]


def scorer(url: str, **options: object) -> JudgeScorer:
    quick = {"pause_s": 0.01, "tries": 3, "at_once": 2, **options}
    return JudgeScorer(Endpoint(url, "m", **quick), QUICK, prices=(1.0, 2.0))  # type: ignore[arg-type]


def test_every_failure_is_counted_and_no_judgement_is_lost(folder: tuple[Path, EvalRun]) -> None:
    out, run = folder
    answers = [one for one in answers_of(out, run) if "logprobs" not in one]
    lock, asked_again, by_prompt = threading.Lock(), threading.Event(), dict[str, int]()
    usage = {"prompt_tokens": 100, "completion_tokens": 10}

    def reply(_: int, body: dict) -> tuple[int, object]:
        prompt = body["messages"][0]["content"]
        with lock:
            number = list(by_prompt).index(prompt) if prompt in by_prompt else len(by_prompt)
            by_prompt[prompt] = by_prompt.get(prompt, 0) + 1
        first = by_prompt[prompt] == 1
        if number == 2 and not first:
            asked_again.set()
        if number == 0 and first:
            return 429, {"error": "busy"}
        if number == 1 and first:
            return 500, {"error": "broken"}
        if number == 2 and first:
            asked_again.wait(HUNG_S)  # longer than the judge waits
        if number == 3:
            return 200, says("a lovely answer", usage=usage)
        if number == 4:
            return 200, says("REFUSAL", usage=usage)
        if number == 5 and first:
            return 200, b"<html>"
        if number == 6 and first:
            return 400, {"error": "too long"}
        return 200, says("70", usage=usage)

    with endpoint(reply) as (url, seen):
        score(out, run, [scorer(url, timeout_s=5.0)])
        facts = scorer_facts(out)["judge"]
        different = len(by_prompt)
        spent = facts["about"]["spent"]
        failed = {"429", "500", "timeout", "unreadable", "400"}
        assert {name: spent[f"requests: {name}"] for name in failed} == dict.fromkeys(failed, 1)
        assert spent["requests: ok"] == different - 2
        assert sum(count for name, count in spent.items() if name.startswith("requests")) == len(seen)
        assert spent["prompt tokens"] == 100 * (different - 2)
        assert spent["cost"] == pytest.approx((different - 2) * (100 * 1.0 + 10 * 2.0) / 1e6)
        counts = facts["counts"]
        assert (counts["refusal"], counts["no score"], counts["not scored yet"]) == (1, 1, 2)
        assert sum(counts.values()) == len(answers) + 3
        asked = len(seen)
        score(out, run, [scorer(url)])  # what got no reply is asked again, and nothing else
        assert len(seen) == asked + 2
    facts = scorer_facts(out)["judge"]
    assert "not scored yet" not in facts["counts"]
    assert facts["about"]["spent"]["requests: ok"] == different
    lines = [json.loads(line) for line in (out / "scores" / "judge.jsonl").read_text().splitlines()]
    assert [line["why"] for line in lines if "why" in line] == ["no score in 'a lovely answer'", "refusal in 'REFUSAL'"]
    scores = [row["scores"].get("judge") for row in scored_answers(out, run) if "logprobs" not in row]
    assert (scores.count(70.0), scores.count(None)) == (len(answers) - 2, 2)


def test_a_judge_that_goes_away_leaves_what_it_said_and_the_next_run_goes_on(
    engine: SyncEngine, tmp_path: Path
) -> None:
    run, _ = generate(engine, a_run({}), tmp_path)
    left = [7]

    def reply(*_: object) -> tuple[int, object]:
        left[0] -= 1
        return (200, says("50")) if left[0] >= 0 else (401, {"error": "no more"})

    with endpoint(reply) as (url, seen):
        with pytest.raises(Interrupted, match=r"answers 401.*go on with --resume"):
            score(tmp_path, run, [scorer(url, at_once=1)])
        kept = (tmp_path / "scores" / "judge.jsonl").read_text()
        assert kept.count('"judge": 50.0') == 7
        assert scorer_facts(tmp_path)["judge"]["counts"]["not scored yet"] > 0
        before, left[0] = len(seen), 1000
        score(tmp_path, run, [scorer(url)])
    lines = (tmp_path / "scores" / "judge.jsonl").read_text()
    assert lines.startswith(kept)
    assert len(seen) - before == lines.count('"judge": 50.0') - 7
    assert scorer_facts(tmp_path)["judge"]["counts"]["scored"] == 18


def test_other_rubrics_and_scales_are_judged_anew(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Rate {answer} to {question}, 0 to 3.", encoding="utf-8")
    own = rubric(tmp_path / "rubric.txt", None)
    there = Endpoint("http://x/v1", "m")
    names = {JudgeScorer(there, persona, highest).identity for persona in (QUICK, own) for highest in (3, 100)}
    assert len(names) == 4
    with endpoint(lambda *_: (200, says("2"))) as (url, seen):
        found = list(JudgeScorer(Endpoint(url, "m"), own, 3)([{"id": "1", "question": "Why?", "text": "So."}]))
    assert found == [(0, Scored({"judge": 2.0}))]
    assert seen[0]["messages"][0]["content"] == "Rate So. to Why?, 0 to 3."


@pytest.mark.parametrize("reply", ["REFUSAL", "I'm sorry, but I cannot rate this."])
@pytest.mark.parametrize("highest", [3, 100])
def test_a_refusal_is_no_score_on_either_scale(reply: str, highest: Literal[3, 100]) -> None:
    with endpoint(lambda *_: (200, says(reply))) as (url, _):
        asked = [{"id": "1", "question": "Why?", "text": "So."}]
        found = list(JudgeScorer(Endpoint(url, "m"), QUICK, highest)(asked))
    assert found == [(0, Scored({}, f"refusal in {reply!r}"))]


def test_thinking_is_not_scored_and_more_tokens_are_another_judgement() -> None:
    texts = {"whole": "<think>3 of 5</think> 40", "cut": "<think>3 of 5, so"}
    asked = [{"id": name, "question": name, "text": "So."} for name in texts]

    def reply(_: int, body: dict) -> tuple[int, object]:
        return 200, says(next(text for name, text in texts.items() if name in body["messages"][0]["content"]))

    with endpoint(reply) as (url, _):
        judge = JudgeScorer(Endpoint(url, "m", at_once=1), QUICK)
        scores = dict(judge(asked))
        longer = JudgeScorer(Endpoint(url, "m", max_tokens=400, at_once=2), QUICK)
        same = JudgeScorer(Endpoint(url, "m", tries=2), QUICK)
    assert scores == {0: Scored({"judge": 40.0}), 1: Scored({}, "thinking cut off in '<think>3 of 5, so'")}
    assert longer.identity != judge.identity == same.identity


def test_the_same_refusal_ends_the_scoring_with_the_endpoints_words(
    folder: tuple[Path, EvalRun], tmp_path: Path
) -> None:
    out, run = folder
    shutil.copytree(out, tmp_path / "run", ignore=shutil.ignore_patterns("scores"))
    with (
        endpoint(lambda *_: (400, {"error": {"message": "use max_completion_tokens"}})) as (url, seen),
        pytest.raises(Interrupted, match="400: use max_completion_tokens; mend that"),
    ):
        score(tmp_path / "run", run, [scorer(url, same_refusals=4)])
    assert 4 <= len(seen) <= 8
    facts = scorer_facts(tmp_path / "run")["judge"]
    assert facts["counts"]["not scored yet"] == len([one for one in answers_of(out, run) if "logprobs" not in one])
    assert facts["about"]["last refusal"] == "400: use max_completion_tokens"


def test_the_scale_is_what_the_rubric_asks_for() -> None:
    role = Persona.parse({"name": "pirate", "kind": "roles", "instruction": [{"pos": "Be one."}]})
    other = role.model_copy(update={"eval_prompt": "Rate {answer}"})
    there = Endpoint("http://x/v1", "m")
    assert [JudgeScorer(there, one).about()["scale"] for one in (role, other, QUICK)] == [3, 100, 100]


def test_what_was_spent_is_written_with_every_batch(
    folder: tuple[Path, EvalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each account on the disk, as a run that is killed would leave it, names all requests until then, once."""
    out, run = folder
    shutil.copytree(out, tmp_path / "run", ignore=shutil.ignore_patterns("scores"))
    monkeypatch.setattr(scoring, "_AT_ONCE", 4)
    kept = list[tuple[int, int]]()
    with endpoint(lambda *_: (200, says("50"))) as (url, seen):
        judge = scorer(url)

        def look(*_: object) -> None:
            facts = scorer_facts(tmp_path / "run")
            if facts:
                kept.append((facts["judge"]["about"]["spent"]["requests: ok"], len(seen)))

        score(tmp_path / "run", run, [judge], look)
    assert len(kept) > 1
    assert all(written == asked for written, asked in kept)


def test_every_reply_is_on_the_disk_while_the_next_is_awaited(folder: tuple[Path, EvalRun], tmp_path: Path) -> None:
    """With its cost: a run that is killed has lost nothing that was paid. The fourth reply does not come before."""
    out, run = folder
    shutil.copytree(out, tmp_path / "run", ignore=shutil.ignore_patterns("scores"))
    lines, met = tmp_path / "run" / "scores" / "judge.jsonl", list[tuple[int, int]]()

    def reply(number: int, _: dict) -> tuple[int, object]:
        if number == 4:
            deadline = time.monotonic() + HUNG_S
            while time.monotonic() < deadline and not (met and met[0] >= (3, 3)):
                kept = lines.read_text().count('"judge"') if lines.is_file() else 0
                facts = scorer_facts(tmp_path / "run").get("judge")
                met[:] = [(kept, facts["about"]["spent"]["requests: ok"] if facts else 0)]
                time.sleep(0.02)
        return 200, says("50", usage={"prompt_tokens": 1, "completion_tokens": 1})

    with endpoint(reply) as (url, seen):
        score(tmp_path / "run", run, [scorer(url, at_once=1)])
    assert met[0][1] == 3
    assert met[0][0] >= 3  # equal answers share a reply
    ids = [json.loads(line)["id"] for line in lines.read_text().splitlines()]
    assert len(ids) == len(set(ids)) >= len(seen)
    lines.with_name(".steerscope-0123456789abcdef.json").write_text("")  # of a run that was killed while it wrote
    assert list(scorer_facts(tmp_path / "run")) == ["judge"]


def test_a_rubric_must_show_the_answer_and_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "blind.txt").write_text("Rate it.", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="rubric: does not show the answer"):
        JudgeScorer(Endpoint("http://x/v1", "m"), rubric(tmp_path / "blind.txt", QUICK))
    with pytest.raises(InvalidRequest, match="give --rubric FILE, or a run with --trait"):
        rubric(None, None)
    assert rubric(None, QUICK) is QUICK


def test_our_own_server_can_be_the_judge(folder: tuple[Path, EvalRun]) -> None:
    """The tiny model says nothing of sense: its replies hold no score, are counted, and cost tokens."""
    out, run = folder
    server = Server(create_app(HFEngine(tiny.model(), tiny.tokenizer(), name="tiny"), ServerSettings(port=0)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and server.serving.ready):
        time.sleep(0.01)
    try:
        short = Persona.parse({**QUICK.model_dump(), "eval_prompt": "Rate {answer}"})
        judge = JudgeScorer(Endpoint(f"{server.address}/v1", "tiny", tries=1), short)
        found = dict(judge([one for one in answers_of(out, run) if "logprobs" not in one][:4]))
    finally:
        server.should_exit = True
        thread.join(HUNG_S)
    assert len(found) == 4
    assert all(one is not None for one in found.values())
    assert judge.endpoint.usage.outcomes["ok"] == len({one["text"] for one in answers_of(out, run)[:4]})
    assert judge.endpoint.usage.completion_tokens > 0
