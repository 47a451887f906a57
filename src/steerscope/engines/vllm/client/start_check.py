"""Proof at start-up, through the road that requests will take and in the mode that will serve (eager, compiled,
graphs).

Two requests with the same prompt are steered at every tap with a vector of that tap's own; one captures what enters
the equation, the other what leaves it. The difference must be the vector, at every tap, for prompt and generated rows.
"""

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from steerscope.engines.results import TokenPrompt
from steerscope.engines.vllm.settings import NOOP
from steerscope.specs.capture import Capture
from steerscope.specs.errors import SteerscopeError, UnsupportedModel
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Site, Steering

if TYPE_CHECKING:
    from steerscope.engines.vllm.client.engine import VLLMEngine

_PROMPT, _TOKENS, _TOKENS_READ = [1, 2, 3, 4, 5], 3, "last_prompt | generated"
_STRENGTH = 0.5  # of a row's own norm, so that it stands out of rounding in any dtype


def self_test(engine: "VLLMEngine") -> None:
    if engine.settings.noop:
        warnings.warn(f"{NOOP} is set: nothing is steered, and captured rows are void", stacklevel=2)
        return
    if not (engine.settings.steer and engine.settings.capture):
        return
    try:
        _steering(engine)
    except UnsupportedModel:
        raise
    except SteerscopeError as error:
        raise UnsupportedModel(f"self-test of {engine.facts.name} failed: {error}") from error


def _steering(engine: "VLLMEngine") -> None:
    prompt, sampling = TokenPrompt(_PROMPT), Sampling(max_tokens=_TOKENS, ignore_eos=True)
    assert engine.facts.tapped is not None
    taps = sorted(engine.facts.tapped)
    layers = sorted({layer for layer, _ in taps})
    sites: list[Site] = sorted({site for _, site in taps})
    for site in sites:
        mine = [layer for layer in layers if (layer, site) in taps]
        plain = engine.sync.generate(prompt, sampling, capture=Capture(layers=mine, sites=site, tokens=_TOKENS_READ))
        vectors = {layer: _vector(layer, plain.rows[layer, site]) for layer in mine}
        steer = Steering.of(*(Add(vector=vector, layers=layer, site=site) for layer, vector in vectors.items()))
        assert plain.capture is not None
        plain.capture.close()
        captures = [
            Capture(layers=mine, sites=site, tokens=_TOKENS_READ, before_steering=before) for before in (True, False)
        ]
        before, after = engine.sync.generate([prompt, prompt], sampling, steer=steer, capture=captures)
        if before.token_ids != after.token_ids:
            raise UnsupportedModel(f"self-test of {engine.facts.name} failed: equal requests gave different tokens")
        for layer, vector in vectors.items():
            gained = (after.rows[layer, site].double() - before.rows[layer, site].double()).cpu()
            wanted = torch.from_numpy(vector.astype(np.float64))
            error = float(((gained - wanted).norm(dim=-1) / wanted.norm()).max())
            limit = max(1e-3, 8 * torch.finfo(engine.dtype).eps)
            if not error < limit:
                raise UnsupportedModel(
                    f"self-test of {engine.facts.name} failed: a vector added at {site} of layer {layer} did not "
                    f"arrive (relative error {error:.2g}, allowed {limit:.2g})"
                )
        for one in (before, after):
            if one.capture is not None:
                one.capture.close()


def _vector(layer: int, rows: torch.Tensor) -> np.ndarray:
    """Another direction for every layer, of a length that the rows there will notice."""
    direction = np.random.default_rng(layer).standard_normal(rows.shape[-1]).astype(np.float32)
    norm = float(rows.float().norm(dim=-1).mean()) or 1.0
    return direction * np.float32(_STRENGTH * norm / np.linalg.norm(direction))
