"""A tiny model, and personas that are short enough for its context."""

from collections.abc import Iterator

import pytest

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.definitions import DEFAULT, Persona
from steerscope.extraction.personas.run import PersonaRun
from steerscope.extraction.runs import RolloutSettings
from support import tiny


@pytest.fixture(scope="session")
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        yield engine


def role(name: str, *told: str) -> Persona:
    words = {"pos": ["a", "e"]}
    return Persona.parse({"name": name, "instruction": [{"pos": text} for text in told], "keywords": words})


def a_run(**changes: object) -> PersonaRun:
    trait = {
        "name": "quick",
        "instruction": [{"pos": "Be quick.", "neg": "Be lazy."}, {"pos": "Jump!", "neg": "Rest."}],
    }
    given: dict[str, object] = {
        "personas": (
            role("fox", "A fox.", "A dog."),
            role("rain", "It rained.", "Beach."),
            role("work", "At work.", "The week."),
            Persona.parse({**trait, "keywords": {"pos": ["a"], "neg": ["e"]}}),
        ),
        "default": Persona.parse({"name": DEFAULT, "instruction": [{"pos": ""}]}),
        "shared": ("How was it?", "And then?", "What?"),
        "rollouts": RolloutSettings(max_tokens=6, seed=8),
        **changes,
    }
    return PersonaRun.parse(given)
