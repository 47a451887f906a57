"""From answers and scores to the tensors of persona files: `pos_0` … `pos_3`, `pos_all`; `pos_neg`, `pos_neg_50`, …

Keys of a role are means over the answers with that score. Keys of a trait are differences of means over pairs of
answers to the same question, `_50` over the pairs whose scores differ by more than 50, and means of its pos answers
with scores from 70, and from 40 to below 70. A key without answers is left out, because a vector of zeros would look
like a measurement; `build` also leaves out keys of too few.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.extraction.personas.judges import REFUSAL, Score
from steerscope.extraction.personas.rollouts import PersonaRollout

APART = 50.0
Keys = dict[str, tuple[Tensor, int]]  # the tensor, and the number of answers or pairs behind it


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one persona: rollouts, the mean row [layers, hidden] of each, and scores (None: not judged)."""

    asked: Sequence[PersonaRollout]
    means: Tensor
    scores: Sequence[Score | None]

    def select(self, *labels: str) -> list[int]:
        return [i for i, one in enumerate(self.asked) if one.label in labels]

    def number(self, i: int) -> float | None:
        """Return a score that is a number."""
        score = self.scores[i]
        return None if score is None or score == REFUSAL else score

    def mean(self, places: Sequence[int]) -> Tensor:
        return self.means[torch.tensor(places)].double().mean(0)


def role_keys(answers: Answers) -> Keys:
    scored = _numbers(answers)
    groups = {f"pos_{level}": [i for i, score in scored.items() if round(score) == level] for level in range(4)}
    return _means(answers, {**groups, "pos_all": answers.select("pos")})


def trait_keys(answers: Answers, default_prompts: int) -> Keys:
    """Instruction i is paired with instruction i of the default, modulo the number of the default's instructions."""
    keys: Keys = {}
    for other in ("neg", "default"):
        pairs = _pairs(answers, other, lambda i, other=other: i % default_prompts if other == "default" else i)
        far = [(i, j) for i, j in pairs if _apart(answers.number(i), answers.number(j))]
        for key, chosen in ((f"pos_{other}", pairs), (f"pos_{other}_{APART:.0f}", far)):
            if chosen:
                difference = answers.mean([i for i, _ in chosen]) - answers.mean([j for _, j in chosen])
                keys[key] = difference.float(), len(chosen)
    scored = _numbers(answers)
    high = [i for i, score in scored.items() if score >= 70]
    middle = [i for i, score in scored.items() if 40 <= score < 70]
    return keys | _means(answers, {"pos_70": high, "pos_40_70": middle})


def _pairs(answers: Answers, other: str, prompt_of: Callable[[int], int]) -> list[tuple[int, int]]:
    """Pos answers with the other answer to the same question, without refusals."""
    place = {(one.label, one.prompt_index, one.question): i for i, one in enumerate(answers.asked)}
    pairs = []
    for i in answers.select("pos"):
        one = answers.asked[i]
        j = place.get((other, prompt_of(one.prompt_index), one.question))
        if j is not None and REFUSAL not in (answers.scores[i], answers.scores[j]):
            pairs.append((i, j))
    return pairs


def _apart(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and one - other > APART


def _numbers(answers: Answers) -> dict[int, float]:
    """Pos answers whose score is a number."""
    numbers = {i: answers.number(i) for i in answers.select("pos")}
    return {i: score for i, score in numbers.items() if score is not None}


def _means(answers: Answers, groups: dict[str, list[int]]) -> Keys:
    return {key: (answers.mean(group).float(), len(group)) for key, group in groups.items() if group}
