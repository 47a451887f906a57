"""What training runs on the same texts share: tokens, splits, baselines, cached streams."""

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
from steerscope.training.passes import CachedStreams, Learnable, TrainingPasses
from steerscope.training.settings import TrainSettings
from steerscope.training.texts import Source, TrainingSample, TrainingSet, samples
from steerscope.vectors.files import load as load_vector

_HELD_OUT = 0.1  # of the target tokens, where neither the set nor the user has validation texts
_NORM_TEXTS = 32
Pairs = list[tuple[Source, TrainingSample]]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Mean nats per token of the validation texts: unsteered, and after each of the prompts."""

    unsteered: float
    prompted: dict[str, float]

    @property
    def best_prompt(self) -> str | None:
        return min(self.prompted, key=self.prompted.__getitem__, default=None)


class Course:
    def __init__(
        self, engine: SyncEngine, data: TrainingSet, settings: TrainSettings, prompts: tuple[str, ...] | None = None
    ) -> None:
        """Of the settings only the `shared` ones matter. `prompts` replace those of the set."""
        if not isinstance(engine.aio, HFEngine):
            raise InvalidRequest([Problem("engine", "vLLM does not train", "load the model with engine='hf'")])
        self.engine = engine
        self.hf = engine.aio
        self.data = data
        self.settings = settings
        self.prompts = data.prompts if prompts is None else prompts
        self.passes = TrainingPasses(engine.aio, settings.batch, settings.gradient_checkpointing)
        self._streams: dict[tuple[Site, int], CachedStreams | None] = {}
        learned, validation = self._split()
        self._held_out = [source for source, _ in validation]
        self.train = [sample for _, sample in learned]
        self.validation = [sample for _, sample in validation]

    def _split(self) -> tuple[Pairs, Pairs]:
        """Return training and validation texts; no text is in both."""
        settings = self.settings
        pairs = self._tokenized(self.data.train, "train")
        if self.data.validation:
            held_out = _up_to(self._tokenized(self.data.validation, "validation"), settings.val_tokens)
        else:
            random.Random(settings.seed).shuffle(pairs)
            n_tokens = sum(len(sample.targets) for _, sample in pairs)
            held_out = _up_to(pairs, settings.val_tokens or int(_HELD_OUT * n_tokens))
            pairs = pairs[len(held_out) :]
        known = {tuple(sample.token_ids) for _, sample in held_out}
        pairs = [pair for pair in pairs if tuple(pair[1].token_ids) not in known]
        if not pairs:
            what = f"all {len(self.data.train)} texts are held out for validation"
            raise InvalidRequest([Problem("val_tokens", what, "give more texts, or fewer val_tokens")])
        return _up_to(pairs, settings.target_tokens), held_out

    def _tokenized(self, sources: Sequence[Source], name: str) -> Pairs:
        return list(zip(sources, samples(self.hf, sources, self.settings.tokens, name=name), strict=True))

    @cached_property
    def digest(self) -> str:
        """A hash of all tokens in training and validation."""
        return digest(*([one.token_ids, one.targets] for one in (*self.train, *self.validation)))

    @cached_property
    def baselines(self) -> Baselines:
        prompted = {
            prompt: self.passes.nats(samples(self.hf, self._held_out, "all", prompt)) for prompt in self.prompts
        }
        return Baselines(self.passes.nats(self.validation), prompted)

    def keep(self, ops: Learnable) -> CachedStreams | None:
        """Return the streams before the ops for all texts; those of one layer are cached at a time."""
        where = (ops.site, min(ops.layers))
        if where not in self._streams:
            self._streams.clear()
            self._streams[where] = self.passes.keep([*self.train, *self.validation], ops)
        return self._streams[where]

    def start(self, init: str, layers: Sequence[int], site: Site) -> dict[int, Tensor]:
        """Return the vectors that training begins with; layers without one begin at zero."""
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
        """Return a hash of the vector in a file, so that another one of that name is noticed."""
        return None if init in ("zero", "mean-diff") else digest(load_vector(init).to_spec().model_dump_json())

    def mean_difference(self, layers: Sequence[int], site: Site) -> dict[int, Tensor]:
        """Return the mean difference of the set's two sides without what is held out, at the scale that `extract`
        recommends, in equal parts at several layers."""
        examples = self.data.examples
        if examples is None:
            what = f"{self.data.name} has no other side"
            raise InvalidRequest([Problem("init", what, "give pairs of positive and negative texts, or begin at zero")])
        # Without held-out texts and the other sides of their pairs.
        pairs = examples.pairs or tuple(range(len(examples)))
        out = {pair for pair, text in zip(pairs, examples.texts, strict=True) if text in self._held_out}
        left = [i for i, pair in enumerate(pairs) if pair not in out]
        texts = tuple(examples.texts[i] for i in left)
        positive = tuple(examples.positive[i] for i in left)
        examples = Examples(texts, positive, examples.pairs and tuple(pairs[i] for i in left))
        chats = not any(isinstance(text, str) for text in examples.texts)
        tokens = "response" if chats else "all"
        found = extract(self.engine, examples, tokens=tokens, layers=list(layers), site=site).vector
        norms = row_norms(self.engine, examples.texts[:_NORM_TEXTS], layers=list(layers), site=site)
        share = PART_OF_NORM / len(layers)
        return {layer: found[layer] * (share * norms[layer] / float(found[layer].norm())) for layer in layers}


def _up_to(pairs: Pairs, n_tokens: int | None) -> Pairs:
    """Return the first texts that together have that many target tokens."""
    if n_tokens is None:
        return pairs
    total = 0
    for number, (_, sample) in enumerate(pairs, 1):
        total += len(sample.targets)
        if total >= n_tokens:
            return pairs[:number]
    return pairs
