"""The keys users know, against plain sums over the same answers."""

import numpy as np
import pytest
import torch

from steerscope.extraction.personas.build import Answers, role_keys, trait_keys
from steerscope.extraction.personas.judges import REFUSAL, Score
from steerscope.extraction.personas.run import Label, PersonaRollout


def ask(label: Label, prompt: int, question: int, persona: str = "fox") -> PersonaRollout:
    return PersonaRollout(persona, label, prompt, question, f"{label} {prompt}", f"question {question}")


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 3, 8, generator=torch.Generator().manual_seed(n)) + 100  # large and close, as real means are


def test_a_roles_keys_are_means_over_the_answers_with_that_score() -> None:
    asked = [ask("pos", i % 2, i // 2) for i in range(10)]
    scores: list[Score | None] = [3, 0, 3, 2, 2.6, None, 1, 0, 0.4, 3]
    means = rows(10)
    keys = role_keys(Answers(asked, means, scores))
    exact = means.numpy().astype(np.float64)
    groups = {"pos_0": [1, 7, 8], "pos_1": [6], "pos_2": [3], "pos_3": [0, 2, 4, 9], "pos_all": list(range(10))}
    assert keys.keys() == groups.keys()
    for key, group in groups.items():
        value, count = keys[key]
        assert count == len(group)
        assert value.dtype == torch.float32
        np.testing.assert_allclose(value.numpy(), exact[group].mean(0), rtol=1e-6)


def test_without_a_judge_a_role_has_the_mean_of_all() -> None:
    keys = role_keys(Answers([ask("pos", 0, 0), ask("pos", 0, 1)], rows(2), [None, None]))
    assert list(keys) == ["pos_all"]


def test_a_traits_keys_are_differences_over_pairs_and_means_over_bands() -> None:
    asked, scores = [], []
    by_key: dict[str, tuple[list[Score], list[Score]]] = {
        # pos and neg of prompts 0 and 1, then the default's one prompt, for questions 0 to 3
        "p0": ([90, 70, 69, REFUSAL], [10, 20, 19, 0]),
        "p1": ([40, 39, 100, 55], [50, 0, REFUSAL, 4]),
    }
    for prompt, (pos, neg) in enumerate(by_key.values()):
        for question in range(4):
            asked += [ask("pos", prompt, question), ask("neg", prompt, question)]
            scores += [pos[question], neg[question]]
    asked += [ask("default", 0, question, "default") for question in range(4)]
    scores += [30, 30, 19, 5]
    means = rows(len(asked))
    keys = trait_keys(Answers(asked, means, scores), default_prompts=1)

    at = {one.key: i for i, one in enumerate(asked)}
    exact = means.numpy().astype(np.float64)

    def difference(other: str, places: list[str]) -> np.ndarray:
        pairs = [(at[f"pos_{p}"], at[f"{other}_{p}"] if other == "neg" else at[f"default_p0_{p[3:]}"]) for p in places]
        return np.mean([exact[i] for i, _ in pairs], axis=0) - np.mean([exact[j] for _, j in pairs], axis=0)

    def mean(places: list[str]) -> np.ndarray:
        return exact[[at[f"pos_{p}"] for p in places]].mean(0)

    answered = ["p0_q0", "p0_q1", "p0_q2", "p1_q0", "p1_q1", "p1_q2", "p1_q3"]  # all but the refusal
    expected = {
        "pos_neg": (difference("neg", [p for p in answered if p != "p1_q2"]), 6),
        "pos_neg_50": (difference("neg", ["p0_q0", "p1_q3"]), 2),  # 70 - 20 and 69 - 19 are not above 50, 55 - 4 is
        "pos_default": (difference("default", answered), 7),
        "pos_default_50": (difference("default", ["p0_q0", "p1_q2"]), 2),
        "pos_70": (mean(["p0_q0", "p0_q1", "p1_q2"]), 3),
        "pos_40_70": (mean(["p0_q2", "p1_q0", "p1_q3"]), 3),
    }
    assert keys.keys() == expected.keys()
    for key, (wanted, count) in expected.items():
        assert keys[key][1] == count, key
        # a difference of numbers near 100 in float32 would be off by 1e-5
        np.testing.assert_allclose(keys[key][0].numpy(), wanted, rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("judged", [False, True])
def test_a_key_that_nothing_stands_behind_is_left_out(judged: bool) -> None:
    asked = [ask("pos", 0, 0), ask("neg", 0, 0), ask("pos", 1, 1)]
    scores: list[Score | None] = [50, 50, 50] if judged else [None, None, None]
    keys = trait_keys(Answers(asked, rows(3), scores), default_prompts=1)
    assert list(keys) == (["pos_neg", "pos_40_70"] if judged else ["pos_neg"])
    assert keys["pos_neg"][1] == 1
