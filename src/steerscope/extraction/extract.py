"""Contrast data to a steering vector, with its quality at every layer and a layer and scale to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.engines.facade import SyncEngine
from steerscope.extraction.contrast import row_norms
from steerscope.extraction.data import Examples
from steerscope.extraction.quality import LayerQuality, folds, heldout_split, measure
from steerscope.extraction.reading import layer_numbers, parse_choice, read_rows
from steerscope.extraction.strategies import strategy as strategy_of
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import LayersLike, Site
from steerscope.vectors.vector import Json, SteeringVector

NEAR_BEST = 0.01  # of AUROC
PART_OF_NORM = 0.25
_NORM_TEXTS = 32  # are enough to tell how long rows are


@dataclass(frozen=True, slots=True)
class Extraction:
    """`vector.add(scale, layers=layer)` is the recommended steering, and −scale its opposite."""

    vector: SteeringVector
    quality: tuple[LayerQuality, ...]
    layer: int
    scale: float


def extract(
    engine: SyncEngine,
    examples: Examples,
    *,
    heldout: Examples | None = None,
    strategy: str = "mean_difference",
    tokens: str = "last=3",
    layers: LayersLike = "all",
    site: Site = "resid_post",
    name: str | None = None,
) -> Extraction:
    """One pass over all examples and layers. Quality is measured on `heldout`, or over folds where there is none.

    Recommended is, of the layers whose AUROC is near the best (with few examples many reach it), that with the largest
    effect, and a scale that adds a quarter of a mean row's length there; docs/vectors.md tells what that does.
    """
    run, choice, numbers = strategy_of(strategy), parse_choice(tokens), layer_numbers(engine, layers)
    texts = [*examples.texts, *(heldout.texts if heldout else ())]
    rows = read_rows(engine, texts, choice, layers=layers, site=site)
    positive = torch.tensor([*examples.positive, *(heldout.positive if heldout else ())])
    pairs = _pairs(examples, len(texts))
    n = len(examples)
    made = run(rows[:n], positive[:n], None if pairs is None else pairs[:n])
    splits = heldout_split(n, len(texts) - n) if heldout else folds(positive, pairs)
    quality = measure(rows, positive, pairs, run, numbers, splits)
    best = recommended(quality)
    length = float(made[numbers.index(best.layer)].norm())
    if not length:
        what = f"the direction at layer {best.layer} is zero"
        raise InvalidRequest([Problem("examples", what, "the chosen tokens must differ between the two sides")])
    scale = PART_OF_NORM * row_norms(engine, texts[:_NORM_TEXTS], layers=best.layer, site=site)[best.layer] / length
    found: dict[str, Json] = {"layer": best.layer, "scale": scale, "auroc": best.auroc}
    origin: dict[str, Json] = {"name": name or strategy, "data": name, "examples": n, "tokens": tokens}
    vector = SteeringVector(
        dict(zip(numbers, made, strict=True)),
        model=engine.facts.name,
        site=site,
        method=strategy,
        provenance={**origin, "recommended": found},
    )
    return Extraction(vector, quality, best.layer, scale)


def recommended(quality: Sequence[LayerQuality]) -> LayerQuality:
    """Of the layers near the best AUROC the one with the largest effect."""
    most = max(one.auroc for one in quality)
    return max((one for one in quality if one.auroc >= most - NEAR_BEST), key=lambda one: one.effect)


def _pairs(examples: Examples, total: int) -> Tensor | None:
    """Numbers of pairs; examples that only measure get numbers of their own, which no strategy sees."""
    if examples.pairs is None:
        return None
    return torch.tensor([*examples.pairs, *range(total, 2 * total - len(examples))])
