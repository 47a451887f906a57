"""A vector learned on transformers gives the same steered log probabilities on every engine."""

from pathlib import Path

import pytest
import torch

import tiny
from steerscope import load_vector
from steerscope.engines.facade import SyncEngine
from steerscope.engines.generation import TokenPrompt
from steerscope.engines.hf import HFEngine
from steerscope.specs import Sampling
from steerscope.training.texts import Completion, TrainingSet
from steerscope.training.vectors import TrainSettings, train

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
