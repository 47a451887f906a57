"""What a fitted lens's scores mean: calibration from validation rows, and measures on rows nobody has trained on.

Calibration puts lenses on one scale: a score as high as on texts of other concepts becomes 1/2, one as high as on its
own becomes 1. `confidence` says how well the lens told them apart, and `floor` is what nearly all unrelated text stays
below. Measures are taken per row (what a reading is made of) and per text (the mean logit of its rows).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score
from torch import Tensor

from steerscope.lenses.fit import LabelledRows, Relations, logits, normalise

FLOOR_QUANTILE = 0.99  # one unrelated row in a hundred lies above the noise floor
_GAP = 1e-6  # low < high must hold, also for a lens that has learnt nothing


@dataclass(frozen=True, slots=True)
class LabelledLogits:
    """Logits of some rows or texts, and what each of them is to each lens."""

    logits: Tensor  # [n, lenses]
    positive: Tensor  # bool [n, lenses]
    negative: Tensor  # bool [n, lenses]; texts of ancestors and of parts of the concept are neither
    unrelated: Tensor  # bool [n, lenses]: negatives that are no siblings or opposites


@dataclass(frozen=True, slots=True)
class Measures:
    """One number per lens; NaN where one side is missing. F1 is at a threshold that was chosen elsewhere."""

    auroc: np.ndarray
    ap: np.ndarray
    f1: np.ndarray

    def of(self, lens: int) -> dict[str, float]:
        found = {"auroc": self.auroc[lens], "ap": self.ap[lens], "f1": self.f1[lens]}
        return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def score(
    weights: Mapping[str, Tensor], examples: LabelledRows, relations: Relations, part: int
) -> tuple[LabelledLogits, LabelledLogits]:
    """Per row and per text, for the texts of one part."""
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
    """AUROC, average precision, and F1 where a logit at or above the threshold says yes."""
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
    """The logit with the best F1, per lens. Take it from validation rows and use it on test rows."""
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
    """`low`, `high`, `confidence` and `floor` of a pack, from validation rows."""
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
    """Of unrelated rows; where there are none, of all negatives."""
    unrelated = scored.unrelated[:, lens]
    values = scores[unrelated if unrelated.any() else scored.negative[:, lens]]
    return float(np.quantile(values.numpy(), quantile)) if len(values) else 0.0
