"""Measurements of the demo: the vector with its units, what steering does to answers and next words, and lenses.

The statistics come from `TEST_PROMPTS`, on which nothing was chosen.
"""

import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from steerscope.demo.results import Control, Lenses, TokenMap
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.settings import logits
from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.evals.forced import forced
from steerscope.extraction import ContrastSet, mean_difference, row_norms, sentence_rows, sentences
from steerscope.lenses import Pack
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Steering
from steerscope.specs.watch import Watch
from steerscope.training.concepts import load_concepts
from steerscope.training.lenses import LensSettings, fit_pack
from steerscope.vectors.vector import SteeringVector

CONCEPTS = ("feelings", "weather", "food")  # of the lenses, with all below them
LEADING = ("pleasant", "unpleasant")
LENS_DEPTH = 8 / 15  # of the layer that is read, where lenses separate concepts best
MOST_CONCEPTS = 8  # of a map, besides the two that lead
RANDOM_DIRECTIONS = 8
TEST_PROMPTS = [
    "After the long walk home he felt",
    "Looking back at the past month, I am",
    "When the train finally arrived, the passengers were",
    "My neighbour told me that she has been feeling",
    "The news from the village made everyone",
    "At the end of the school year the teacher was",
    "Sitting by the window, the old man felt",
    "To be honest, today I feel",
]
# fmt: off
POSITIVE_WORDS = [
    "happy", "glad", "joyful", "cheerful", "delighted", "excited", "grateful", "proud", "wonderful", "great"
]
NEGATIVE_WORDS = [
    "sad", "sorry", "miserable", "gloomy", "devastated", "lonely", "afraid", "ashamed", "terrible", "awful"
]
# fmt: on


@dataclass(frozen=True, slots=True)
class Subject:
    """The model, the vector, and the units of all measurements."""

    engine: SyncEngine
    data: ContrastSet
    unit: SteeringVector  # length 1 at each layer
    push: SteeringVector  # `push.add(1)` adds one mean row norm in all, in equal parts at the steered layers
    norms: dict[int, float]  # mean row norm per layer
    middle: dict[int, float]  # the projection midway between the two classes, per layer
    extraction: Tensor  # [positive then negative sentences, layers, hidden]
    heldout: Tensor

    @property
    def steered(self) -> tuple[int, ...]:
        return self.push.layers or ()

    @property
    def read_layer(self) -> int:
        """Return the last steered layer, where all additions have happened."""
        return self.steered[-1]

    @property
    def hf(self) -> HFEngine:
        if not isinstance(self.engine.aio, HFEngine):
            raise SteerscopeError("perplexity needs the weights in this process: load the model with the hf engine")
        return self.engine.aio

    def texts(self, token_ids: Iterable[int]) -> list[str]:
        return [str(self.hf.tokenizer.decode([token])) for token in token_ids]

    def place(self, rows: Tensor, layer: int) -> Tensor:
        """Return the place of rows between negative (below 0) and positive (above 0), in mean row norms."""
        return (self.unit.projection(rows, layer) - self.middle[layer]) / self.norms[layer]


def set_up(engine: SyncEngine, data: ContrastSet) -> Subject:
    """Make the vector. It is added from a third to half of the depth, which did best on the sweep prompts."""
    vector = mean_difference(engine, data.extraction, data_name=data.name)
    norms = row_norms(engine, sentences(data.extraction))
    rows = sentence_rows(engine, sentences(data.extraction) + sentences(data.heldout))
    extraction, heldout = rows.split([2 * len(data.extraction), 2 * len(data.heldout)])
    unit = vector.normalised()
    middle = {layer: float(unit.projection(extraction[:, layer], layer).mean()) for layer in norms}
    steered = range(engine.facts.layers // 3, engine.facts.layers // 2 + 1)
    push = SteeringVector({layer: unit[layer] * norms[layer] / len(steered) for layer in steered}, model=vector.model)
    return Subject(engine, data, unit, push, norms, middle, extraction, heldout)


def heldout_auroc(subject: Subject) -> float:
    """Return the AUROC of the projection on held-out positive and negative sentences, at the read layer."""
    n = len(subject.data.heldout)
    rows = subject.heldout[:, subject.read_layer]
    return float(roc_auc_score([1] * n + [0] * n, subject.place(rows, subject.read_layer).tolist()))


def answers(
    subject: Subject,
    prompts: Sequence[str],
    asked: Sequence[tuple[Add | Steering | None, Capture | None]],
    tokens: int,
) -> list[list[Generation]]:
    """Return greedy answers [steering and its capture][prompt], generated in one batch."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    steer = [spec for spec, _ in asked for _ in prompts]
    capture = [spec for _, spec in asked for _ in prompts]
    done = subject.engine.chat(chats * len(asked), Sampling(max_tokens=tokens), steer=steer, capture=capture)
    return [done[i : i + len(prompts)] for i in range(0, len(done), len(prompts))]


def surprises(subject: Subject, generations: Sequence[Generation]) -> list[Tensor]:
    """Return −log p (nats) of all answer tokens given the chat, by the unsteered model."""
    texts = [(one.prompt_token_ids, one.token_ids) for one in generations]
    return [-one.logprobs for one in forced(subject.engine, texts)]


def perplexity(nats: Sequence[Tensor]) -> float:
    """Return exp of the mean −log p per token."""
    return math.exp(torch.cat(list(nats)).mean())


def word_odds(
    engine: HFEngine,
    prompts: Sequence[str],
    positive: Sequence[str],
    negative: Sequence[str],
    steer: Sequence[Add | None],
) -> list[float]:
    """Return log p(positive words) − log p(negative words) of the next word, mean over prompts, per steering."""
    rows = torch.cat(last_rows(engine, prompts, steer, "last_prompt"))
    scores = logits(engine.model, rows)
    for_side, against = (scores[:, _word_ids(engine, words)] for words in (positive, negative))
    odds = for_side.logsumexp(-1) - against.logsumexp(-1)
    return odds.view(len(steer), -1).mean(1).tolist()


def last_rows(
    engine: HFEngine, prompts: Sequence[str], steer: Sequence[Add | None], tokens: Literal["all", "last_prompt"]
) -> list[Tensor]:
    """Return rows of the last layer, for every prompt under the first steering, then under the second, …"""
    last = engine.facts.layers - 1
    done = engine.sync.generate(
        [*prompts] * len(steer),
        Sampling(max_tokens=1),
        steer=[spec for spec in steer for _ in prompts],
        capture=Capture(layers=(last,), tokens=tokens),
    )
    return [generation.rows[last] for generation in done]


def _word_ids(engine: HFEngine, words: Sequence[str]) -> list[int]:
    """Return the token of each word. Words of several tokens are refused: other words begin with the same token."""
    ids = [engine.tokenizer.encode(f" {word}", add_special_tokens=False) for word in words]
    problems = [
        Problem("words", f"{word!r} is {len(found)} tokens", "choose words of one token")
        for word, found in zip(words, ids, strict=True)
        if len(found) != 1
    ]
    if problems:
        raise InvalidRequest(problems)
    return [found[0] for found in ids]


def control(subject: Subject, scales: Sequence[float], scale: float) -> tuple[list[float], Control]:
    """Return the log-odds at each of `scales`, and their gap between ±`scale` beside that of random directions.

    A random direction is the push under a random rotation: equal lengths and angles between layers, other directions.
    """
    generator = torch.Generator().manual_seed(0)
    size = subject.push.hidden
    rotations = [torch.linalg.qr(torch.randn(size, size, generator=generator)).Q for _ in range(RANDOM_DIRECTIONS)]
    pushes = [SteeringVector({layer: q @ subject.push[layer] for layer in subject.steered}) for q in rotations]
    steer = [subject.push.add(s) if s else None for s in scales]
    steer += [push.add(sign * scale) for push in pushes for sign in (1, -1)]
    odds = word_odds(subject.hf, TEST_PROMPTS, POSITIVE_WORDS, NEGATIVE_WORDS, steer)
    sweep = odds[: len(scales)]
    rest = odds[len(scales) :]
    gap = sweep[scales.index(scale)] - sweep[scales.index(-scale)]
    gaps = [up - down for up, down in zip(rest[::2], rest[1::2], strict=True)]
    spread = math.sqrt(sum(g * g for g in gaps) / len(gaps))  # around 0: signs of random directions mean nothing
    return sweep, Control(gap, gaps, gap / spread, TEST_PROMPTS, POSITIVE_WORDS, NEGATIVE_WORDS)


def fit_small_pack(subject: Subject, out: Path) -> Pack:
    """Fit lenses for some of the shipped concepts, and write them to `out`."""
    settings = LensSettings(layers=(int(LENS_DEPTH * subject.engine.facts.layers),), name="demo")
    with tempfile.TemporaryDirectory() as work:
        return fit_pack(subject.engine, load_concepts().under(CONCEPTS), out, settings, work=work).pack


def watch(subject: Subject, pack: Pack, prompt: str, steered: Mapping[str, Steering], tokens: int) -> Lenses:
    """Return what the lenses read in the answer under each steering, row by row."""
    subject.engine.register_pack("demo", pack)
    done = subject.engine.chat(
        [[{"role": "user", "content": prompt}]] * len(steered),
        Sampling(max_tokens=tokens),
        steer=list(steered.values()),
        watch=Watch(pack="demo", top_k=len(pack), tokens="generated"),
    )
    scores = [np.stack([one.readings.of(c.id) for c in pack.concepts]) for one in done]  # type: ignore[attr-defined]
    ranked = np.argsort(-np.max([found.mean(1) for found in scores], axis=0), kind="stable").tolist()
    leading = [pack.index(name) for name in LEADING]
    shown = leading + [i for i in ranked if i not in leading][:MOST_CONCEPTS]
    names = [pack.concepts[i].name for i in shown]
    text_auroc, token_auroc = (
        statistics.median(concept.metrics[name] for concept in pack.concepts) for name in ("text_auroc", "auroc")
    )
    texts = [subject.texts([reading.token_id for reading in one.readings]) for one in done]
    maps = [
        TokenMap(condition, prompt, text, names, found[shown].tolist())
        for condition, text, found in zip(steered, texts, scores, strict=True)
    ]
    return Lenses(pack.info.layer, len(pack), text_auroc, token_auroc, maps)
