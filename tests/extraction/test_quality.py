"""Quality is measured on rows that made no part of the direction, beside what chance gives."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from steerscope.extraction.quality import folds, heldout_split, measure
from steerscope.extraction.strategies import STRATEGIES, strategy

N, HIDDEN = 40, 64


def made(strengths: tuple[float, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows whose layers show the trait with these strengths, labels and pairs."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.arange(2 * N) < N
    truth = torch.nn.functional.normalize(torch.randn(len(strengths), HIDDEN, generator=generator), dim=-1)
    rows = torch.randn(2 * N, len(strengths), HIDDEN, generator=generator)
    sign = torch.where(positive, 1.0, -1.0)[:, None, None]
    return rows + sign * torch.tensor(strengths)[None, :, None] * truth, positive, torch.arange(N).repeat(2)


def test_measures_equal_a_plain_computation_on_the_held_out_rows() -> None:
    rows, positive, _ = made((0.5, 2.0))
    fit = torch.cat([torch.arange(0, 30), torch.arange(N, N + 30)])
    order = torch.cat([fit, torch.arange(30, N), torch.arange(N + 30, 2 * N)])
    rows, positive = rows[order], positive[order]
    found = measure(rows, positive, None, strategy("mean_difference"), (4, 7), heldout_split(60, 20))
    assert [one.layer for one in found] == [4, 7]
    for i, one in enumerate(found):
        direction = rows[:60, i][positive[:60]].mean(0) - rows[:60, i][~positive[:60]].mean(0)
        scores = (rows[60:, i] @ direction / direction.norm()).double()
        assert one.auroc == pytest.approx(roc_auc_score(positive[60:], scores))
        a, b = scores[positive[60:]], scores[~positive[60:]]
        pooled = (((len(a) - 1) * a.var() + (len(b) - 1) * b.var()) / (len(a) + len(b) - 2)).sqrt()
        assert one.effect == pytest.approx(float((a.mean() - b.mean()) / pooled), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "paired_pca"])
def test_a_strong_trait_is_told_from_a_weak_one_and_from_none(name: str) -> None:
    rows, positive, pairs = made((0.0, 0.7, 4.0))
    none, weak, strong = measure(rows, positive, pairs, strategy(name), (0, 1, 2), folds(positive, pairs))
    assert none.auroc < 0.7
    assert none.auroc < weak.auroc + 0.1
    assert strong.auroc > 0.99 > weak.auroc
    assert strong.effect > weak.effect
    assert strong.halves > weak.halves > none.halves - 0.1
    assert abs(none.halves) < 0.3
    if name != "centred_pca":  # which finds the same axis whatever the labels are
        assert max(one.shuffled for one in (none, weak, strong)) < 0.8
    assert max(one.random for one in (none, weak, strong)) < 0.8


def test_rows_are_never_measured_by_a_direction_they_made() -> None:
    """Pure noise with as many dimensions as rows is told apart perfectly by a direction made from it."""
    generator = torch.Generator().manual_seed(5)
    rows, positive = torch.randn(40, 1, 400, generator=generator), torch.arange(40) < 20
    (honest,) = measure(rows, positive, None, strategy("mean_difference"), (0,), folds(positive, None))
    seen = torch.arange(40)
    (cheat,) = measure(rows, positive, None, strategy("mean_difference"), (0,), [(seen, seen)])
    assert cheat.auroc == 1
    assert honest.auroc < 0.75


def test_folds_hold_every_row_out_once_and_keep_pairs_together() -> None:
    _, positive, pairs = made((1.0,))
    for given in (pairs, None):
        splits = folds(positive, given)
        assert len(splits) == 4
        assert torch.cat([test for _, test in splits]).sort().values.tolist() == list(range(2 * N))
        for fit, test in splits:
            assert sorted([*fit.tolist(), *test.tolist()]) == list(range(2 * N))
            assert positive[test].any()
            assert not positive[test].all()
    for fit, test in folds(positive, pairs):
        assert not set(pairs[fit].tolist()) & set(pairs[test].tolist())


def test_few_examples_of_one_label_are_spread_over_all_folds() -> None:
    positive = torch.tensor([True] * 30 + [False] * 4)
    assert all((~positive[test]).sum() == 1 for _, test in folds(positive, None))
