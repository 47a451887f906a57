"""A vector learned on transformers gives the same steered log probabilities on every engine, and the same answers."""

from pathlib import Path

import pytest
import torch

from steerscope import load_vector
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.evals.conditions import baselines, steered
from steerscope.evals.items import Item
from steerscope.evals.parity import agreement, continued
from steerscope.evals.run import EvalRun, answers_of, generate
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import RolloutSettings
from steerscope.specs import Sampling, Steering
from steerscope.training.settings import TrainSettings
from steerscope.training.texts import Completion, TrainingSet
from steerscope.training.vectors import train
from support import tiny

TEXTS = tuple(
    Completion(prompt=f"The {word} ", response=f"jumps over the {word}.") for word in ("fox", "dog", "week", "sea")
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a vector for layers 1 and 2 of the tiny model."""
    out = tmp_path_factory.mktemp("learned")
    made = HFEngine(tiny.model(), tiny.tokenizer(), name="llama")
    settings = TrainSettings(layers=(1, 2), epochs=4, batch=2, learning_rate=0.3)
    done = train(made.sync, TrainingSet("jumps", TEXTS[:3], TEXTS[3:]), out, settings)
    made.sync.close()
    assert done.result.steered < 0.8 * done.result.unsteered
    return out / "vector.safetensors"


def test_a_learned_vector_gives_the_same_steered_log_probabilities(engine: SyncEngine, learned: Path) -> None:
    vector, model = load_vector(learned), tiny.model()
    prompts = [[5, 9, 200], [17, 300, 4, 99, 31, 250, 8]]
    asked = Sampling(max_tokens=8, ignore_eos=True, logprobs=8)
    done = engine.generate([TokenPrompt(prompt) for prompt in prompts], asked, steer=vector.add())
    plain = engine.generate([TokenPrompt(prompt) for prompt in prompts], asked)
    handles = [
        model.get_submodule(f"model.layers.{layer}").register_forward_hook(lambda _m, _a, out, v=vector[layer]: out + v)
        for layer in (1, 2)
    ]
    try:
        for prompt, one in zip(prompts, done, strict=True):
            with torch.no_grad():
                said = model(input_ids=torch.tensor([prompt + one.token_ids])).logits[0].log_softmax(-1)
            for i, found in enumerate(one.choices[0].logprobs):
                for token, value in found.top:
                    assert value == pytest.approx(float(said[len(prompt) - 1 + i, token]), abs=2e-3)
    finally:
        for handle in handles:
            handle.remove()
    assert [one.token_ids for one in plain] != [one.token_ids for one in done]


def test_answers_and_probabilities_that_evals_asks_for_are_those_of_transformers(
    engine: SyncEngine, learned: Path, tmp_path: Path
) -> None:
    """`eval parity` and `eval rollouts`: steered, prompted and not, open questions and a choice of two."""
    vector, questions = load_vector(learned), ("How was it?", "And then?")
    asked = {"unsteered": None, "learned": Steering.of(vector.add())}
    told = Persona.parse({"name": "quick", "instruction": [{"pos": "Be quick.", "neg": "Be lazy."}]})
    run = EvalRun(
        conditions=(*baselines(told, "llama"), *steered({"learned": vector}, [-1.0, 1.0])),
        items=(
            *(Item(question=question, dataset="open") for question in questions),
            Item(question="Which? (A) dog (B) fox", dataset="choice", choices=("(A)", "(B)")),
        ),
        rollouts=RolloutSettings(max_tokens=6, temperature=0),
    )
    with HFEngine(tiny.model(), tiny.tokenizer(), name="llama").sync as reference:
        texts = continued(reference, questions, asked, 5)
        generate(reference, run, tmp_path / "hf", vectors={"learned": vector})
    for name, one in agreement(engine, texts, asked).items():
        assert (one["steps"], one["compared"] + one["unknown"], one["same"]) == (10, 50, 1.0), name
        assert one["compared"] >= 49, name
        assert one["most"] < 2e-3, name
        assert (one["moved"] > 0.1) == (name == "learned")
    run, failures = generate(engine, run, tmp_path / "own", vectors={"learned": vector})
    assert not failures
    own, theirs = ({one["id"]: one for one in answers_of(tmp_path / name, run)} for name in ("own", "hf"))
    assert own.keys() == theirs.keys()
    assert len(own) == 15
    for id, one in own.items():
        if one["dataset"] == "open":
            assert one["token_ids"] == theirs[id]["token_ids"]
        else:
            assert one["logprobs"] == pytest.approx(theirs[id]["logprobs"], abs=2e-3)
    assert len({one["text"] for one in own.values() if one["question"] == questions[0]}) > 2
