"""Choosing the next token of each row. Every sampled row draws from a generator of its own, seeded per request, so its
text does not depend on what else is in the batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.engines.results import TokenLogprobs
from steerscope.specs.sampling import Sampling

_SHORT_LIST = 1024  # the nucleus is looked for here first: sorting a whole vocabulary is slow


@dataclass(slots=True)
class Chooser:
    """One request's sampling state."""

    sampling: Sampling
    generator: torch.Generator | None  # None: greedy
    history: list[int]  # prompt and generated ids; shared with the sequence
    prompt_length: int

    @classmethod
    def of(cls, sampling: Sampling, history: list[int], device: torch.device) -> "Chooser":
        generator = None if sampling.greedy else torch.Generator(device).manual_seed(sampling.seed or 0)
        return cls(sampling, generator, history, len(history))


class Chosen(NamedTuple):
    token: int | None  # None: the logits are not numbers
    logprobs: TokenLogprobs | None = None  # for a request that asks for them


def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[Chosen]:
    """Return the next token of each row of logits [rows, vocab]."""
    logits = logits.float()
    before = {
        row: torch.log_softmax(logits[row], dim=-1)  # of the model, without penalties
        for row, chooser in enumerate(choosers)
        if chooser.sampling.logprobs is not None
    }
    for row, chooser in enumerate(choosers):
        if chooser.sampling.repetition_penalty != 1.0:
            _penalise(logits[row], chooser)
        if chooser.sampling.frequency_penalty or chooser.sampling.presence_penalty:
            _subtract(logits[row], chooser)
    best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    finite = torch.isfinite(best).tolist()
    chosen: list[Chosen] = []
    for row, (chooser, token) in enumerate(zip(choosers, tokens.tolist(), strict=True)):
        if not finite[row]:
            chosen.append(Chosen(None))
            continue
        if chooser.generator is not None:
            token = _draw(logits[row], chooser.sampling, chooser.generator)
        told = _logprobs(before[row], token, chooser.sampling.logprobs or 0) if row in before else None
        chosen.append(Chosen(token, told))
    return chosen


def _logprobs(row: Tensor, token: int, most: int) -> TokenLogprobs:
    best = torch.topk(row, min(most, len(row)))
    return TokenLogprobs(token, float(row[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _penalise(row: Tensor, chooser: Chooser) -> None:
    """Divide positive and multiply negative logits of tokens seen in the window (as transformers and vLLM do)."""
    window = chooser.sampling.repetition_window
    seen = torch.tensor(sorted(set(chooser.history[-window:] if window else chooser.history)), device=row.device)
    values = row[seen]
    penalty = chooser.sampling.repetition_penalty
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _subtract(row: Tensor, chooser: Chooser) -> None:
    """For each generated token the presence penalty once and the frequency penalty every time, as OpenAI has them."""
    made = Counter(chooser.history[chooser.prompt_length :])
    if made:
        s = chooser.sampling
        amounts = [s.presence_penalty + s.frequency_penalty * count for count in made.values()]
        row[torch.tensor(list(made), device=row.device)] -= torch.tensor(amounts, device=row.device)


def _draw(row: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Temperature, then top-k, top-p and min-p on the same distribution, then the exponential race."""
    probabilities = torch.softmax((row - row.max()) / sampling.temperature, dim=-1)
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.top_k:
        least = torch.topk(probabilities, min(sampling.top_k, len(row))).values[-1]
        keep &= probabilities >= least
    if sampling.top_p < 1.0:
        keep &= probabilities >= _nucleus_floor(probabilities * keep, sampling.top_p)
    if sampling.min_p:
        keep &= probabilities >= sampling.min_p * probabilities.max()
    return int(torch.where(keep, probabilities / noise, 0.0).argmax())


def _nucleus_floor(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest probability of the smallest set that reaches top_p of the mass."""
    wanted = top_p * probabilities.sum()
    for size in (min(_SHORT_LIST, len(probabilities)), len(probabilities)):
        ranked = torch.topk(probabilities, size).values
        before = ranked.cumsum(0) - ranked
        if before[-1] >= wanted or size == len(probabilities):
            break
    return ranked[before < wanted][-1]
