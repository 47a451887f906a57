"""Contrast data to a steering vector, with its quality at every layer and a layer and scale to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.contrast import row_norms
from steerscope.extraction.data import Examples
from steerscope.extraction.jsonl import parse_all
from steerscope.extraction.quality import LayerQuality, folds, heldout_split, measure
from steerscope.extraction.reading import layer_numbers, parse_choice, read_rows
from steerscope.extraction.strategies import strategy as strategy_of
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import LayersLike, Site
from steerscope.vectors.vector import SteeringVector

NEAR_BEST = 0.01  # of AUROC
PART_OF_NORM = 0.25
_NORM_TEXTS = 32  # enough to measure how long rows are


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
    """Make a vector in one pass over the examples. Quality is measured on `heldout`, or over folds without it.

    Layer and scale are chosen from `examples` alone, over folds: the layer with the largest effect among those whose
    AUROC is near the best, and a scale that adds a quarter of a mean row's length there.

    ```python
    import steerscope as ss
    from steerscope.extraction import Examples, extract, load_contrast_set

    with ss.load("smollm2-135m") as model:
        found = extract(model, Examples.of_pairs(load_contrast_set("happy_sad").extraction))
        print(found.layer, found.scale)
        push = found.vector.add(found.scale, layers=found.layer)
        print(model.generate("The weather today is", ss.Sampling(max_tokens=10), steer=push).text)
    ```
    """
    run, choice, numbers = strategy_of(strategy), parse_choice(tokens), layer_numbers(engine, layers)

    def read(part: Examples) -> Tensor:
        return read_rows(engine, part.texts, choice, layers=layers, site=site, name=part.name)

    # Each part is read by itself, so that held-out texts cannot change the rows of the examples.
    rows = parse_all([("", examples)] + ([("heldout", heldout)] if heldout else []), read)
    positive = torch.tensor(examples.positive)
    pairs = None if examples.pairs is None else torch.tensor(examples.pairs)
    made = run(rows[0], positive, pairs)
    quality = measure(rows[0], positive, pairs, run, numbers, folds(positive, pairs))
    best = recommended(quality)
    if heldout:
        labels = torch.tensor([*examples.positive, *heldout.positive])
        splits = heldout_split(len(examples), len(heldout))
        quality = measure(torch.cat(rows), labels, pairs, run, numbers, splits)
    at = numbers.index(best.layer)
    scale = _scale(engine, examples, made[at], best.layer, site)
    vector = SteeringVector(
        dict(zip(numbers, made, strict=True)),
        model=engine.facts.name,
        site=site,
        method=strategy,
        provenance={
            "name": name or strategy,
            "data": name,
            "examples": len(examples),
            "tokens": tokens,
            "recommended": {"layer": best.layer, "scale": scale, "auroc": quality[at].auroc},
        },
    )
    return Extraction(vector, quality, best.layer, scale)


def _scale(engine: SyncEngine, examples: Examples, direction: Tensor, layer: int, site: Site) -> float:
    """Return the scale at which a direction adds a part of a mean row's length."""
    length = float(direction.norm())
    if not length:
        what = f"the direction at layer {layer} is zero"
        raise InvalidRequest([Problem("examples", what, "the chosen tokens must differ between the two sides")])
    norms = row_norms(engine, examples.texts[:_NORM_TEXTS], layers=layer, site=site)
    return PART_OF_NORM * norms[layer] / length


def recommended(quality: Sequence[LayerQuality]) -> LayerQuality:
    """Of the layers near the best AUROC the one with the largest effect."""
    most = max(one.auroc for one in quality)
    return max((one for one in quality if one.auroc >= most - NEAR_BEST), key=lambda one: one.effect)
