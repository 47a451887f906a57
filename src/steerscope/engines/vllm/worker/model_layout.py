"""Find a vLLM model's decoder layers, and put taps where `layer_proof` has shown the sites to be.

Hooks are traced by the compiler like the layer's own code when they are there before the first trace.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from steerscope.core.slot_table import Key
from steerscope.engines.vllm.worker.tap import Tap, TappedNorm
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

_LISTS = ("layers", "h", "blocks")  # what decoder layers are called
# Layers whose (delta, residual) is all that the next layer's input norm, or the model's final one, is given.
_NORM_FOLLOWS = (
    "LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer",
    "GemmaDecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer",
)  # fmt: skip
_RMS_NORMS = ("RMSNorm", "GemmaRMSNorm")

# Where a tensor lies in a call: the number of a positional argument or of a returned value, the name of a keyword
# argument, or None for the only value that is returned.
Where = int | str | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tap of one site acts: before or after a module's forward, on `delta`, of the stream delta + residual."""

    module: nn.Module
    when: Literal["before", "after"]
    delta: Where
    residual: Where = None
    paired: bool = False  # there is a residual
    scale: float = 1.0  # the layer adds `scale · delta` to the stream

    def tensors(self, values: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return delta and residual of one call, with the values that it was given or has returned."""
        delta = _tensor_at(self.delta, values, kwargs)
        return delta, _tensor_at(self.residual, values, kwargs) if self.paired else None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    module: nn.Module
    places: Mapping[Site, Place] = field(default_factory=dict)
    next_norm: tuple[nn.Module, str] | None = None  # its owner and its name: the norm over what leaves the layer


@dataclass(frozen=True, slots=True)
class Layers:
    name: str
    owner: nn.Module  # runs the layers one after the other
    found: dict[int, Layer]  # the layers of this pipeline stage


def find_layers(model: nn.Module, count: int) -> Layers:
    """Return the list of `count` decoder layers, without the places of their sites."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and name.rpartition(".")[2] in _LISTS
    ]
    lists = [(name, module) for name, module in lists if "vision" not in name and "visual" not in name]
    if len(lists) != 1:
        names = ", ".join(name for name, _ in lists) or "none"
        raise UnsupportedModel(
            f"{type(model).__name__}: looked for one list of {count} decoder layers called "
            f"{', '.join(_LISTS)}, found {names}"
        )
    name, modules = lists[0]
    present = {i: module for i, module in enumerate(modules) if type(module).__name__ != "PPMissingLayer"}
    owner = model.get_submodule(name.rpartition(".")[0])
    found = {i: Layer(module, next_norm=_next_norm(i, present, owner)) for i, module in present.items()}
    return Layers(name, owner, found)


def _next_norm(number: int, layers: Mapping[int, nn.Module], owner: nn.Module) -> tuple[nn.Module, str] | None:
    """Where the model's own code is known, and the norm is on this pipeline stage."""
    following = layers.get(number + 1)
    holder, name = (owner, "norm") if following is None else (following, "input_layernorm")
    norm = getattr(holder, name, None)
    plain = type(norm).__name__ in _RMS_NORMS and getattr(norm, "variance_size_override", None) is None
    return (holder, name) if plain and type(layers[number]).__name__ in _NORM_FOLLOWS else None


def attach(layers: Layers, taps: Mapping[Key, Tap], norms: bool = True) -> None:
    """Put the taps in: before the norm that follows, or as hooks, which act in place and return nothing."""
    for (number, site), tap in taps.items():
        layer = layers.found[number]
        if site == "resid_post" and norms and layer.next_norm is not None:
            holder, name = layer.next_norm
            setattr(holder, name, TappedNorm(getattr(holder, name), tap))
        else:
            place = layer.places[site]
            name = f"steerscope_{site}"
            setattr(place.module, name, tap)  # as an attribute the compiler sees the same code in every layer
            hook_at(place, functools.partial(_visit, name))


def hook_at(place: Place, visit: Callable[[Place, Tensor, Tensor | None], None]) -> Any:
    """Call `visit(place, delta, residual)` in every forward of the place's module; return the hook's handle."""
    if place.when == "before":

        def before(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            visit(place, *place.tensors(args, kwargs))

        return place.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
        visit(place, *place.tensors(output, kwargs))

    return place.module.register_forward_hook(after, with_kwargs=True)


def _visit(name: str, place: Place, delta: Tensor, residual: Tensor | None) -> None:
    tap = getattr(place.module, name)
    if place.scale == 1.0:
        tap(delta, residual)
        return
    added = delta * place.scale
    before = added.clone()
    tap(added, residual)
    delta += (added - before) / place.scale  # zero, and so no change of the model, unless the tap steers


def _tensor_at(where: Where, values: Any, kwargs: dict[str, Any]) -> Tensor:
    if isinstance(where, str):
        return kwargs[where]
    return values if where is None else values[where]


def returned(layer: nn.Module) -> str:
    """Return what a layer's forward is annotated to return."""
    return str(inspect.signature(layer.forward).return_annotation).replace("torch.", "")
