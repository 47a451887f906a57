"""Calibration of fitted lenses on validation rows, and measures on test rows.

Calibration puts lenses on one scale: the mean score on texts of other concepts becomes 1/2, that on texts of the
lens's own concept becomes 1. `confidence` is how well the lens separates them, and nearly all unrelated rows score
below `floor`. Measures are per row (as in readings) and per text (the mean logit of its rows).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score
from torch import Tensor

from steerscope.lenses.fit import LabelledRows, Relations, logits, normalise

FLOOR_QUANTILE = 0.99  # one unrelated row in a hundred is above the noise floor
_GAP = 1e-6  # low < high must hold even for a lens that has learnt nothing


@dataclass(frozen=True, slots=True)
class LabelledLogits:
    """Logits of rows or texts, and what each row or text is to each lens."""

    logits: Tensor  # [n, lenses]
    positive: Tensor  # bool [n, lenses]
    negative: Tensor  # bool [n, lenses]; texts of ancestors are neither
    unrelated: Tensor  # bool [n, lenses]: negatives except siblings and opposites


@dataclass(frozen=True, slots=True)
class Measures:
    """One number per lens; NaN without positives or negatives. F1 is at a given threshold."""

    auroc: np.ndarray
    ap: np.ndarray
    f1: np.ndarray

    def of(self, lens: int) -> dict[str, float]:
        found = {"auroc": self.auroc[lens], "ap": self.ap[lens], "f1": self.f1[lens]}
        return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def score(
    weights: Mapping[str, Tensor], examples: LabelledRows, relations: Relations, part: int
) -> tuple[LabelledLogits, LabelledLogits]:
    """Return the logits per row and per text (the mean of its rows), for the texts of one part."""
    chosen = (examples.part[examples.text] == part).nonzero().flatten()
    found = logits(weights, normalise(examples.rows[chosen])).cpu()
    texts, place = examples.text[chosen].cpu().unique(return_inverse=True)
    total = torch.zeros(len(texts), found.shape[1]).index_add_(0, place, found)
    means = total / place.bincount(minlength=len(texts)).unsqueeze(1)
    concept = examples.concept.cpu()[texts]
    return _scored(found, concept[place], relations), _scored(means, concept, relations)


def _scored(found: Tensor, concept: Tensor, relations: Relations) -> LabelledLogits:
    kinds = relations.positive, relations.negative, relations.distant
    return LabelledLogits(found, *(kind[:, concept].T.contiguous() for kind in kinds))


def measure(scored: LabelledLogits, thresholds: np.ndarray) -> Measures:
    """Return AUROC, average precision, and F1 with logits at or above the threshold as positive."""
    lenses = scored.logits.shape[1]
    result = np.full((3, lenses), np.nan)
    for lens in range(lenses):
        value, truth = _both(scored, lens)
        if truth.any() and not truth.all():
            said = value >= thresholds[lens]
            f1 = 2 * (said & truth).sum() / max(1, said.sum() + truth.sum())
            result[:, lens] = roc_auc_score(truth, value), average_precision_score(truth, value), f1
    return Measures(*result)


def best_thresholds(scored: LabelledLogits) -> np.ndarray:
    """Return the logit with the best F1 per lens. Choose it on validation rows, use it on test rows."""
    result = np.zeros(scored.logits.shape[1])
    for lens in range(len(result)):
        value, truth = _both(scored, lens)
        if truth.any():
            precision, recall, threshold = precision_recall_curve(truth, value)
            f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
            result[lens] = threshold[int(f1[:-1].argmax())]
    return result


def _both(scored: LabelledLogits, lens: int) -> tuple[np.ndarray, np.ndarray]:
    used = scored.positive[:, lens] | scored.negative[:, lens]
    return scored.logits[used, lens].numpy(), scored.positive[used, lens].numpy()


def calibrate(scored: LabelledLogits, quantile: float = FLOOR_QUANTILE) -> dict[str, Tensor]:
    """Return `low`, `high`, `confidence` and `floor` of a pack, from validation rows."""
    scores = scored.logits.sigmoid()
    low, high = ((scores * mask).sum(0) / mask.sum(0).clamp_min(1) for mask in (scored.negative, scored.positive))
    auroc = measure(scored, np.zeros(scores.shape[1])).auroc
    confidence = torch.from_numpy(np.nan_to_num(2 * auroc - 1).clip(0, 1)).float()
    floor = [_quantile(scores[:, lens], scored, lens, quantile) for lens in range(scores.shape[1])]
    return {
        "low": low.clamp_max(1 - 2 * _GAP),
        "high": torch.maximum(high, low.clamp_max(1 - 2 * _GAP) + _GAP),
        "confidence": torch.where(high > low, confidence, 0.0),
        "floor": torch.tensor(floor),
    }


def _quantile(scores: Tensor, scored: LabelledLogits, lens: int, quantile: float) -> float:
    """Return the quantile of unrelated rows or, if there are none, of all negatives."""
    unrelated = scored.unrelated[:, lens]
    values = scores[unrelated if unrelated.any() else scored.negative[:, lens]]
    return float(np.quantile(values.numpy(), quantile)) if len(values) else 0.0
