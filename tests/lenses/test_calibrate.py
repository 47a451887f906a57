"""What `lenses.calibrate` promises: measures of the textbook, and scores of all lenses on one scale."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score

from steerscope.lenses import Calibration
from steerscope.lenses.calibrate import LabelledLogits, best_thresholds, calibrate, measure, score
from steerscope.lenses.fit import TEST, VALIDATION, LabelledRows, Relations, logits, normalise


def scored(gap: float = 2.0, n: int = 400, seed: int = 0) -> LabelledLogits:
    """Three lenses; a third of the rows is positive, a third negative and distant, a sixth a sibling, the rest neither.

    The second lens sees nothing, the third everything the wrong way round.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = torch.arange(n) % 6
    positive = (kind < 2).unsqueeze(1).expand(n, 3)
    unrelated = ((kind == 2) | (kind == 3)).unsqueeze(1).expand(n, 3)
    sibling = (kind == 4).unsqueeze(1).expand(n, 3)
    values = torch.randn(n, 3, generator=generator) + gap * positive * torch.tensor([1.0, 0.0, -1.0])
    values[kind == 5] = 99.0  # texts of an ancestor: counting them would show
    return LabelledLogits(values, positive, unrelated | sibling, unrelated)


def test_measures_are_those_of_the_textbook_and_leave_out_what_is_neither() -> None:
    found = scored()
    used = found.positive[:, 0] | found.negative[:, 0]
    truth = found.positive[used, 0].numpy()
    thresholds = np.array([0.7, 0.7, 0.7])
    measures = measure(found, thresholds)
    for lens in range(3):
        value = found.logits[used, lens].numpy()
        assert measures.auroc[lens] == pytest.approx(roc_auc_score(truth, value))
        assert measures.f1[lens] == pytest.approx(f1_score(truth, value >= 0.7))
    assert measures.auroc[0] > 0.9
    assert abs(measures.auroc[1] - 0.5) < 0.06
    assert measures.auroc[2] < 0.1


def test_the_threshold_is_the_best_there_is_and_is_used_on_other_rows() -> None:
    judged, tested = scored(seed=1), scored(seed=2)
    chosen = best_thresholds(judged)
    best = measure(judged, chosen).f1[0]
    assert all(measure(judged, chosen + shift).f1[0] <= best for shift in np.linspace(-2, 2, 41))
    assert measure(tested, chosen).f1[0] == pytest.approx(best, abs=0.08)


def test_a_lens_without_positives_has_no_measures() -> None:
    found = scored()
    nothing = LabelledLogits(found.logits, torch.zeros_like(found.positive), found.negative, found.unrelated)
    measures = measure(nothing, np.zeros(3))
    assert np.isnan(measures.auroc).all()
    assert measures.of(0) == {}


def test_calibration_is_the_mean_on_others_and_on_itself() -> None:
    found = scored()
    made = calibrate(found)
    scores = found.logits.sigmoid()
    assert float(made["low"][0]) == pytest.approx(float(scores[found.negative[:, 0], 0].mean()), abs=1e-5)
    assert float(made["high"][0]) == pytest.approx(float(scores[found.positive[:, 0], 0].mean()), abs=1e-5)
    applied = Calibration(made["low"], made["high"], torch.ones(3)).apply(torch.stack([made["low"], made["high"]]))
    torch.testing.assert_close(applied[:, 0], torch.tensor([0.5, 1.0]))


def test_confidence_is_high_for_a_lens_that_sees_and_zero_for_one_that_is_wrong() -> None:
    confidence = calibrate(scored())["confidence"].tolist()
    assert confidence[0] > 0.8
    assert confidence[1] < 0.1
    assert confidence[2] == 0.0


def test_a_wrong_lens_still_makes_a_valid_calibration() -> None:
    for gap in (2.0, 40.0):  # at 40, scores are 0 and 1 to rounding
        made = calibrate(scored(gap=gap))
        assert (made["low"] >= 0).all()
        assert (made["high"] > made["low"]).all()
        assert all(torch.isfinite(tensor).all() and tensor.dtype == torch.float32 for tensor in made.values())


def test_the_noise_floor_lies_above_nearly_all_unrelated_rows() -> None:
    found = scored(n=6000)
    for quantile in (0.9, 0.99):
        floor = calibrate(found, quantile)["floor"]
        below = (found.logits.sigmoid()[found.unrelated[:, 0]] <= floor).float().mean(0)
        torch.testing.assert_close(below, torch.full((3,), quantile), atol=0.002, rtol=0)


def test_a_text_counts_by_the_mean_logit_of_its_rows_and_only_its_own_part_is_scored() -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([3, 1, 1, 0, 3, 2, 3])
    part = torch.tensor([TEST, TEST, VALIDATION, TEST])
    data = LabelledRows(torch.randn(7, 8, generator=generator), text, torch.tensor([1, 2, 2, 2]), part)
    relations = Relations.of([[], [0], [0]])
    weights = {"w0": torch.randn(3, 1, 8, generator=generator), "b0": torch.randn(3, 1, generator=generator)}
    rows, texts = score(weights, data, relations, TEST)
    all_logits = logits(weights, normalise(data.rows))
    torch.testing.assert_close(rows.logits, all_logits[text != 2])
    means = torch.stack([all_logits[text == t].mean(0) for t in (0, 1, 3)])
    torch.testing.assert_close(texts.logits, means)
    assert texts.positive.tolist() == [[True, True, False], [True, False, True], [True, False, True]]
    assert texts.negative.tolist() == [[False, False, True], [False, True, False], [False, True, False]]
