"""Prove where the sites of a decoder layer are, by what moves when known numbers are put there.

A layer of vLLM may return the stream as `delta + residual`, as `delta` beside a residual that the next layer ignores,
or in another way, and may scale what its attention and MLP add. Names do not tell, and a tap in the wrong place reads
rows that are off by 100 % without an error. So a dummy batch runs through the model before anything is tapped. What
each layer returns is replaced by small random integers, whose sums are exact in every dtype, and each layer is also run
alone, with integers in the places of its inputs and of what its modules return:

- a part of a layer's input belongs to the stream when a change of it changes the output; of two parts only the sum may
  count;
- returned parts are the stream when their sum is what enters the next layer;
- modules return the addends when resid_pre + attn_out + mlp_out is resid_post exactly (times the layer's multiplier).
  The attention is the one that the other replies to, or, in a parallel block, the one that reads the cache;
- a module is given the stream between the two when that is resid_pre + attn_out, and what is added there leaves the
  layer.

All ranks of a tensor-parallel group draw the same integers.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from steerscope.engines.vllm.worker.layer_call import (
    EFFECT,
    EXACT,
    LayerCall,
    LayerRun,
    by_place,
    integers,
    on_host,
    relative_error,
    stream_place,
    stream_shaped,
    sum_of,
)
from steerscope.engines.vllm.worker.model_layout import Layers, Place, Where
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

_ROUNDINGS = 4  # of the dtype's epsilon: how far sums of rounded tensors may differ, relative to the integers


def prove_layers(layers: Layers, hidden: int, sites: Sequence[Site], run: Callable[[], object]) -> Layers:
    """Return the layers with the places of these sites. `run` runs a dummy batch through the uncompiled model. Raises
    UnsupportedModel, naming every site that cannot be proven."""
    _check_scaled_stream(layers)
    proof = LayerProof(layers, hidden, sites)
    with torch.inference_mode(), proof.listening():
        run()
    proof.close(run)
    if proof.refused:
        kind = type(next(iter(layers.found.values())).module).__name__
        raise UnsupportedModel(
            f"{kind} cannot be tapped at " + "; ".join(f"{site}: {why}" for site, why in proof.refused.items())
        )
    found = {number: replace(layer, places=proof.places[number]) for number, layer in layers.found.items()}
    return replace(layers, found=found)


def _check_scaled_stream(layers: Layers) -> None:
    """Refuse DeepSeek's layers in float16: they divide the stream by a factor, and the rows would be of that."""
    for layer in layers.found.values():
        factor = getattr(layer.module, "routed_scaling_factor", 1.0)
        dtype = next((p.dtype for p in layer.module.parameters() if p.dtype.is_floating_point), None)
        if factor != 1.0 and dtype == torch.float16:
            raise UnsupportedModel(
                f"{type(layer.module).__name__} divides the residual stream by {factor:g} in float16, so its rows are "
                "not the model's: load it with dtype bfloat16"
            )


class LayerProof:
    def __init__(self, layers: Layers, hidden: int, sites: Sequence[Site]) -> None:
        self._layers = layers
        self._hidden = hidden
        self._sites = sites
        self.places: dict[int, dict[Site, Place]] = {}
        self.refused: dict[Site, str] = {}
        self._pending: LayerCall | None = None  # judged when the next module shows what it takes from it
        self._parts: dict[type, list[Where]] = {}  # by class of layer: the returned parts that are the stream

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Examine every layer when the dummy batch comes to it."""
        with contextlib.ExitStack() as handles:
            for number, layer in self._layers.found.items():
                _settle_attention(layer.module, handles)
                before = functools.partial(self._before_layer, number)
                handles.enter_context(layer.module.register_forward_pre_hook(before, with_kwargs=True))
                handles.enter_context(layer.module.register_forward_hook(self._after_layer))
            for child in self._layers.owner.children():
                if not isinstance(child, nn.ModuleList):
                    handles.enter_context(child.register_forward_pre_hook(self._behind_layers, with_kwargs=True))
            yield

    def close(self, run: Callable[[], object]) -> None:
        """Judge a last layer that nothing of its owner follows as the others of its class are. Attention runs only
        within a forward of the model, so another dummy batch is that forward."""
        last = self._pending
        self._pending = None
        if last is not None:
            parts = self._parts.get(type(last.module))
            if parts is None:
                raise UnsupportedModel(
                    f"{last.name} cannot be tapped: no module behind layer {last.number} shows which of the tensors "
                    "that it returns is the residual stream"
                )
            first = self._layers.found[min(self._layers.found)].module
            with contextlib.ExitStack() as handles, torch.inference_mode():
                _settle_attention(last.module, handles)
                handles.enter_context(first.register_forward_pre_hook(lambda *_: self._judge(last, parts)))
                run()
        for number, layer in self._layers.found.items():
            if number not in self.places:
                raise UnsupportedModel(f"{type(layer.module).__name__} of layer {number} did not run in a dummy batch")

    # --- in the dummy batch

    def _before_layer(self, number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call = LayerCall(module, number, args, kwargs, self._hidden)
        if not call.given:
            raise UnsupportedModel(
                f"{call.name} cannot be tapped: layer {number} is given no tensor [tokens, {self._hidden}] (layers of "
                "vLLM's Transformers backend carry a batch dimension)"
            )
        call.find_stream()
        if self._pending is not None:
            self._connect(self._pending, call)
        self._pending = call

    def _after_layer(self, _module: nn.Module, _args: tuple, output: object) -> None:
        """Put integers into every returned part, in place, as a tap does."""
        assert self._pending is not None
        parts = stream_shaped(by_place(output), self._hidden)
        for i, part in enumerate(parts.values()):
            part.copy_(integers(part.shape, self._pending.number, i))
        self._pending.returned = {where: on_host(part) for where, part in parts.items()}

    def _behind_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The first module behind the last layer, the final norm, is given what that layer returned."""
        last = self._pending
        if last is None or last.number != max(self._layers.found) or not last.returned:
            return
        call = LayerCall(module, last.number + 1, args, kwargs, self._hidden)
        if call.given:
            self._pending = None
            call.find_stream(returned=1)
            self._connect(last, call)

    def _connect(self, before: LayerCall, call: LayerCall) -> None:
        """Find the returned parts whose sum entered the next module, and judge the layer with them."""
        found = before.returned
        entered = sum_of(on_host(call.given[where]) for where in call.stream)
        for parts in [*([where] for where in found), *([list(found)] if len(found) == 2 else [])]:
            total = sum_of(found[where] for where in parts)
            if total.shape == entered.shape and relative_error(total, entered) < EXACT:
                self._parts[type(before.module)] = parts
                self._judge(before, parts)
                return
        raise UnsupportedModel(
            f"{before.name} cannot be tapped: of the {len(found)} tensors that layer {before.number} returns, neither "
            "one nor the sum of two is what enters the next layer"
        )

    def _judge(self, call: LayerCall, parts: list[Where]) -> None:
        places = self.places[call.number] = {
            "resid_pre": stream_place(call.module, "before", call.stream),
            "resid_post": stream_place(call.module, "after", parts),
        }
        if {"attn_out", "mlp_out", "resid_mid"} & set(self._sites):
            inside, refused = InnerSites(call, parts).places()
            places |= inside
            for site, why in refused.items():
                if site in self._sites:
                    self.refused.setdefault(site, f"layer {call.number}: {why}")


def _settle_attention(layer: nn.Module, handles: contextlib.ExitStack) -> None:
    """Before there is a cache, attention returns memory that was never written: put the same numbers there."""

    def settle(_module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
        target = kwargs.get("output") if output is None else output
        if isinstance(target, Tensor) and target.is_floating_point():
            generator = torch.Generator().manual_seed(1)
            target.copy_(torch.randn(target.shape, generator=generator))

    for part in attention_layers(layer):
        handles.enter_context(part.register_forward_hook(settle, with_kwargs=True))


class InnerSites:
    """Finds the sites inside one layer whose stream parts are known."""

    def __init__(self, call: LayerCall, parts: list[Where]) -> None:
        self._call = call
        self._parts = parts
        self._candidates = call.candidates()
        self._entered = sum_of(on_host(call.inputs[where]) for where in call.stream)
        self._limit = _ROUNDINGS * torch.finfo(call.inputs[call.stream[0]].dtype).eps
        shape = self._entered.shape
        seed = call.number
        self._numbers = {place: integers(shape, seed, 20 + i) for i, place in enumerate(self._candidates)}
        self._base = self._call.run(self._candidates)
        self._with_more = {
            place: self._call.run(self._candidates, add={place: self._numbers[place]}) for place in self._candidates
        }
        self._outputs = [place for place in self._candidates if place.when == "after"]

    def places(self) -> tuple[dict[Site, Place], dict[Site, str]]:
        """Return the sites, and why others cannot be had."""
        name = self._call.name
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
        attention = next(iter(first or [place for place in addends if attention_layers(place.module)] or addends))
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
    """Return vLLM's own attention, Mamba and linear attention layers, which read the cache."""
    try:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    except ImportError:
        return []
    return [part for part in module.modules() if isinstance(part, AttentionLayerBase)]
