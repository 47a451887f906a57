"""Quality is measured on rows that made no part of the direction, beside what chance gives."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from steerscope.extraction.quality import folds, heldout_split, measure
from steerscope.extraction.strategies import STRATEGIES, strategy

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

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
    """Pure noise with as many dimensions as rows is separated perfectly by a direction made from it."""
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
    assert [int((~positive[test]).sum()) for _, test in folds(positive, None)] == [2, 2]


@pytest.mark.parametrize(("count", "parts"), [(4, 2), (5, 2), (6, 3), (7, 3), (8, 4), (9, 4)])
def test_every_part_that_is_measured_has_two_of_either_label(count: int, parts: int) -> None:
    positive, pairs = torch.arange(2 * count) < count, torch.arange(count).repeat(2)
    for given in (pairs, None):
        splits = folds(positive, given)
        assert len(splits) == parts
        assert all(positive[test].sum() >= 2 <= (~positive[test]).sum() for _, test in splits)


@pytest.mark.parametrize("count", [4, 6])
def test_the_effect_of_few_pairs_is_about_that_of_many(count: int) -> None:
    rows, positive, pairs = made((4.0,))
    (many,) = measure(rows, positive, pairs, strategy("mean_difference"), (0,), folds(positive, pairs))
    few = pairs < count
    rows, positive, pairs = rows[few], positive[few], pairs[few]
    (found,) = measure(rows, positive, pairs, strategy("mean_difference"), (0,), folds(positive, pairs))
    assert many.effect / 4 < found.effect < many.effect * 4


def test_sides_that_do_not_vary_have_no_effect_size() -> None:
    positive = torch.arange(12) < 6
    rows = torch.where(positive[:, None, None], torch.full((8,), 0.1), torch.full((8,), 0.3))
    (found,) = measure(rows, positive, None, strategy("mean_difference"), (0,), folds(positive, None))
    assert (found.auroc, found.effect) == (1, 0)


@pytest.mark.parametrize("paired", [True, False])
def test_nothing_of_a_trait_is_left_in_shuffled_labels_of_an_odd_number(paired: bool) -> None:
    """Without noise, any part of the trait that is left would tell the sides apart perfectly."""
    generator = torch.Generator().manual_seed(2)
    positive, pairs = torch.arange(30) < 15, torch.arange(15).repeat(2)
    common = 0.01 * torch.randn(15, 1, 32, generator=generator).repeat(2, 1, 1)
    rows = common + torch.where(positive, 1.0, -1.0)[:, None, None] * torch.ones(32)
    seen: list[torch.Tensor] = []

    def keeping(rows: torch.Tensor, positive: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
        seen.append(strategy("mean_difference")(rows, positive, pairs))
        return seen[-1]

    fit = torch.cat([torch.arange(0, 13), torch.arange(15, 28)])
    test = torch.tensor([13, 14, 28, 29])
    measure(rows, positive, pairs if paired else None, keeping, (0,), [(fit, test)])
    real, shuffled = seen[0], seen[3:]
    assert len(shuffled) == 5
    for one in shuffled:
        assert float((one * real).sum() / real.square().sum()) == pytest.approx(0, abs=0.01)
