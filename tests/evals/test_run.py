"""Answers: all of them once, the same luck for every condition, resumable, and no mixture of runs."""

import json
from pathlib import Path

import pytest
import torch

from evals.conftest import CHOICE, OPEN, a_run
from steerscope.engines.sync import SyncEngine
from steerscope.evals.items import Item
from steerscope.evals.run import Condition, answers_of, generate, load_run, load_vectors, wanted
from steerscope.extraction.runs import RolloutSettings
from steerscope.specs import Sampling
from steerscope.specs.errors import BadFile, InvalidRequest
from steerscope.vectors.vector import SteeringVector

Vectors = dict[str, SteeringVector]


@pytest.fixture(scope="module")
def done(engine: SyncEngine, vectors: Vectors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    _, failures = generate(engine, a_run(vectors), out, vectors=vectors)
    assert failures == []
    return out


def test_every_question_is_answered_under_every_condition(done: Path) -> None:
    run = load_run(done)
    records = answers_of(done, run)
    assert len(records) == 7 * (3 * 2 + 1)
    assert {(one["condition"], one["question"], one["sample"]) for one in records} == {
        (condition.name, item.question, sample)
        for condition in run.conditions
        for item in run.items
        for sample in range(1 if item.choices else 2)
    }
    told = {one["system"] for one in records if one["condition"] == "prompted" and one["question"] == "What?"}
    assert told == {"Be quick.", "Jump!"}  # wordings take turns


def test_answers_are_those_of_the_engine_under_that_steering_and_seed(
    done: Path, engine: SyncEngine, vectors: Vectors
) -> None:
    run, texts = load_run(done), {}
    for one in answers_of(done, run):
        texts[one["condition"], one["question"], one["sample"]] = one["text"]
    rollouts = [one for one in wanted(run) if one.item == OPEN[0] and one.sample == 1]
    for name, steer in (("unsteered", None), ("a × 4", vectors["a"].add(4)), ("b × -4", vectors["b"].add(-4))):
        assert any(one.condition.name == name for one in rollouts)
        alone = engine.chat(
            [{"role": "user", "content": OPEN[0].question}],
            Sampling(max_tokens=6, temperature=0.7, top_p=0.9, seed=_seed(OPEN[0].question, 1)),
            steer=steer,
        )
        assert texts[name, OPEN[0].question, 1] == alone.text
    assert texts["a × 4", OPEN[0].question, 1] != texts["unsteered", OPEN[0].question, 1]


def _seed(question: str, sample: int) -> int:
    from steerscope.extraction.runs import digest

    return int(digest(0, question, sample)[:12], 16)


def test_choices_are_read_from_the_models_own_probabilities(done: Path, engine: SyncEngine) -> None:
    """Against one plain forward over the prompt up to where the answers part."""
    run = load_run(done)
    (found,) = [one for one in answers_of(done, run) if one["condition"] == "unsteered" and "logprobs" in one]
    full = [
        engine.aio.render(
            [{"role": "user", "content": CHOICE.question}, {"role": "assistant", "content": text}],
            continue_final_message=True,
        ).token_ids
        for text in ("(A)", "(B)")
    ]
    at = next(i for i in range(len(full[0])) if full[0][i] != full[1][i])
    with torch.no_grad():
        logits = engine.aio.model(torch.tensor([full[0][:at]])).logits[0, -1]  # type: ignore[attr-defined]
    said = torch.log_softmax(logits.double(), -1)
    least = float(said.topk(20).values[-1])
    wanted_, other = (max(float(said[ids[at]]), least) for ids in full)
    if found["logprobs"] is None:
        assert wanted_ == other == least
    else:
        assert found["logprobs"] == pytest.approx([wanted_, other], abs=1e-4)


@pytest.mark.slow
def test_a_run_cut_anywhere_ends_as_the_undisturbed_one(
    done: Path, engine: SyncEngine, vectors: Vectors, tmp_path: Path
) -> None:
    out = tmp_path / "cut"
    generate(engine, a_run(vectors), out, vectors=vectors)
    whole = (out / "rollouts.jsonl").read_bytes()
    for kept in (1, len(whole) // 2, len(whole) - 3):
        (out / "rollouts.jsonl").write_bytes(whole[:kept])
        before = engine.stats()["finished"]
        generate(engine, a_run(vectors), out, vectors=vectors, resume=True)
        assert _lines(out) == _lines(done)
        assert engine.stats()["finished"] - before == len(_lines(done)) - whole[:kept].count(b"\n")


def _lines(out: Path) -> dict[str, dict]:
    """Probabilities, which differ in the last bits with the batch, left out."""
    records = [json.loads(line) for line in (out / "rollouts.jsonl").read_bytes().splitlines()]
    return {one["id"]: {**one, "logprobs": None} for one in records}


def test_a_run_grows_by_scales_questions_and_answers(engine: SyncEngine, vectors: Vectors, tmp_path: Path) -> None:
    only = {"a": vectors["a"]}
    generate(engine, a_run(only, n=1), tmp_path, vectors=only)
    first = (tmp_path / "rollouts.jsonl").read_bytes()
    more = a_run(vectors, items=(*OPEN, Item(question="Who?", dataset="open")))
    run, _ = generate(engine, more, tmp_path, vectors=vectors, resume=True)
    assert (tmp_path / "rollouts.jsonl").read_bytes().startswith(first)
    assert (len(run.items), len(run.conditions), set(run.vectors)) == (5, 7, {"a", "b"})
    assert len(answers_of(tmp_path, run)) == 7 * (4 * 2 + 1)
    assert load_vectors(tmp_path, run)["b"].cosine(vectors["b"]) == pytest.approx({2: 1.0})


def test_nothing_is_mixed_into_a_run_that_was_made_otherwise(done: Path, engine: SyncEngine, vectors: Vectors) -> None:
    before = (done / "run.json").read_bytes()
    with pytest.raises(InvalidRequest, match="holds answers already; go on with --resume"):
        generate(engine, a_run(vectors), done, vectors=vectors)
    other = {"a": vectors["b"], "b": vectors["b"]}
    changed = a_run(vectors, rollouts=RolloutSettings(max_tokens=7), persona=None)
    with pytest.raises(InvalidRequest) as caught:
        generate(engine, changed, done, vectors=other, resume=True)
    told = "\n".join(str(problem) for problem in caught.value.problems)
    assert len(caught.value.problems) == 3
    assert all(word in told for word in ("another sampling", "another persona", "another vector under the name a;"))
    assert (done / "run.json").read_bytes() == before


def test_vectors_that_do_not_fit_are_told_before_anything_is_asked(engine: SyncEngine, tmp_path: Path) -> None:
    wrong = {"small": SteeringVector({1: torch.ones(8)}), "deep": SteeringVector({9: torch.ones(64)})}
    with pytest.raises(InvalidRequest) as caught:
        generate(engine, a_run(wrong), tmp_path, vectors=wrong)
    assert [problem.field for problem in caught.value.problems] == ["small", "deep"]
    assert not (tmp_path / "run.json").exists()


def test_conditions_that_ask_the_same_each_have_their_answers(engine: SyncEngine, tmp_path: Path) -> None:
    conditions = (Condition(name="unsteered"), Condition(name="opposite", told=("",)))
    run, _ = generate(engine, a_run({}, conditions=conditions), tmp_path)
    answers = answers_of(tmp_path, run)
    texts = [[one["text"] for one in answers if one["condition"] == name] for name in ("unsteered", "opposite")]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2 * len(OPEN) + 1
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == len(texts[0])


def test_a_question_that_is_too_long_costs_only_itself(engine: SyncEngine, tmp_path: Path) -> None:
    run = a_run({}, items=(OPEN[0], Item(question="long " * 300, dataset="open")), n=1)
    run, failures = generate(engine, run, tmp_path)
    assert len(failures) == 1
    assert len(answers_of(tmp_path, run)) == 3


def test_runs_that_make_no_sense_are_refused(vectors: Vectors, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="2 greedy answers are the same"):
        a_run(vectors, rollouts=RolloutSettings(temperature=0.0))
    run = a_run(vectors)
    with pytest.raises(InvalidRequest, match="have the same name"):
        a_run(vectors, conditions=(*run.conditions, run.conditions[0]))
    with pytest.raises(BadFile, match="it has no run.json; make some with steerscope eval rollouts"):
        load_run(tmp_path)


def test_a_run_survives_its_own_json(done: Path) -> None:
    run = load_run(done)
    assert type(run).from_json(run.to_json()) == run
    assert json.loads((done / "run.json").read_text())["model"]["name"] == "tiny"
