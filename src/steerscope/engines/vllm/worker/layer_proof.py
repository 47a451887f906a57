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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerscope.engines.vllm.worker.inner_sites import InnerSites, attention_layers
from steerscope.engines.vllm.worker.layer_call import (
    EXACT,
    ExaminedLayer,
    LayerCall,
    by_place,
    integers,
    on_host,
    relative_error,
    stream_inputs,
    stream_place,
    stream_shaped,
    sum_of,
)
from steerscope.engines.vllm.worker.model_layout import Layers, Place, Where
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site


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
        self._layers, self._hidden, self._sites = layers, hidden, sites
        self.places: dict[int, dict[Site, Place]] = {}
        self.refused: dict[Site, str] = {}
        self._pending: ExaminedLayer | None = None
        self._parts: dict[type, list[Where]] = {}  # by class of layer: the returned parts that are the stream

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Examine every layer when the dummy batch comes to it."""
        handles: list[RemovableHandle] = []
        for number, layer in self._layers.found.items():
            handles += _settle_attention(layer.module)
            handles.append(layer.module.register_forward_pre_hook(self._before_layer(number), with_kwargs=True))
            handles.append(layer.module.register_forward_hook(self._after_layer))
        for child in self._layers.owner.children():
            if not isinstance(child, nn.ModuleList):
                handles.append(child.register_forward_pre_hook(self._behind_layers, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self, run: Callable[[], object]) -> None:
        """Judge a last layer that nothing of its owner follows as the others of its class are. Attention runs only
        within a forward of the model, so another dummy batch is that forward."""
        last, self._pending = self._pending, None
        if last is not None:
            parts = self._parts.get(last.kind)
            if parts is None:
                raise UnsupportedModel(
                    f"{last.kind.__name__} cannot be tapped: no module behind layer {last.number} shows which "
                    "of the tensors that it returns is the residual stream"
                )
            first = self._layers.found[min(self._layers.found)].module
            handles = _settle_attention(last.call.module)
            handles.append(first.register_forward_pre_hook(lambda *_: self._judge(last, parts)))
            try:
                with torch.inference_mode():
                    run()
            finally:
                for handle in handles:
                    handle.remove()
        for number, layer in self._layers.found.items():
            if number not in self.places:
                raise UnsupportedModel(f"{type(layer.module).__name__} of layer {number} did not run in a dummy batch")

    # --- in the dummy batch

    def _before_layer(self, number: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            examined = self._examine(number, module, args, kwargs)
            if self._pending is not None:
                self._connect(self._pending, examined.call, examined.inputs)
            self._pending = examined

        return hook

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
        call = LayerCall(module, args, kwargs, self._hidden, last.number + 1)
        if call.given:
            self._pending = None
            self._connect(last, call, stream_inputs(call, returned=1))

    def _connect(self, before: ExaminedLayer, call: LayerCall, inputs: list[Where]) -> None:
        """Find the returned parts whose sum entered the next module, and judge the layer with them."""
        found, entered = before.returned, sum_of(on_host(call.given[where]) for where in inputs)
        for parts in [*([where] for where in found), *([list(found)] if len(found) == 2 else [])]:
            total = sum_of(found[where] for where in parts)
            if total.shape == entered.shape and relative_error(total, entered) < EXACT:
                self._parts[before.kind] = parts
                self._judge(before, parts)
                return
        raise UnsupportedModel(
            f"{before.kind.__name__} cannot be tapped: of the {len(found)} tensors that layer {before.number} returns, "
            "neither one nor the sum of two is what enters the next layer"
        )

    def _examine(self, number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> ExaminedLayer:
        call = LayerCall(module, args, kwargs, self._hidden, number)
        if not call.given:
            raise UnsupportedModel(
                f"{type(module).__name__} cannot be tapped: layer {number} is given no tensor [tokens, {self._hidden}] "
                "(layers of vLLM's Transformers backend carry a batch dimension)"
            )
        inside = bool({"attn_out", "mlp_out", "resid_mid"} & set(self._sites))
        return ExaminedLayer(number, call, stream_inputs(call), call.candidates() if inside else [])

    def _judge(self, examined: ExaminedLayer, parts: list[Where]) -> None:
        module = examined.call.module
        places: dict[Site, Place] = {
            "resid_pre": stream_place(module, "before", examined.inputs),
            "resid_post": stream_place(module, "after", parts),
        }
        self.places[examined.number] = places
        if examined.candidates:
            inside, refused = InnerSites(examined, parts).places()
            places |= inside
            for site, why in refused.items():
                if site in self._sites:
                    self.refused.setdefault(site, f"layer {examined.number}: {why}")


def _settle_attention(layer: nn.Module) -> list[RemovableHandle]:
    """Before there is a cache, attention returns memory that was never written: put the same numbers there."""

    def settle(_module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
        target = kwargs.get("output") if output is None else output
        if isinstance(target, Tensor) and target.is_floating_point():
            generator = torch.Generator().manual_seed(1)
            target.copy_(torch.randn(target.shape, generator=generator))

    return [part.register_forward_hook(settle, with_kwargs=True) for part in attention_layers(layer)]
