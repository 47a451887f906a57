"""From answers and scores to the tensors users know: `pos_0` … `pos_3`, `pos_all`; `pos_neg`, `pos_neg_50`, …

What each key holds is as in the files they already have: a role's are means over the answers with that score; a trait's
are differences of means over pairs of answers to the same question, `_50` over those pairs whose scores differ by more
than 50, and means of its pos answers with scores from 70, and from 40 to below 70. A key that no answer would stand
behind is left out: a vector of zeros would pass for a measurement. (`build` leaves out those of too few, too.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.extraction.personas.judges import REFUSAL, Score
from steerscope.extraction.personas.rollouts import Rollout

APART = 50.0


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one persona: rollouts, the mean row [layers, hidden] of each, and scores (None: not judged)."""

    asked: Sequence[Rollout]
    means: Tensor
    scores: Sequence[Score | None]

    def select(self, *labels: str) -> list[int]:
        return [i for i, one in enumerate(self.asked) if one.label in labels]


Keys = dict[str, tuple[Tensor, int]]  # the tensor and how many answers or pairs stand behind it


def role_keys(answers: Answers) -> Keys:
    pos, scores = answers.select("pos"), answers.scores
    found = {f"pos_{level}": [i for i in pos if _near(scores[i], level)] for level in range(4)}
    return _means(answers.means, {**found, "pos_all": pos})


def _near(score: Score | None, level: int) -> bool:
    return score is not None and score != REFUSAL and round(score) == level


def trait_keys(answers: Answers, default_prompts: int) -> Keys:
    """Answers are the trait's and the default's to the same questions; instruction i meets i of the default's, which
    begin again where they are fewer."""
    place = {(one.label, one.prompt_index, one.question): i for i, one in enumerate(answers.asked)}
    keys: Keys = {}
    for other in ("neg", "default"):
        pairs = []
        for i in answers.select("pos"):
            one = answers.asked[i]
            index = one.prompt_index % default_prompts if other == "default" else one.prompt_index
            j = place.get((other, index, one.question))
            if j is not None and REFUSAL not in (answers.scores[i], answers.scores[j]):
                pairs.append((i, j))
        far = [(i, j) for i, j in pairs if _apart(answers.scores[i], answers.scores[j])]
        keys |= _differences(answers.means, {f"pos_{other}": pairs, f"pos_{other}_{APART:.0f}": far})
    scored = [(i, s) for i in answers.select("pos") if isinstance(s := answers.scores[i], int | float)]
    bands = {"pos_70": [i for i, s in scored if s >= 70], "pos_40_70": [i for i, s in scored if 40 <= s < 70]}
    return keys | _means(answers.means, bands)


def _apart(one: Score | None, other: Score | None) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float) and one - other > APART


def _means(rows: Tensor, groups: Mapping[str, Sequence[int]]) -> Keys:
    return {key: (_mean(rows, group).float(), len(group)) for key, group in groups.items() if group}


def _differences(rows: Tensor, groups: Mapping[str, Sequence[tuple[int, int]]]) -> Keys:
    return {
        key: ((_mean(rows, [i for i, _ in pairs]) - _mean(rows, [j for _, j in pairs])).float(), len(pairs))
        for key, pairs in groups.items()
        if pairs
    }


def _mean(rows: Tensor, index: Sequence[int]) -> Tensor:
    return rows[torch.tensor(index)].double().mean(0)
