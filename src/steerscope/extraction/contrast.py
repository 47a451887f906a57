"""The shortest way from sentences to a vector: the mean difference of pairs, each sentence read at its last tokens.

`extract` has every strategy, token choice and measure. `row_norms` returns how long rows are at each layer, so that a
steering scale can be written as a part of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from steerscope.engines.sync import SyncEngine
from steerscope.extraction import strategies
from steerscope.extraction.data import ContrastPair, Text, sentences
from steerscope.extraction.reading import as_prompt, captured, checked_texts, last, layer_numbers, read_rows
from steerscope.specs import Capture, InvalidRequest, Problem
from steerscope.specs.steering import LayersLike, Site
from steerscope.vectors.vector import SteeringVector


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
    direction = strategies.mean_difference(rows, torch.arange(len(rows)) < len(pairs), None)
    return SteeringVector(
        dict(zip(layer_numbers(engine, layers), direction, strict=True)),
        model=engine.facts.name,
        method="mean_difference",
        provenance={
            "name": data_name or "mean_difference",
            "data": data_name,
            "pairs": len(pairs),
            "tokens": f"mean of the last {last_tokens}",
            "template": "none (plain text)",
        },
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
