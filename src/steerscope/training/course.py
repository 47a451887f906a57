"""An engine and a set of texts in hand, ready for one run or many: tokens, splits, baselines, kept streams.

Runs of a sweep share it, so that a text is tokenised once and what does not depend on a run is computed once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.extraction import extract, row_norms
from steerscope.extraction.data import Examples
from steerscope.extraction.extract import PART_OF_NORM
from steerscope.extraction.runs import digest
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Site
from steerscope.training.learnable import Learnable
from steerscope.training.passes import Kept, Passes
from steerscope.training.texts import Sample, Source, TrainingSet, samples
from steerscope.vectors.files import load as load_vector

_STARTS = ("zero", "mean-diff")
_HELD_OUT = 0.1  # of the tokens that count, where neither the set nor the user says how many


@dataclass(frozen=True, slots=True)
class Baselines:
    """Mean nats per token of the validation texts, unsteered, and told each of the prompts."""

    unsteered: float
    prompted: dict[str, float]

    @property
    def best_prompt(self) -> str | None:
        return min(self.prompted, key=self.prompted.__getitem__, default=None)


class Course:
    def __init__(
        self,
        engine: SyncEngine,
        data: TrainingSet,
        *,
        tokens: str = "all",
        target_tokens: int | None = None,
        val_tokens: int | None = None,
        batch: int = 8,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        prompts: tuple[str, ...] | None = None,
    ) -> None:
        if not isinstance(engine.aio, HFEngine):
            raise InvalidRequest([Problem("engine", "vLLM does not train", "load the model with engine='hf'")])
        self.engine, self.hf, self.data, self.tokens = engine, engine.aio, data, tokens
        self.prompts = data.prompts if prompts is None else prompts
        self.passes = Passes(engine.aio, batch, gradient_checkpointing)
        self._kept: dict[tuple, Kept | None] = {}
        learned, judged = self.samples(data.train, name="train"), self.samples(data.validation, name="validation")
        pairs = list(zip(data.train, learned, strict=True))
        if judged:
            apart = _up_to(list(zip(data.validation, judged, strict=True)), val_tokens)
        else:
            random.Random(seed).shuffle(pairs)
            apart = _up_to(pairs, val_tokens or int(_HELD_OUT * _count(pairs)))
            pairs = pairs[len(apart) :]
        known = {tuple(sample.token_ids) for _, sample in apart}
        pairs = [pair for pair in pairs if tuple(pair[1].token_ids) not in known]  # no text is learned and judged on
        if not pairs:
            what = f"all {len(learned)} texts are held out for validation"
            raise InvalidRequest([Problem("val_tokens", what, "give more texts, or fewer val_tokens")])
        self._held_out = [source for source, _ in apart]
        self.train = [sample for _, sample in _up_to(pairs, target_tokens)]
        self.validation = [sample for _, sample in apart]

    def samples(self, sources: Sequence[Source], prompt: str | None = None, name: str = "texts") -> list[Sample]:
        return samples(self.hf, sources, self.tokens, prompt, name)

    @cached_property
    def digest(self) -> str:
        """Of all tokens that are learned from and judged on."""
        return digest(*([one.token_ids, one.targets] for one in (*self.train, *self.validation)))

    @cached_property
    def baselines(self) -> Baselines:
        prompted = {
            prompt: self.passes.nats(samples(self.hf, self._held_out, "all", prompt)) for prompt in self.prompts
        }
        return Baselines(self.passes.nats(self.validation), prompted)

    def keep(self, ops: Learnable) -> Kept | None:
        """What comes before the ops, for all texts."""
        where = (ops.site, min(ops.layers))
        if where not in self._kept:
            self._kept.clear()  # one layer at a time
            self._kept[where] = self.passes.keep([*self.train, *self.validation], ops)
        return self._kept[where]

    def start(self, init: str, layers: Sequence[int], site: Site) -> dict[int, Tensor]:
        """Where training begins; what is not there begins at zero."""
        if init == "zero":
            return {}
        if init == "mean-diff":
            return self.mean_difference(layers, site)
        vector = load_vector(init)
        if vector.hidden != self.engine.facts.hidden:
            what = f"has {vector.hidden} numbers, {self.engine.facts.name} has hidden size {self.engine.facts.hidden}"
            raise InvalidRequest([Problem("init", what, "use a vector made for this model")])
        return {layer: vector[layer] for layer in layers}

    def begins_with(self, init: str) -> str | None:
        """A hash of the vector in a file, so that another under its name is seen."""
        return None if init in _STARTS else digest(load_vector(init).to_spec().model_dump_json())

    def mean_difference(self, layers: Sequence[int], site: Site) -> dict[int, Tensor]:
        """Of the set's two sides without what is held out, at the scale `extract` recommends, in equal parts at
        several layers."""
        examples = self.data.examples
        if examples is None:
            what = f"{self.data.name} has no other side"
            raise InvalidRequest([Problem("init", what, "give pairs of positive and negative texts, or begin at zero")])
        examples = _without(examples, self._held_out)
        chats = not any(isinstance(text, str) for text in examples.texts)
        read = "response" if chats else "all"
        found = extract(self.engine, examples, tokens=read, layers=list(layers), site=site).vector
        norms = row_norms(self.engine, examples.texts[:32], layers=list(layers), site=site)
        share = PART_OF_NORM / len(layers)
        return {layer: found[layer] * (share * norms[layer] / float(found[layer].norm())) for layer in layers}


def _without(examples: Examples, held_out: Sequence[Source]) -> Examples:
    """A text that is judged on has no part in the start, nor has the other side of its pair."""
    pairs = examples.pairs or tuple(range(len(examples)))
    out = {pair for pair, text in zip(pairs, examples.texts, strict=True) if text in held_out}
    left = [i for i, pair in enumerate(pairs) if pair not in out]
    texts, positive = tuple(examples.texts[i] for i in left), tuple(examples.positive[i] for i in left)
    return Examples(texts, positive, examples.pairs and tuple(pairs[i] for i in left))


def _count(pairs: Sequence[tuple[Source, Sample]]) -> int:
    return sum(len(sample.targets) for _, sample in pairs)


def _up_to(pairs: list[tuple[Source, Sample]], tokens: int | None) -> list[tuple[Source, Sample]]:
    """Texts from the first on until they hold that many tokens that count."""
    if tokens is None:
        return pairs
    total = 0
    for number, pair in enumerate(pairs, 1):
        total += len(pair[1].targets)
        if total >= tokens:
            return pairs[:number]
    return pairs
