"""Choosing the next token of each row. Every sampled row draws from a generator of its own, seeded per request, so its
text does not depend on what else is in the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.specs.sampling import Sampling

_SHORT_LIST = 1024  # the nucleus is looked for here first: sorting a whole vocabulary is slow


@dataclass(slots=True)
class Chooser:
    """One request's sampling state."""

    sampling: Sampling
    generator: torch.Generator | None  # None: greedy
    history: list[int]  # prompt and generated ids; shared with the sequence

    @classmethod
    def of(cls, sampling: Sampling, history: list[int], device: torch.device) -> "Chooser":
        if sampling.temperature < 1e-6:  # dividing by less would overflow float32
            return cls(sampling, None, history)
        generator = torch.Generator(device=device)
        generator.manual_seed(sampling.seed or 0)
        return cls(sampling, generator, history)


def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[int | None]:
    """The next token of each row of logits [rows, vocab]; None for a row whose logits are not numbers."""
    logits = logits.float()
    for row, chooser in enumerate(choosers):
        if chooser.sampling.repetition_penalty != 1.0:
            _penalise(logits[row], chooser)
    best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    chosen: list[int | None] = tokens.tolist()
    finite = torch.isfinite(best).tolist()
    for row, chooser in enumerate(choosers):
        if not finite[row]:
            chosen[row] = None
        elif chooser.generator is not None:
            chosen[row] = _draw(logits[row], chooser.sampling, chooser.generator)
    return chosen


def _penalise(row: Tensor, chooser: Chooser) -> None:
    """Divide positive and multiply negative logits of tokens seen in the window (as transformers and vLLM do)."""
    window = chooser.sampling.repetition_window
    seen = torch.tensor(sorted(set(chooser.history[-window:] if window else chooser.history)), device=row.device)
    values, penalty = row[seen], chooser.sampling.repetition_penalty
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


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
