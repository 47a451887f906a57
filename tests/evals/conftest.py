"""A tiny model, and runs that are short enough for its context."""

from collections.abc import Iterator

import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.evals.conditions import baselines, steered
from steerscope.evals.items import Item
from steerscope.evals.run import EvalRun
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import RolloutSettings
from steerscope.vectors.vector import SteeringVector
from support import tiny

QUICK = Persona.parse(
    {
        "name": "quick",
        "instruction": [{"pos": "Be quick.", "neg": "Be lazy."}, {"pos": "Jump!", "neg": "Rest."}],
        "keywords": {"pos": ["a"], "neg": ["e"]},
    }
)
OPEN = [Item(question=text, dataset="open") for text in ("How was it?", "And then?", "What?")]
CHOICE = Item(question="Which? (A) dog (B) fox", dataset="choice", choices=("(A)", "(B)"))


@pytest.fixture(scope="session")
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        yield engine


@pytest.fixture(scope="session")
def vectors() -> dict[str, SteeringVector]:
    generator = torch.Generator().manual_seed(1)
    return {name: SteeringVector({layer: torch.randn(64, generator=generator)}) for name, layer in (("a", 1), ("b", 2))}


def a_run(vectors: dict[str, SteeringVector], **changes: object) -> EvalRun:
    given: dict[str, object] = {
        "conditions": (*baselines(QUICK, "tiny"), *steered(vectors, [-4.0, 4.0])),
        "items": (*OPEN, CHOICE),
        "n": 2,
        "rollouts": RolloutSettings(max_tokens=6),
        "persona": QUICK,
        **changes,
    }
    return EvalRun.parse(given)
