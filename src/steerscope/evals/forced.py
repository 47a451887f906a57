"""Probabilities and rows of a given text.

`forced` works under any steering. `ModelScorer` uses the unsteered model: perplexity measures the fluency of an answer,
and its projection how far the text, not the steering, lies along a vector.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.settings import logits
from steerscope.engines.options import Each, SteerLike
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.evals.scorers import NOT_SCORED, Json, Scored, score_texts
from steerscope.extraction.runs import Record, digest
from steerscope.specs import Capture, Message, Sampling, SteerscopeError
from steerscope.vectors.vector import SteeringVector

_AT_ONCE = 32
Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Forced:
    """Natural logarithms of the probabilities of a text's tokens, whether each was the likeliest, and their rows by
    layer."""

    logprobs: Tensor
    greedy: Tensor
    rows: dict[int, Tensor]


def forced(
    engine: SyncEngine,
    texts: Sequence[tuple[Tokens, Tokens]],
    steer: Each[SteerLike] = None,
    layers: Sequence[int] = (),
) -> Iterator[Forced]:
    """Yield the probabilities of each text after its prompt; both have at least one token."""
    hf = engine.aio
    if not isinstance(hf, HFEngine):
        raise SteerscopeError("this needs the weights in this process: load the model with the hf engine")
    last = hf.facts.layers - 1
    kept = tuple(sorted({last, *layers}))
    for start in range(0, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        captures = [Capture(layers=kept, tokens=f"positions=[{len(p) - 1}:{len(p) + len(t)}]") for p, t in part]
        specs = steer[start : start + _AT_ONCE] if isinstance(steer, list | tuple) else steer
        done = engine.generate(
            [TokenPrompt([*p, *t]) for p, t in part], Sampling(max_tokens=1), steer=specs, capture=captures
        )
        for (_, text), one in zip(part, done, strict=True):
            rows = one.rows
            logprobs = torch.log_softmax(logits(hf.model, rows[last][:-1]), -1).cpu()
            wanted = torch.tensor(text)
            yield Forced(
                logprobs.gather(1, wanted[:, None])[:, 0],
                logprobs.argmax(-1) == wanted,
                {layer: rows[layer][1:].float() for layer in layers},
            )
            if one.capture:
                one.capture.close()


class ModelScorer:
    """`perplexity` of the answer after the question alone; `projection: NAME` of its mean row on each vector, at the
    first layer of the vector."""

    name = "model"

    def __init__(self, engine: SyncEngine, vectors: Mapping[str, SteeringVector]) -> None:
        self._engine = engine
        self._vectors = vectors
        self._layers = {name: (vector.layers or (0,))[0] for name, vector in vectors.items()}

    @property
    def identity(self) -> str:
        facts = self._engine.facts
        specs = {name: vector.to_spec().model_dump_json() for name, vector in self._vectors.items()}
        return digest(facts.name, facts.layers, facts.hidden, specs)

    def about(self) -> dict[str, Json]:
        return {"model": self._engine.facts.name, "projection layers": dict(self._layers)}

    def __call__(self, answers: Sequence[Record]) -> list[Scored]:
        return score_texts(answers, self._scores)

    def _scores(self, answers: Sequence[Record]) -> Iterator[Scored]:
        render = functools.cache(lambda question: self._engine.aio.render([Message(role="user", content=question)]))
        texts = [(render(one["question"]).token_ids, one["token_ids"]) for one in answers if one["token_ids"]]
        found = forced(self._engine, texts, layers=sorted(set(self._layers.values())))
        for answer in answers:
            if not answer["token_ids"]:
                yield NOT_SCORED
                continue
            one = next(found)
            values = {"perplexity": math.exp(-float(one.logprobs.mean()))}
            for name, vector in self._vectors.items():
                layer = self._layers[name]
                values[f"projection: {name}"] = float(vector.projection(one.rows[layer].mean(0), layer))
            yield Scored(values)
