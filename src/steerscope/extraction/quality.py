"""Quality of a direction at each layer, measured on rows it was not made from, with two controls.

The rows are split: held-out examples where there are some, otherwise up to four folds that keep pairs together. On
every split the strategy runs on one part and its direction is measured on the other. The controls are the strategy on
shuffled labels, and random directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from steerscope.extraction.strategies import Strategy

FOLDS = 4
DRAWS = 5
Split = tuple[Tensor, Tensor]  # indices of the rows a direction is made from, and of those it is measured on


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """`auroc` of the projection, `effect` in standard deviations (Cohen's d), and `halves`: the cosine of directions
    made from either half of the data. Controls are max(a, 1 − a) of an AUROC by chance; a PCA of pairs takes only its
    sign from the labels, so shuffling them is no control of it."""

    layer: int
    auroc: float
    effect: float
    halves: float
    shuffled: float
    random: float


def heldout_split(fit: int, test: int) -> list[Split]:
    """The first rows make the direction, the others measure it."""
    return [(torch.arange(fit), torch.arange(fit, fit + test))]


def folds(positive: Tensor, pairs: Tensor | None, seed: int = 0) -> list[Split]:
    """Return splits that keep pairs together, or, without pairs, have both labels in every part. Every measured part
    has two of either label, because one has no spread."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.empty(len(positive), dtype=torch.long)
    if pairs is not None:
        numbers, place = pairs.unique(return_inverse=True)
        group = torch.randperm(len(numbers), generator=generator)[place]
    else:
        for label in (True, False):
            members = (positive == label).nonzero()[:, 0]
            group[members] = torch.randperm(len(members), generator=generator)
    fewer = min(int(positive.sum()), int((~positive).sum()))
    fold = group % max(2, min(FOLDS, fewer // 2))
    return [((fold != i).nonzero()[:, 0], (fold == i).nonzero()[:, 0]) for i in fold.unique()]


def measure(
    rows: Tensor, positive: Tensor, pairs: Tensor | None, strategy: Strategy, layers: Sequence[int], splits: list[Split]
) -> tuple[LayerQuality, ...]:
    """Return one entry per layer, each the mean over the splits."""
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([_of_split(rows, positive, pairs, strategy, split, generator) for split in splits]).mean(0)
    return tuple(LayerQuality(layer, *numbers.tolist()) for layer, numbers in zip(layers, found, strict=True))


def _of_split(
    rows: Tensor, positive: Tensor, pairs: Tensor | None, strategy: Strategy, split: Split, generator: torch.Generator
) -> Tensor:
    """[layers, 5], in the order of LayerQuality."""
    fit, test = split

    def direction(part: Tensor, labels: Tensor) -> Tensor:
        return strategy(rows[part], labels[part], None if pairs is None else pairs[part])

    def aurocs(directions: Tensor) -> Tensor:
        scores = (rows[test] * directions).sum(-1)
        return torch.tensor([roc_auc_score(positive[test], column) for column in scores.T.tolist()])

    def by_chance(draw: Callable[[], Tensor]) -> Tensor:
        each = torch.stack([aurocs(draw()) for _ in range(DRAWS)])
        return torch.maximum(each, 1 - each).mean(0)

    made = direction(fit, positive)
    return torch.stack(
        [
            aurocs(made),
            _effect((rows[test] * torch.nn.functional.normalize(made, dim=-1)).sum(-1), positive[test]),
            _halves(direction, fit, positive, pairs),
            by_chance(lambda: direction(*_shuffled(positive, pairs, fit, generator))),
            by_chance(lambda: torch.randn(made.shape, generator=generator)),
        ],
        dim=1,
    )


def _effect(scores: Tensor, positive: Tensor) -> Tensor:
    """Return Cohen's d, 0 where neither side varies by more than rounding."""
    a = scores[positive].double()
    b = scores[~positive].double()
    spread = ((a.var(0, correction=0) * len(a) + b.var(0, correction=0) * len(b)) / max(1, len(a) + len(b) - 2)).sqrt()
    varies = spread > 1e-6 * scores.abs().amax(0)
    return torch.where(varies, (a.mean(0) - b.mean(0)) / spread, 0.0).float()


def _halves(
    direction: Callable[[Tensor, Tensor], Tensor], fit: Tensor, positive: Tensor, pairs: Tensor | None
) -> Tensor:
    order = torch.empty(len(fit), dtype=torch.long)
    for label in (True, False):  # every other example of either label; pairs keep their order, so they stay together
        members = (positive[fit] == label).nonzero()[:, 0]
        members = members if pairs is None else members[pairs[fit][members].argsort()]
        order[members] = torch.arange(len(members))
    one, other = (direction(fit[order % 2 == part], positive) for part in (0, 1))
    return torch.nn.functional.cosine_similarity(one, other, dim=-1)


def _shuffled(positive: Tensor, pairs: Tensor | None, fit: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows to fit, and labels exchanged for exactly half of their pairs, or of each side without pairs, so
    that the trait cancels out. Of an odd number one is left out."""
    changed = positive.clone()
    kept = []
    sides = [fit] if pairs is not None else [fit[positive[fit]], fit[~positive[fit]]]
    for side in sides:
        group = torch.arange(len(side)) if pairs is None else pairs[side].unique(return_inverse=True)[1]
        order = torch.randperm(int(group.max()) + 1, generator=generator)
        changed[side] ^= (order % 2 == 1)[group]
        kept.append(side[(order < max(1, len(order) // 2 * 2))[group]])
    return torch.cat(kept), changed
