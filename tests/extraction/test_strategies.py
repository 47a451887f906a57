"""Every strategy against an independent implementation, on synthetic rows with a known direction."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from sklearn.decomposition import PCA

from steerscope.extraction.strategies import STRATEGIES, logistic_probe, strategy
from steerscope.specs.errors import InvalidRequest

PAIRS, LAYERS, HIDDEN = 60, 3, 24
Oracle = Callable[[np.ndarray, np.ndarray], np.ndarray]  # positive and negative rows of one layer, in pairs


def made(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, labels, pairs and the direction they were made with. What a pair shares is five times as large as what
    tells its sides apart; how far apart they are varies from pair to pair; examples come in no order."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.nn.functional.normalize(torch.randn(LAYERS, HIDDEN, generator=generator), dim=-1)
    shared = 5 * torch.randn(PAIRS, 1, LAYERS, HIDDEN, generator=generator)
    sign = torch.tensor([1.0, -1.0])[None, :, None, None]
    strength = 6 * torch.rand(PAIRS, 1, 1, 1, generator=generator)
    noise = 0.1 * torch.randn(PAIRS, 2, LAYERS, HIDDEN, generator=generator)
    rows = (shared + sign * strength * truth + noise).flatten(0, 1)
    order = torch.randperm(2 * PAIRS, generator=generator)
    return (
        rows[order],
        (torch.arange(2 * PAIRS) % 2 == 0)[order],
        torch.arange(PAIRS).repeat_interleave(2)[order],
        truth,
    )


def sides(rows: torch.Tensor, positive: torch.Tensor, pairs: torch.Tensor, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Positive and negative rows of a layer, pair by pair, by a plain loop."""
    found = {(int(pair), bool(label)): row[layer] for row, label, pair in zip(rows, positive, pairs, strict=True)}
    return tuple(np.stack([found[i, label].double().numpy() for i in range(PAIRS)]) for label in (True, False))  # type: ignore[return-value]


def pca_of_differences(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    return PCA(1).fit(positive - negative).components_[0]


def pca_about_the_middle(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    middle = (positive + negative) / 2
    values, vectors = np.linalg.eigh(np.cov(np.concatenate([positive - middle, negative - middle]).T))
    return vectors[:, values.argmax()]


def newton(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Logistic regression without intercept on ±half the differences, by Newton's method."""
    half = (positive - negative) / 2
    half = half / np.linalg.norm(half, axis=1).mean()
    weights = np.zeros(HIDDEN)
    for _ in range(50):
        wrong = 1 / (1 + np.exp(half @ weights))
        slope = -(half * wrong[:, None]).mean(0) + weights / 100
        curve = (half * (wrong * (1 - wrong))[:, None]).T @ half / PAIRS + np.eye(HIDDEN) / 100
        weights -= np.linalg.solve(curve, slope)
    return weights


def shrunk_discriminant(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    inner = np.concatenate([positive - positive.mean(0), negative - negative.mean(0)])
    covariance = LedoitWolf(assume_centered=True).fit(inner).covariance_
    return np.linalg.inv(covariance) @ (positive.mean(0) - negative.mean(0))


ORACLES: dict[str, Oracle] = {
    "mean_difference": lambda positive, negative: positive.mean(0) - negative.mean(0),
    "paired_pca": pca_of_differences,
    "centred_pca": pca_about_the_middle,
    "logistic_probe": newton,
    "whitened": shrunk_discriminant,
}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_equals_an_independent_implementation_and_finds_the_direction(name: str) -> None:
    rows, positive, pairs, truth = made()
    found = strategy(name)(rows, positive, pairs)
    assert found.shape == (LAYERS, HIDDEN)
    assert found.dtype == torch.float32
    for layer in range(LAYERS):
        mine, right = found[layer].double().numpy(), truth[layer].double().numpy()
        wanted = ORACLES[name](*sides(rows, positive, pairs, layer))
        assert abs(cosine(mine, wanted)) > 0.9999
        if name != "whitened":  # for which these rows are no good case: see the next test
            assert cosine(mine, right) > 0.99
        assert np.linalg.norm(mine) == pytest.approx(np.linalg.norm(wanted) if name == "mean_difference" else 1)


def test_whitening_finds_a_direction_that_larger_variation_hides() -> None:
    generator = torch.Generator().manual_seed(3)
    loud, quiet = torch.eye(HIDDEN)[0], torch.eye(HIDDEN)[1]
    positive = torch.arange(400) % 2 == 0
    sign = torch.where(positive, 1.0, -1.0)[:, None]
    rows = 0.1 * torch.randn(400, HIDDEN, generator=generator) + sign * quiet
    rows += (
        20 * torch.randn(400, 1, generator=generator) * (loud + quiet)
    )  # both vary together, far more than they differ
    found, plain = (strategy(name)(rows[:, None], positive, None)[0] for name in ("whitened", "mean_difference"))
    best = torch.nn.functional.normalize(quiet - loud, dim=0)  # the common part cancels
    assert float(found @ best) > 0.99
    assert float(plain @ best) / float(plain.norm()) < 0.9
    wanted = shrunk_discriminant(rows[positive].double().numpy(), rows[~positive].double().numpy())
    assert cosine(found.double().numpy(), wanted) > 0.9999


@pytest.mark.parametrize("name", ["mean_difference", "centred_pca", "logistic_probe"])
def test_without_pairs_the_direction_is_found_where_classes_are_far_apart(name: str) -> None:
    rows, positive, _, truth = made(1)
    rows = rows + torch.where(positive, 40.0, -40.0)[:, None, None] * truth
    found = strategy(name)(rows, positive, None)
    for layer in range(LAYERS):
        assert cosine(found[layer].double().numpy(), truth[layer].double().numpy()) > 0.99


@pytest.mark.parametrize("name", STRATEGIES)
def test_exchanging_the_labels_turns_the_direction_round(name: str) -> None:
    rows, positive, pairs, _ = made(2)
    there, back = strategy(name)(rows, positive, pairs), strategy(name)(rows, ~positive, pairs)
    torch.testing.assert_close(there, -back, atol=2e-4, rtol=0)


def test_a_probe_does_not_depend_on_the_scale_of_the_rows_or_on_their_number() -> None:
    rows, positive, pairs, _ = made()
    run = logistic_probe
    found = run(rows, positive, pairs)
    torch.testing.assert_close(run(1000 * rows, positive, pairs), found, atol=1e-3, rtol=0)
    twice = run(torch.cat([rows, rows]), torch.cat([positive, positive]), torch.cat([pairs, pairs + PAIRS]))
    torch.testing.assert_close(twice, found, atol=1e-3, rtol=0)


def test_equal_rows_give_no_nan() -> None:
    rows, positive, pairs, _ = made()
    for name in STRATEGIES:
        assert torch.isfinite(strategy(name)(torch.zeros_like(rows), positive, pairs)).all()


def test_what_cannot_be_done_is_refused() -> None:
    rows, positive, _, _ = made()
    with pytest.raises(InvalidRequest, match="paired_pca needs pairs; give pairs, or choose centred_pca"):
        strategy("paired_pca")(rows, positive, None)
    with pytest.raises(InvalidRequest, match="there is no strategy 'umap'; choose from mean_difference, paired_pca"):
        strategy("umap")
