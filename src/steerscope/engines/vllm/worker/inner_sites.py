"""Find the sites inside one decoder layer: attn_out, resid_mid, mlp_out."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from steerscope.engines.vllm.worker.layer_call import (
    EFFECT,
    EXACT,
    ExaminedLayer,
    LayerRun,
    integers,
    on_host,
    relative_error,
    sum_of,
)
from steerscope.engines.vllm.worker.model_layout import Place, Where
from steerscope.specs.steering import Site

_ROUNDINGS = 4  # of the dtype's epsilon: how far sums of rounded tensors may differ, relative to the integers


class InnerSites:
    """Finds the sites inside one layer whose stream parts are known."""

    def __init__(self, examined: ExaminedLayer, parts: list[Where]) -> None:
        self._call, self._parts, self._candidates = examined.call, parts, examined.candidates
        self._entered = sum_of(on_host(self._call.inputs[where]) for where in examined.inputs)
        self._limit = _ROUNDINGS * torch.finfo(self._call.inputs[examined.inputs[0]].dtype).eps
        shape, seed = self._entered.shape, self._call.seed
        self._numbers = {place: integers(shape, seed, 20 + i) for i, place in enumerate(self._candidates)}
        self._base = self._call.run(self._candidates)
        self._with_more = {
            place: self._call.run(self._candidates, add={place: self._numbers[place]}) for place in self._candidates
        }
        self._outputs = [place for place in self._candidates if place.when == "after"]

    def places(self) -> tuple[dict[Site, Place], dict[Site, str]]:
        """Return the sites, and why others cannot be had."""
        name = type(self._call.module).__name__
        for scale in _multipliers(self._call.module):
            for size in (2, 3):
                for addends in combinations(self._outputs, size):
                    if self._add_up(addends, scale):
                        return self._named(addends, scale)
        for attention in self._outputs:
            if middle := self._middle((attention,), attention, 1.0):
                why = f"{name} changes the stream after its MLP has added to it"
                return {"attn_out": attention, "resid_mid": middle}, {"mlp_out": why}
        why = f"what {name} adds to the stream is not the sum of what its modules return"
        return {}, dict.fromkeys(("attn_out", "mlp_out", "resid_mid"), why)

    def _add_up(self, addends: tuple[Place, ...], scale: float) -> bool:
        """Whether the stream that leaves is exactly the one that entered and these addends, and a change of each moves
        it likewise."""
        for place in addends:
            moved = self._left(self._with_more[place]) - self._left(self._base)
            wanted = self._numbers[place] + sum_of(self._reply(place, other) for other in addends if other != place)
            if relative_error(moved, scale * wanted) > max(self._limit, EFFECT):
                return False
        return self._leaves(addends, scale, torch.zeros_like(self._entered))

    def _leaves(self, addends: tuple[Place, ...], scale: float, more: Tensor, at: Place | None = None) -> bool:
        """With integers as addends, and `more` added at a place, whether their sum leaves the layer."""
        run = self._call.run(
            self._candidates, put={place: self._numbers[place] for place in addends}, add={at: more} if at else None
        )
        wanted = self._entered + scale * sum_of(self._numbers[place] for place in addends) + more
        return relative_error(self._left(run), wanted) < self._exactness(scale)

    def _exactness(self, scale: float) -> float:
        return EXACT if scale == 1.0 else self._limit / 4

    def _left(self, run: LayerRun) -> Tensor:
        return sum_of(run.returned[where] for where in self._parts)

    def _reply(self, place: Place, other: Place) -> Tensor:
        """How far a change at one place moves another."""
        return self._with_more[place].seen[other] - self._base.seen[other]

    def _named(self, addends: tuple[Place, ...], scale: float) -> tuple[dict[Site, Place], dict[Site, str]]:
        def leads(place: Place) -> bool:
            replies = [(self._reply(place, other), self._base.seen[other]) for other in addends if other != place]
            return any(float(reply.norm()) > EFFECT * float(natural.norm()) for reply, natural in replies)

        first = [place for place in addends if leads(place)]
        attention = next(iter(first or [place for place in addends if _attends(place.module)] or addends))
        feed = [place for place in addends if place != attention]
        found: dict[Site, Place] = {"attn_out": replace(attention, scale=scale)}
        refused: dict[Site, str] = {}
        if len(feed) == 1:
            found["mlp_out"] = replace(feed[0], scale=scale)
        else:
            names = " and ".join(type(place.module).__name__ for place in feed)
            refused["mlp_out"] = f"it is the sum of what several modules return ({names})"
        if middle := self._middle(addends, attention, scale):
            found["resid_mid"] = middle
        else:
            refused["resid_mid"] = "attention and MLP read the same input (parallel block)"
        return found, refused

    def _middle(self, addends: tuple[Place, ...], attention: Place, scale: float) -> Place | None:
        """Return where a module is given the stream between attention and MLP. Of a layer whose addends are not all
        known, what is added there must do the same as when the attention adds it."""
        put = {attention: self._numbers[attention]}
        between = self._entered + scale * put[attention]
        run = self._call.run(self._candidates, put=put)
        for place in (place for place in self._candidates if place.when == "before"):
            more = self._numbers[place]
            if relative_error(run.seen[place], between) > self._exactness(scale):
                continue
            if len(addends) > 1:
                if self._leaves(addends, scale, more, at=place):
                    return place
            else:
                here = self._left(self._call.run(self._candidates, put=put, add={place: more}))
                there = self._left(self._call.run(self._candidates, put={attention: put[attention] + more}))
                if relative_error(here, there) < EXACT < relative_error(here, self._left(run)):
                    return place
        return None


def _multipliers(layer: nn.Module) -> list[float]:
    """Return what the layer may multiply its addends by."""
    found = [1.0]
    if (multiplier := getattr(layer, "residual_multiplier", None)) is not None:
        found.append(float(multiplier))
    config: Any = getattr(layer, "config", None)
    if (depth := getattr(config, "scale_depth", None)) is not None:  # MiniCPM
        found.append(float(depth) / math.sqrt(config.num_hidden_layers))
    return found


def attention_layers(module: nn.Module) -> list[nn.Module]:
    """vLLM's own attention, Mamba and linear attention layers, which read the cache."""
    try:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    except ImportError:
        return []
    return [part for part in module.modules() if isinstance(part, AttentionLayerBase)]


def _attends(module: nn.Module) -> bool:
    return bool(attention_layers(module))
