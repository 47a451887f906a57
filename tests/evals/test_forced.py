"""Texts given token by token: the model's own probabilities on every architecture, with and without steering."""

import math
from pathlib import Path

import pytest
import torch

from evals.conftest import a_run
from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.evals.forced import ModelScorer, forced
from steerscope.evals.run import answers_of, generate
from steerscope.vectors.vector import SteeringVector
from support import tiny

PROMPT, TEXT = [5, 6, 7, 8], [20, 21, 22, 23, 24]
CAPPED = {"final_logit_softcapping": 5.0}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3_text", "gpt_neox", "gpt2"])
def test_log_probabilities_are_those_of_one_plain_forward(architecture: str) -> None:
    model = tiny.model(architecture, **(CAPPED if architecture == "gemma2" else {}))
    with HFEngine(model, tiny.tokenizer()).sync as engine:
        (found,) = forced(engine, [(PROMPT, TEXT)], layers=[1])
    with torch.no_grad():
        output = model(torch.tensor([PROMPT + TEXT]), output_hidden_states=True)
    said = torch.log_softmax(output.logits[0, len(PROMPT) - 1 : -1].double(), -1)
    expected = said.gather(1, torch.tensor(TEXT)[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.rows[1], output.hidden_states[2][0, len(PROMPT) :], atol=1e-4, rtol=1e-4)
    assert found.greedy.tolist() == (said.argmax(-1) == torch.tensor(TEXT)).tolist()


def test_steering_counts_and_each_text_has_its_own(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    steer = [None, vectors["a"].add(3)]
    plain, pushed = forced(engine, [(PROMPT, TEXT)] * 2, steer)
    done = engine.generate(engine.aio.tokenize("The quick"), steer=vectors["a"].add(3))
    (own,) = forced(engine, [(done.prompt_token_ids, done.token_ids)], vectors["a"].add(3))
    assert not torch.allclose(plain.logprobs, pushed.logprobs, atol=0.1)
    assert own.greedy.all()  # what it wrote greedily under that steering is likeliest under it


def test_perplexity_and_projection_of_answers_under_the_unsteered_model(
    engine: SyncEngine, vectors: dict[str, SteeringVector], tmp_path: Path
) -> None:
    run, _ = generate(engine, a_run(vectors), tmp_path, vectors=vectors)
    answers = answers_of(tmp_path, run)
    found = dict(zip((one["id"] for one in answers), ModelScorer(engine, vectors)(answers), strict=True))
    one = next(one for one in answers if one["condition"] == "a × 4" and "logprobs" not in one)
    prompt = engine.aio.render([{"role": "user", "content": one["question"]}]).token_ids
    with torch.no_grad():
        ids = torch.tensor([prompt + one["token_ids"]])
        output = engine.aio.model(ids, output_hidden_states=True)  # type: ignore[attr-defined]
    nats = torch.nn.functional.cross_entropy(output.logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])
    values = found[one["id"]].values
    assert values["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    mean = output.hidden_states[3][0, len(prompt) :].mean(0)
    assert values["projection: b"] == pytest.approx(float(vectors["b"].projection(mean, 2)), abs=1e-4)
    assert all(bool(found[one["id"]].values) == ("logprobs" not in one) for one in answers)
