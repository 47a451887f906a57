"""Agreement of engines: none is found where there is none, and steering that is left out is seen."""

import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.evals.parity import Step, agreement, continued
from steerscope.specs import Add, Sampling, Steering
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.vector import SteeringVector
from support import tiny

QUESTIONS = ["How was it?", "And then?"]


def conditions(vectors: dict[str, SteeringVector]) -> dict[str, Steering | None]:
    return {"unsteered": None, "a": Steering.of(vectors["a"].add(3))}


def test_an_engine_agrees_with_itself_token_by_token(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    texts = continued(engine, QUESTIONS, conditions(vectors), 5)
    assert [len(steps) for steps in texts.values()] == [10, 10]
    found = agreement(engine, texts, conditions(vectors))
    for one in found.values():
        assert one["most"] is not None
        assert one["most"] < 1e-4
        assert one["same"] == 1.0
    assert (found["unsteered"]["moved"], found["a"]["moved"] > 0.1) == (0, True)


def test_another_model_and_a_lost_steering_do_not_agree(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    texts = continued(engine, QUESTIONS, conditions(vectors), 5)
    lost = agreement(engine, {"a": texts["a"]}, {"a": Steering()})
    assert lost["a"]["mean"] > 0.1
    with HFEngine(tiny.model(seed=1), tiny.tokenizer()).sync as other:
        assert agreement(other, texts, conditions(vectors))["unsteered"]["mean"] > 0.1


def test_only_what_both_tell_of_is_compared(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    """The tiny model has more tokens than an engine tells of: under another steering some are unknown."""
    texts = continued(engine, QUESTIONS, conditions(vectors), 5)
    own, other = (
        agreement(engine, texts, {"unsteered": None, "a": one})["a"] for one in (conditions(vectors)["a"], None)
    )
    assert (own["steps"], own["compared"], own["unknown"]) == (10, 50, 0)
    assert other["unknown"] > 0
    assert other["compared"] + other["unknown"] == 50
    told = [
        dict(engine.generate(TokenPrompt(step.before), Sampling(max_tokens=1, logprobs=20)).choices[0].logprobs[0].top)
        for step in texts["a"]
    ]
    apart = [
        abs(step.top[token] - top[token])
        for step, top in zip(texts["a"], told, strict=True)
        for token in step.top.keys() & top.keys()
    ]
    assert len(apart) == other["compared"]
    assert other["mean"] == pytest.approx(sum(apart) / len(apart), rel=1e-4)
    strange = {"a": [Step(one.before, {token + 10_000: x for token, x in one.top.items()}) for one in texts["a"]]}
    nothing = agreement(engine, strange, {"a": None})["a"]
    assert (nothing["compared"], nothing["unknown"], nothing["mean"], nothing["most"]) == (0, 50, None, None)


def test_a_steering_of_some_tokens_is_refused(engine: SyncEngine) -> None:
    partly = Steering.of(Add(vector=torch.ones(64), layers=1, tokens="generated"))
    with pytest.raises(InvalidRequest, match="p acts on some tokens only; steer all"):
        continued(engine, QUESTIONS, {"p": partly}, 2)
