"""What each scorer gives, and how scores are kept: once each, under what they depend on."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from evals.conftest import QUICK, a_run
from steerscope.engines.sync import SyncEngine
from steerscope.evals import scorers as s
from steerscope.evals.run import answers_of, generate
from steerscope.evals.scoring import score, scored_answers, scorer_facts
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import Interrupted, Record
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.vector import SteeringVector


def said(text: str, **more: object) -> Record:
    return {"id": text, "question": "?", "text": text, **more}


@pytest.mark.parametrize(
    ("text", "value"),
    [("a b c d", 0.0), ("go on go on go on", 0.5), ("a a a a a", 2 / 3), ("Yes no yes NO yes no", 0.5)],
)
def test_repetition_is_the_share_of_triples_seen_before(text: str, value: float) -> None:
    assert s.repetition()([said(text)])[0].values == {"repetition": pytest.approx(value)}


def test_too_short_texts_and_choices_have_no_repetition() -> None:
    assert [one.values for one in s.repetition()([said("a b"), said("a b c d", logprobs=None)])] == [{}, {}]


def test_words_patterns_and_refusals_are_counted() -> None:
    texts = [said("An apple."), said("I'm sorry, but I can't."), said("(", logprobs=[0.0, 0.0])]
    assert [one.values for one in s.keywords(QUICK)(texts)] == [{"keywords": 83.3}, {}, {}]
    assert s.keywords(QUICK)([said("I cannot do this.")])[0] == s.Scored({}, "refusal")
    assert [one.values for one in s.regex(r"\bAPPLE")(texts)] == [{"regex": 1.0}, {"regex": 0.0}, {}]
    assert [one.values for one in s.refusal()(texts)] == [{"refusal": 0.0}, {"refusal": 1.0}, {}]
    with pytest.raises(InvalidRequest, match="correct the pattern"):
        s.regex("(")
    with pytest.raises(InvalidRequest, match="has no keywords"):
        s.keywords(Persona.parse({"name": "plain", "instruction": [{"pos": "p"}]}))


def test_known_answers_are_right_or_wrong_and_choices_have_a_probability() -> None:
    texts = [
        said("It is PARIS, I think", expected=["Rome", "Paris"]),
        said("parisian", expected=["Paris"]),
        said("A", logprobs=[math.log(0.3), math.log(0.1)]),
        said("B", logprobs=[-800.0, 0.0]),
        said("?", logprobs=None),
        said("no question of fact"),
    ]
    found = s.correct()(texts)
    assert [one.values for one in found[:2]] == [{"correct": 1.0}, {"correct": 0.0}]
    assert found[2].values == {"choice": pytest.approx(0.75), "correct": 1.0}
    assert found[3].values == {"choice": pytest.approx(0.0, abs=1e-100), "correct": 0.0}
    assert (found[4].values, found[4].why, found[5]) == ({}, "neither choice is likely", s.Scored({}))


class Counting:
    """Scores by length, and remembers what it was asked; stops at the number given."""

    name = "length"

    def __init__(self, identity: str, stops_at: int | None = None) -> None:
        self.identity, self.stops_at, self.asked = identity, stops_at, list[Any]()

    def about(self) -> dict[str, s.Json]:
        return {"spent": {"asked": len(self.asked)}}

    def __call__(self, answers: Sequence[Record]) -> Iterator[tuple[int, s.Scored]]:
        for i, one in enumerate(answers):
            if self.stops_at is not None and len(self.asked) >= self.stops_at:
                raise Interrupted("gone")
            self.asked.append(one["text"])
            yield i, s.Scored({"length": float(len(one["text"]))})


def test_scores_are_kept_counted_and_never_made_twice(
    engine: SyncEngine, vectors: dict[str, SteeringVector], tmp_path: Path
) -> None:
    run, _ = generate(engine, a_run(vectors), tmp_path, vectors=vectors)
    answers = answers_of(tmp_path, run)
    broken = Counting("1", stops_at=5)
    with pytest.raises(Interrupted, match="gone"):
        score(tmp_path, run, [broken, s.refusal()])  # the others are asked all the same
    facts = scorer_facts(tmp_path)
    assert facts["length"]["counts"]["not scored yet"] == len(answers) - facts["length"]["counts"]["scored"]
    assert facts["refusal"]["counts"] == {"does not apply": 7, "scored": len(answers) - 7}
    whole = Counting("1")
    score(tmp_path, run, [whole])
    different = {(one["question"], one["text"], str(one["token_ids"]), str(one.get("logprobs"))) for one in answers}
    assert len(broken.asked) + len(whole.asked) == len(different)
    assert scorer_facts(tmp_path)["length"]["about"]["spent"]["asked"] == len(broken.asked) + len(whole.asked)
    again, other = Counting("1"), Counting("2")
    score(tmp_path, run, [again])
    score(tmp_path, run, [other])
    assert (len(again.asked), len(other.asked)) == (0, len(broken.asked) + len(whole.asked))
    assert all(row["scores"]["length"] == len(row["text"]) for row in scored_answers(tmp_path, run))


def test_the_table_holds_every_answer_with_its_scores(
    engine: SyncEngine, vectors: dict[str, SteeringVector], tmp_path: Path
) -> None:
    run, _ = generate(engine, a_run(vectors), tmp_path, vectors=vectors)
    score(tmp_path, run, [Counting("1")])
    table = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    answers = answers_of(tmp_path, run)
    assert [(row["condition"], row["text"]) for row in table] == [(one["condition"], one["text"]) for one in answers]
    assert all(row["length"] == len(row["text"]) for row in table)
    assert json.loads((tmp_path / "scores" / "length.json").read_text())["identity"] == "1"
