"""From rows and labels to a direction per layer.

Rows are [examples, layers, hidden], `positive` marks those that show the trait, and `pairs` numbers the pair of each
(None: no pairs). Directions are [layers, hidden] in float32 and point from negative to positive. The mean difference
keeps its length; all others have length 1.
"""

from collections.abc import Callable

import torch
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from steerscope.specs.errors import InvalidRequest, Problem

Strategy = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_PROBE_STRENGTH = 100.0  # inverse of the regularisation


def mean_difference(rows: Tensor, positive: Tensor, _: Tensor | None) -> Tensor:
    """Mean of the positive rows minus mean of the negative ones."""
    return _gap(rows.double(), positive).float()


def paired_pca(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
    """First principal component of the differences within pairs, about their mean (repeng's `pca_diff`). It finds what
    varies most between pairs, so use it where pairs differ in strength."""
    differences = _differences(rows.double(), positive, pairs)
    return towards(first_axis(differences - differences.mean(0)), rows, positive)


def centred_pca(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
    """First principal component of rows centred on the middle of their pair (repeng's `pca_center`, and the PCA of
    steering-vectors), or on the middle of the two classes where there are no pairs."""
    return towards(first_axis(_centred(rows.double(), positive, pairs)), rows, positive)


def logistic_probe(rows: Tensor, positive: Tensor, pairs: Tensor | None) -> Tensor:
    """Weights of a logistic regression on centred rows. Rows are scaled to a mean length of 1 and the loss is a mean,
    so the regularisation means the same at every layer and for any number of rows."""
    centred = _centred(rows.double(), positive, pairs)
    scaled = centred / centred.norm(dim=-1).mean(0)[:, None].clamp_min(1e-30)
    weights = []
    for layer in range(rows.shape[1]):
        probe = LogisticRegression(C=_PROBE_STRENGTH / len(rows), fit_intercept=pairs is None, max_iter=1000)
        probe.fit(scaled[:, layer].numpy(), positive.numpy())
        weights.append(torch.from_numpy(probe.coef_[0]))
    return _unit(torch.stack(weights))


def whitened(rows: Tensor, positive: Tensor, _: Tensor | None) -> Tensor:
    """The mean difference after whitening by the covariance within the classes, shrunk as Ledoit and Wolf do."""
    wide = rows.double()
    gaps = _gap(wide, positive)
    inner = wide.clone()
    for label in (True, False):
        inner[positive == label] -= wide[positive == label].mean(0)
    return _unit(torch.stack([_whiten(inner[:, layer], gaps[layer]) for layer in range(rows.shape[1])]))


def _whiten(inner: Tensor, gap: Tensor) -> Tensor:
    """((1 − s) C + s m I)⁻¹ gap, for C = innerᵀ inner / n and its mean variance m, without making C."""
    n, hidden = inner.shape
    shrinkage = float(ledoit_wolf_shrinkage(inner.numpy(), assume_centered=True))
    ridge = max(shrinkage * float(inner.square().sum()) / (n * hidden), 1e-12)
    kernel = inner @ inner.T * (1 - shrinkage) / n + ridge * torch.eye(n, dtype=inner.dtype)
    return (gap - inner.T @ torch.linalg.solve(kernel, inner @ gap) * (1 - shrinkage) / n) / ridge


STRATEGIES: dict[str, Strategy] = {
    one.__name__: one for one in (mean_difference, paired_pca, centred_pca, logistic_probe, whitened)
}


def strategy(name: str) -> Strategy:
    if name not in STRATEGIES:
        what = f"there is no strategy {name!r}"
        remedy = f"choose from {', '.join(STRATEGIES)}"
        raise InvalidRequest([Problem("strategy", what, remedy)])
    return STRATEGIES[name]


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
    """Return the first right singular vector of every layer, [layers, hidden]."""
    return torch.linalg.svd(rows.transpose(0, 1), full_matrices=False).Vh[:, 0]


def towards(axes: Tensor, rows: Tensor, positive: Tensor) -> Tensor:
    """Turn unit axes to the side on which positive rows project higher."""
    ahead = (_gap(rows.double(), positive) * axes).sum(-1, keepdim=True)
    return _unit(torch.where(ahead < 0, -axes, axes))


def _unit(directions: Tensor) -> Tensor:
    return (directions / directions.norm(dim=-1, keepdim=True).clamp_min(1e-30)).float()
