"""What `lenses.fit` promises, on made-up rows: planted directions are found, nothing else is, bit for bit again."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from steerscope.lenses import fit as module
from steerscope.lenses.calibrate import measure, score
from steerscope.lenses.fit import TEST, TRAIN, VALIDATION, FitSettings, LabelledRows, Relations, fit, logits, normalise
from steerscope.specs.errors import InvalidRequest

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

# Two roots, two children each, and two leaves below each child; 0 and 1 are roots, 6–13 leaves with texts.
PARENTS = [[], [], [0], [0], [1], [1], [2], [2], [3], [3], [4], [4], [5], [5]]
LEAVES = range(6, 14)
HIDDEN = 32
QUICK = FitSettings(widths=(16, 8), epochs=12, steps=10, batch=32, learning_rate=5e-3, patience=4)
LINEAR = QUICK.model_copy(update={"widths": ()})


def relations() -> Relations:
    return Relations.of(PARENTS, [[8] if i == 6 else [] for i in range(len(PARENTS))])


def examples(strength: float = 4.0, seed: int = 0, rows_per_text: int = 3, label: str = "true") -> LabelledRows:
    """Twelve texts per leaf (6 train, 3 validation, 3 test); rows lie along directions of the leaf and its ancestors.

    `label`: "true", or "shuffled" over all texts.
    """
    generator = torch.Generator().manual_seed(seed)
    directions = functional.normalize(torch.randn(len(PARENTS), HIDDEN, generator=generator), dim=1)
    concept = torch.tensor([leaf for leaf in LEAVES for _ in range(12)])
    part = torch.tensor([TRAIN] * 6 + [VALIDATION] * 3 + [TEST] * 3).repeat(len(LEAVES))
    text = torch.arange(len(concept)).repeat_interleave(rows_per_text)
    shown = relations().positive.float().T  # [concepts, lenses]: all that a text of the concept shows
    own = torch.randn(len(concept), HIDDEN, generator=generator)[text] * 0.3  # what only this text has
    rows = shown[concept[text]] @ directions * strength + own + torch.randn(len(text), HIDDEN, generator=generator)
    if label == "shuffled":
        for each in (TRAIN, VALIDATION, TEST):
            index = (part == each).nonzero().flatten()
            concept[index] = concept[index[torch.randperm(len(index), generator=generator)]]
    return LabelledRows(rows, text, concept, part)


def aurocs(data: LabelledRows, settings: FitSettings = QUICK) -> Tensor:
    done = fit(data, relations(), settings, seed=1)
    rows, _ = score(done.weights, data, relations(), TEST)
    return torch.from_numpy(measure(rows, torch.zeros(len(PARENTS)).numpy()).auroc)


@pytest.mark.parametrize("settings", [QUICK, LINEAR], ids=["hidden layers", "linear"])
def test_planted_directions_are_found_at_every_level(settings: FitSettings) -> None:
    found = aurocs(examples(), settings)
    assert found.min() > 0.97, found


def test_shuffled_labels_lead_nowhere() -> None:
    found = torch.stack([aurocs(examples(seed=seed, label="shuffled")) for seed in range(2)])
    assert 0.4 < float(found.median()) < 0.6
    assert 0.42 < float(found.mean()) < 0.58


def test_labels_in_another_order_than_the_rows_are_noticed() -> None:
    """A misordered list of labels is the bug this guards against: the measures must fall, not stay high."""
    data = examples()
    misordered = LabelledRows(data.rows, data.text, data.concept.roll(48), data.part)  # of the other root
    done = fit(misordered, relations(), QUICK, seed=1)
    rows, _ = score(done.weights, data, relations(), TEST)
    leaves = measure(rows, torch.zeros(len(PARENTS)).numpy()).auroc[list(LEAVES)]
    assert sorted(leaves)[len(leaves) // 2] < 0.7, leaves
    assert leaves.mean() < 0.6, leaves


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    short = QUICK.model_copy(update={"epochs": 3})
    one, two, other = (fit(examples(), relations(), short, seed=seed).weights for seed in (3, 3, 4))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["w0"], other["w0"])


def test_weights_have_the_shapes_of_a_pack() -> None:
    weights = fit(examples(), relations(), QUICK.model_copy(update={"epochs": 1})).weights
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "w0": (14, 16, HIDDEN),
        "b0": (14, 16),
        "w1": (14, 8, 16),
        "b1": (14, 8),
        "w2": (14, 1, 8),
        "b2": (14, 1),
    }


def test_stacked_logits_are_those_of_each_lens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fit(examples(), relations(), QUICK.model_copy(update={"epochs": 1})).weights
    rows = normalise(torch.randn(37, HIDDEN, generator=torch.Generator().manual_seed(0)) * 5 + 1)
    expected = []
    for lens in range(14):
        hidden = rows
        for i in range(3):
            hidden = functional.linear(hidden.relu() if i else hidden, weights[f"w{i}"][lens], weights[f"b{i}"][lens])
        expected.append(hidden.squeeze(1))
    torch.testing.assert_close(logits(weights, rows), torch.stack(expected, 1))
    monkeypatch.setattr(module, "_WORKSPACE", 1000)  # many tiles
    torch.testing.assert_close(logits(weights, rows), torch.stack(expected, 1))


def test_rows_are_normalised_without_parameters() -> None:
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)) * 7 + 3
    expected = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(normalise(rows), expected)


# --- who is shown to whom


def test_ancestors_and_descendants_are_never_negatives() -> None:
    found = relations()
    family = {6: {0, 2, 6}, 2: {0, 2, 6, 7}, 0: {0, 2, 3, 6, 7, 8, 9}}
    for lens, members in family.items():
        assert set(range(14)) - set(found.negative[lens].nonzero().flatten().tolist()) == members
    shares = found.shares(QUICK, torch.ones(14, dtype=torch.bool))
    above_or_below = found.positive | found.positive.T
    assert float(shares[above_or_below].sum()) == 0
    torch.testing.assert_close(shares.sum(1), torch.ones(14))


def test_negatives_are_siblings_opposites_and_distant_ones_in_their_shares() -> None:
    found = relations()
    kinds = [set(mask[6].nonzero().flatten().tolist()) for mask in (found.siblings, found.opposites, found.distant)]
    assert kinds == [{7}, {8}, {1, 3, 4, 5, 9, 10, 11, 12, 13}]
    assert set(found.opposites[8].nonzero().flatten().tolist()) == {6}  # both ways
    settings = FitSettings(siblings=0.5, opposites=0.2)
    shares = found.shares(settings, torch.tensor([i in LEAVES for i in range(14)]))[6]
    assert float(shares[7]) == pytest.approx(0.5)
    assert float(shares[8]) == pytest.approx(0.2)
    assert float(shares[[9, 10, 11, 12, 13]].sum()) == pytest.approx(0.3)
    no_opposite = found.shares(settings, torch.tensor([i in LEAVES for i in range(14)]))[10]
    assert float(no_opposite[11]) == pytest.approx(0.5 / 0.8)


def test_a_second_parent_makes_no_enemies_of_either_family() -> None:
    found = Relations.of([[], [], [0], [1], [0, 1]])
    assert not found.negative[4, [0, 1]].any()
    assert not found.negative[[0, 1], 4].any()
    assert found.siblings[4].tolist() == [False, False, True, True, False]


def test_a_batch_holds_only_rows_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row carries its concept's number: what is drawn for a lens is looked up in the relations."""
    data = examples()
    numbered = LabelledRows(data.concept[data.text].float().unsqueeze(1), data.text, data.concept, data.part)
    monkeypatch.setattr(module, "normalise", lambda rows: rows)
    found, which = relations(), torch.arange(14)
    sampler = module._Sampler(numbered, found, QUICK, which)
    rows, truth = sampler.draw(which, torch.Generator().manual_seed(0))
    assert rows.shape == (14, 32, 1)
    for lens in range(14):
        for concept, true in zip(rows[lens, :, 0].long(), truth[lens].bool(), strict=True):
            assert (found.positive if true else found.negative)[lens, concept]
    assert truth.sum(1).tolist() == [16] * 14  # balanced


# --- stopping


def test_a_lens_that_stopped_changes_no_more_while_others_go_on() -> None:
    short, long = (
        fit(examples(strength=1.5), relations(), QUICK.model_copy(update={"epochs": epochs, "patience": 2}), seed=2)
        for epochs in (10, 40)
    )
    stopped = short.epoch <= 10 - 2  # no improvement in the last two epochs
    assert 0 < int(stopped.sum()) < 14
    for name in short.weights:
        assert torch.equal(short.weights[name][stopped], long.weights[name][stopped])
    assert torch.equal(short.epoch[stopped], long.epoch[stopped])
    assert (long.epoch[~stopped] > short.epoch[~stopped]).any()


def test_the_kept_weights_are_those_of_the_best_epoch() -> None:
    """The recorded loss is what the returned weights have on the validation rows, and longer training is no worse."""
    data, found = examples(strength=1.5), relations()
    settings = QUICK.model_copy(update={"epochs": 25, "patience": 25})
    done = fit(data, found, settings, seed=2)
    which = torch.arange(14)
    again = module._Judge(data, found, settings, which).losses(done.weights, which)
    torch.testing.assert_close(again, done.loss)
    first = fit(data, found, settings.model_copy(update={"epochs": 5}), seed=2)
    assert (done.loss <= first.loss).all()
    assert (done.epoch < 25).any()


def test_progress_tells_how_many_still_train() -> None:
    told: list[tuple[int, int]] = []
    fit(examples(), relations(), QUICK, seed=1, progress=lambda epoch, left: told.append((epoch, left)))
    assert [epoch for epoch, _ in told] == list(range(1, len(told) + 1))
    left = [count for _, count in told]
    assert left == sorted(left, reverse=True)


# --- refusals


def test_lenses_without_rows_are_all_named() -> None:
    data = examples()
    kept = data.part.clone()
    kept[data.concept == 9] = TEST
    with pytest.raises(InvalidRequest) as refused:
        fit(LabelledRows(data.rows, data.text, data.concept, kept), relations(), QUICK)
    assert [problem.field for problem in refused.value.problems] == ["lens 9"]
    assert "training" in str(refused.value)


def test_rows_and_labels_that_do_not_fit_are_refused() -> None:
    data = examples()
    with pytest.raises(InvalidRequest) as refused:
        LabelledRows(data.rows[1:], data.text, data.concept[1:], data.part)
    assert len(refused.value.problems) == 2
