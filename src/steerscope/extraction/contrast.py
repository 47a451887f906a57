"""Mean difference: the average row of sentences that show a trait minus that of sentences that show its opposite.

A sentence is represented by the mean of its last few tokens, which have seen all of it; the engine reduces them while
it runs, so one batched pass over all sentences leaves one float32 row per sentence and layer. `row_norms` tells how
long rows are at each layer, so that a steering scale can be written as a part of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.engines.facade import SyncEngine
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import LayersLike, parse_layers
from steerscope.vectors.vector import SteeringVector

_READ_ONLY = Sampling(max_tokens=1)  # p prompt tokens and 1 generated one: p rows, all of them of the prompt


@dataclass(frozen=True, slots=True)
class ContrastPair:
    """Two sentences that differ in the trait and as little else as possible."""

    positive: str
    negative: str

    def __post_init__(self) -> None:
        empty = [name for name in ("positive", "negative") if not getattr(self, name).strip()]
        problems = [Problem(name, "the sentence is empty", "write one") for name in empty]
        if not empty and self.positive == self.negative:
            problems.append(Problem("negative", f"both sentences are {self.positive!r}", "they must differ"))
        if problems:
            raise InvalidRequest(problems)


@dataclass(frozen=True, slots=True)
class ContrastSet:
    """Pairs for making a vector, and pairs kept apart for testing it; `positive` and `negative` name the two sides."""

    name: str
    positive: str
    negative: str
    extraction: tuple[ContrastPair, ...]
    heldout: tuple[ContrastPair, ...]


def load_contrast_set(name: str = "happy_sad") -> ContrastSet:
    """A set that ships with steerscope."""
    folder = resources.files("steerscope.extraction") / "data"
    known = sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))
    if name not in known:
        raise InvalidRequest([Problem("name", f"there is no contrast set {name!r}", f"choose from {', '.join(known)}")])
    data = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    extraction, heldout = (tuple(ContrastPair(**pair) for pair in data[part]) for part in ("extraction", "heldout"))
    return ContrastSet(name, data["positive"], data["negative"], extraction, heldout)


def sentences(pairs: Sequence[ContrastPair]) -> list[str]:
    """All positive sentences, then all negative ones."""
    return [pair.positive for pair in pairs] + [pair.negative for pair in pairs]


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
    positive, negative = rows[: len(pairs)].mean(0), rows[len(pairs) :].mean(0)
    return SteeringVector(
        dict(zip(_numbers(engine, layers), positive - negative, strict=True)),
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
    """[texts, layers, hidden]: the mean of each text's last tokens, from one batched pass."""
    if last_tokens < 1:
        raise InvalidRequest([Problem("last_tokens", f"is {last_tokens}", "choose 1 or more")])
    tokens = f"positions=[-{last_tokens}:]"
    rows = _read(engine, texts, Capture.parse({"layers": layers, "tokens": tokens, "reduce": "mean"}))
    problems = [
        Problem(f"texts[{i}]", f"{texts[i]!r} has {row.n} tokens", f"it needs {last_tokens}, or lower last_tokens")
        for i, row in enumerate(rows)
        if row.n < last_tokens
    ]
    if problems:
        raise InvalidRequest(problems)
    return torch.stack([torch.stack([row[layer] for layer in row.layers]) for row in rows])


def row_norms(engine: SyncEngine, texts: Sequence[str], *, layers: LayersLike = "all") -> dict[int, float]:
    """Mean length of the rows at each layer. First tokens are left out: models use them as attention sinks, and in
    SmolLM2 their rows are 150 times as long as all others."""
    rows = _read(engine, texts, Capture.parse({"layers": layers, "tokens": "positions=[1:]"}))
    return {
        layer: float(torch.cat([row[layer] for row in rows]).float().norm(dim=-1).mean())
        for layer in _numbers(engine, layers)
    }


def _read(engine: SyncEngine, texts: Sequence[str], capture: Capture) -> list[Rows]:
    if isinstance(texts, str) or not texts:
        raise InvalidRequest([Problem("texts", "no list of texts was given", "give at least one, in a list")])
    done = engine.generate(list(texts), _READ_ONLY, capture=capture)
    rows = [generation.rows for generation in done]
    for generation in done:
        if generation.capture:
            generation.capture.close()  # gives the room back at once; the fetched rows are ours
    return rows


def _numbers(engine: SyncEngine, layers: LayersLike) -> tuple[int, ...]:
    wanted = parse_layers(layers)
    return tuple(range(engine.facts.layers)) if wanted == "all" else wanted
