"""Contrast data to a steering vector.

`extract` has every strategy, token choice and measure, and recommends a layer and a scale. `mean_difference` is the
shortest way: the mean difference of pairs, each sentence read at its last tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.data import ContrastPair, Examples, Text, parse_all, sentences
from steerscope.extraction.quality import LayerQuality, folds, heldout_split, measure
from steerscope.extraction.reading import (
    as_prompt,
    captured,
    checked_texts,
    last,
    layer_numbers,
    parse_choice,
    read_rows,
)
from steerscope.extraction.strategies import mean_difference as gap_of_means
from steerscope.extraction.strategies import strategy as strategy_of
from steerscope.specs import Capture, InvalidRequest, Problem
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
    run = strategy_of(strategy)
    choice = parse_choice(tokens)
    numbers = layer_numbers(engine, layers)

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
    about = {"name": name or strategy, "data": name, "examples": len(examples), "tokens": tokens}
    vector = SteeringVector(
        dict(zip(numbers, made, strict=True)),
        model=engine.facts.name,
        site=site,
        method=strategy,
        provenance={**about, "recommended": {"layer": best.layer, "scale": scale, "auroc": quality[at].auroc}},
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


def mean_difference(
    engine: SyncEngine,
    pairs: Sequence[ContrastPair],
    *,
    layers: LayersLike = "all",
    last_tokens: int = 3,
    data_name: str | None = None,
) -> SteeringVector:
    """Mean of the positive rows minus mean of the negative rows at every layer, float32, with its own length."""
    if not pairs:
        raise InvalidRequest([Problem("pairs", "there are none", "give at least one ContrastPair")])
    rows = sentence_rows(engine, sentences(pairs), layers=layers, last_tokens=last_tokens)
    direction = gap_of_means(rows, torch.arange(len(rows)) < len(pairs), None)
    about = {"name": data_name or "mean_difference", "data": data_name, "pairs": len(pairs)}
    return SteeringVector(
        dict(zip(layer_numbers(engine, layers), direction, strict=True)),
        model=engine.facts.name,
        method="mean_difference",
        provenance={**about, "tokens": f"mean of the last {last_tokens}", "template": "none (plain text)"},
    )


def sentence_rows(
    engine: SyncEngine, texts: Sequence[str], *, layers: LayersLike = "all", last_tokens: int = 3
) -> Tensor:
    """Return the mean of each text's last tokens, [texts, layers, hidden], from one batched pass."""
    return read_rows(engine, texts, last(last_tokens), layers=layers)


def row_norms(
    engine: SyncEngine, texts: Sequence[Text], *, layers: LayersLike = "all", site: Site = "resid_post"
) -> dict[int, float]:
    """Return the mean length of the rows at each layer, without first tokens (attention sinks) if there are others."""
    prompts = [as_prompt(engine, text) for text in checked_texts(texts)]
    longer = [prompt for prompt in prompts if len(prompt.token_ids) > 1]
    tokens = "positions=[1:]" if longer else "positions=[0:]"
    rows = captured(engine, longer or prompts, Capture.parse({"layers": layers, "sites": site, "tokens": tokens}))
    return {
        layer: float(torch.cat([row[layer] for row in rows]).float().norm(dim=-1).mean())
        for layer in layer_numbers(engine, layers)
    }
