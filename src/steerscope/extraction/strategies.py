"""From rows and labels to a direction per layer: each strategy is a small typed callable made by a factory.

Rows are [examples, layers, hidden], `positive` says which of them show the trait, `pairs` numbers the pair each belongs
to (None where they came without). The result is [layers, hidden] in float32 and points from negative to positive. The
mean difference keeps its length; all others, whose length means nothing, have length 1.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from steerscope.specs.errors import InvalidRequest, Problem


class Strategy(Protocol):
    def __call__(self, rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor: ...


def mean_difference() -> Strategy:
    """Mean of the positive rows minus mean of the negative ones."""

    def run(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:  # noqa: ARG001
        return _gap(rows.double(), positive).float()

    return run


def paired_pca() -> Strategy:
    """First principal component of the differences within pairs, about their mean (repeng's `pca_diff`). What all pairs
    share is taken out with the mean: it finds what varies most, so use it where pairs differ in strength."""

    def run(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
        differences = _differences(rows.double(), positive, pairs)
        return towards(first_axis(differences - differences.mean(0)), rows, positive)

    return run


def centred_pca() -> Strategy:
    """First principal component of rows centred on the middle of their pair (repeng's `pca_center`, and the PCA of
    steering-vectors), or on the middle of the two classes where there are no pairs."""

    def run(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
        return towards(first_axis(_centred(rows.double(), positive, pairs)), rows, positive)

    return run


def logistic_probe(strength: float = 100.0) -> Strategy:
    """Weights of a logistic regression on centred rows. Rows are scaled to a mean length of 1 and the loss is a mean,
    so that `strength` (the inverse of the regularisation) means the same at every layer and for any number of rows."""

    def run(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
        centred = _centred(rows.double(), positive, pairs)
        scaled = centred / centred.norm(dim=-1).mean(0)[:, None].clamp_min(1e-30)
        found = []
        for layer in range(rows.shape[1]):
            probe = LogisticRegression(C=strength / len(rows), fit_intercept=pairs is None, max_iter=1000)
            probe.fit(scaled[:, layer].numpy(), positive.numpy())
            found.append(torch.from_numpy(probe.coef_[0]))
        return _unit(torch.stack(found))

    return run


def whitened() -> Strategy:
    """The mean difference after whitening: rows are centred on the mean of their class, and directions in which classes
    vary anyway count less. The covariance is shrunk to a sphere as Ledoit and Wolf do, so it can be inverted."""

    def run(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:  # noqa: ARG001
        wide = rows.double()
        gaps, inner = _gap(wide, positive), wide.clone()
        for label in (True, False):
            inner[positive == label] -= wide[positive == label].mean(0)
        found = [_whiten(inner[:, layer], gaps[layer]) for layer in range(rows.shape[1])]
        return _unit(torch.stack(found))

    return run


def _whiten(inner: Tensor, gap: Tensor) -> Tensor:
    """((1 − s) C + s m I)⁻¹ gap, for C = innerᵀ inner / n and its mean variance m, without making C."""
    n, hidden = inner.shape
    shrinkage = float(ledoit_wolf_shrinkage(inner.numpy(), assume_centered=True))
    ridge = max(shrinkage * float(inner.square().sum()) / (n * hidden), 1e-12)
    kernel = inner @ inner.T * (1 - shrinkage) / n + ridge * torch.eye(n, dtype=inner.dtype)
    return (gap - inner.T @ torch.linalg.solve(kernel, inner @ gap) * (1 - shrinkage) / n) / ridge


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "mean_difference": mean_difference,
    "paired_pca": paired_pca,
    "centred_pca": centred_pca,
    "logistic_probe": logistic_probe,
    "whitened": whitened,
}


def strategy(name: str) -> Strategy:
    if name not in STRATEGIES:
        what, remedy = f"there is no strategy {name!r}", f"choose from {', '.join(STRATEGIES)}"
        raise InvalidRequest([Problem("strategy", what, remedy)])
    return STRATEGIES[name]()


def _gap(rows: Tensor, positive: Tensor) -> Tensor:
    return rows[positive].mean(0) - rows[~positive].mean(0)


def _differences(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
    """Positive minus negative of each pair, [pairs, layers, hidden]."""
    if pairs is None:
        raise InvalidRequest([Problem("strategy", "paired_pca needs pairs", "give pairs, or choose centred_pca")])
    return rows[positive][pairs[positive].argsort()] - rows[~positive][pairs[~positive].argsort()]


def _centred(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
    if pairs is None:
        return rows - (rows[positive].mean(0) + rows[~positive].mean(0)) / 2
    half = _differences(rows, positive, pairs) / 2
    place = torch.searchsorted(pairs[positive].sort().values, pairs)
    return torch.where(positive[:, None, None], half[place], -half[place])


def first_axis(rows: Tensor) -> Tensor:
    """The first right singular vector of every layer, [layers, hidden]."""
    return torch.linalg.svd(rows.transpose(0, 1), full_matrices=False).Vh[:, 0]


def towards(axes: Tensor, rows: Tensor, positive: Tensor) -> Tensor:
    """With the sign that makes positive rows project higher."""
    ahead = (_gap(rows.double(), positive) * axes).sum(-1, keepdim=True)
    return _unit(torch.where(ahead < 0, -axes, axes))


def _unit(directions: Tensor) -> Tensor:
    return (directions / directions.norm(dim=-1, keepdim=True).clamp_min(1e-30)).float()
