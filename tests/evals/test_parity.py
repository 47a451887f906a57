"""Agreement of engines: none is found where there is none, and steering that is left out is seen."""

import pytest
import torch

import tiny
from steerscope.engines.facade import SyncEngine
from steerscope.engines.hf import HFEngine
from steerscope.evals.parity import agreement, continued
from steerscope.specs import Add, Steering
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.vector import SteeringVector

QUESTIONS = ["How was it?", "And then?"]


def conditions(vectors: dict[str, SteeringVector]) -> dict[str, Steering | None]:
    return {"unsteered": None, "a": Steering.of(vectors["a"].add(3))}


def test_an_engine_agrees_with_itself_token_by_token(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    texts = continued(engine, QUESTIONS, conditions(vectors), 5)
    assert [len(steps) for steps in texts.values()] == [10, 10]
    found = agreement(engine, texts, conditions(vectors))
    for one in found.values():
        assert one["most"] < 1e-4
        assert one["same"] == 1.0
    assert (found["unsteered"]["moved"], found["a"]["moved"] > 0.1) == (0, True)


def test_another_model_and_a_lost_steering_do_not_agree(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    texts = continued(engine, QUESTIONS, conditions(vectors), 5)
    lost = agreement(engine, {"a": texts["a"]}, {"a": Steering()})
    assert lost["a"]["mean"] > 0.1
    with HFEngine(tiny.model(seed=1), tiny.tokenizer()).sync as other:
        assert agreement(other, texts, conditions(vectors))["unsteered"]["mean"] > 0.1


def test_a_steering_of_some_tokens_is_refused(engine: SyncEngine) -> None:
    partly = Steering.of(Add(vector=torch.ones(64), layers=1, tokens="generated"))
    with pytest.raises(InvalidRequest, match="p acts on some tokens only; steer all"):
        continued(engine, QUESTIONS, {"p": partly}, 2)
