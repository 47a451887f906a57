"""Check at start-up, by requests in the mode that will serve (eager, compiled, graphs).

Two requests with the same prompt are steered at every tap with a vector of that tap's own; one captures what enters
the equation, the other what leaves it. The difference must be the vector, at every tap, for prompt and generated rows.
"""

import warnings

import numpy as np
import torch

from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm.settings import NOOP, VLLMSettings
from steerscope.specs.capture import Capture
from steerscope.specs.errors import SteerscopeError, UnsupportedModel
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Site, Steering

_PROMPT = [1, 2, 3, 4, 5]
_TOKENS = 3
_TOKENS_READ = "last_prompt | generated"
_STRENGTH = 0.5  # of a row's own norm, so that it stands out of rounding in any dtype


def self_test(engine: SyncEngine, settings: VLLMSettings) -> None:
    if settings.noop:
        warnings.warn(f"{NOOP} is set: nothing is steered, and captured rows are void", stacklevel=2)
        return
    if not (settings.steer and settings.capture):
        return
    try:
        assert engine.facts.tapped is not None
        taps = sorted(engine.facts.tapped)
        sites: set[Site] = {site for _, site in taps}
        for site in sorted(sites):
            _check_site(engine, site, [layer for layer, other in taps if other == site])
    except UnsupportedModel:
        raise
    except SteerscopeError as error:
        raise UnsupportedModel(f"self-test of {engine.facts.name} failed: {error}") from error


def _check_site(engine: SyncEngine, site: Site, layers: list[int]) -> None:
    prompt = TokenPrompt(_PROMPT)
    sampling = Sampling(max_tokens=_TOKENS, ignore_eos=True)
    captures = [
        Capture(layers=layers, sites=site, tokens=_TOKENS_READ, before_steering=before) for before in (True, False)
    ]
    plain = engine.generate(prompt, sampling, capture=captures[1])
    vectors = {layer: _vector(layer, plain.rows[layer, site]) for layer in layers}
    steer = Steering.of(*(Add(vector=vector, layers=layer, site=site) for layer, vector in vectors.items()))
    assert plain.capture is not None
    plain.capture.close()
    before, after = engine.generate([prompt, prompt], sampling, steer=steer, capture=captures)
    if before.token_ids != after.token_ids:
        raise UnsupportedModel(f"self-test of {engine.facts.name} failed: equal requests gave different tokens")
    for layer, vector in vectors.items():
        gained = (after.rows[layer, site].double() - before.rows[layer, site].double()).cpu()
        wanted = torch.from_numpy(vector.astype(np.float64))
        error = float(((gained - wanted).norm(dim=-1) / wanted.norm()).max())
        limit = max(1e-3, 8 * torch.finfo(engine.aio.dtype).eps)
        if not error < limit:
            raise UnsupportedModel(
                f"self-test of {engine.facts.name} failed: a vector added at {site} of layer {layer} did not "
                f"arrive (relative error {error:.2g}, allowed {limit:.2g})"
            )
    for one in (before, after):
        if one.capture is not None:
            one.capture.close()


def _vector(layer: int, rows: torch.Tensor) -> np.ndarray:
    """Return a direction of the layer's own, with a length that stands out of the rows."""
    direction = np.random.default_rng(layer).standard_normal(rows.shape[-1]).astype(np.float32)
    norm = float(rows.float().norm(dim=-1).mean()) or 1.0
    return direction * np.float32(_STRENGTH * norm / np.linalg.norm(direction))
