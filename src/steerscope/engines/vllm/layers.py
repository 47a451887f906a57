"""Where the sites of a vLLM decoder layer are, found by structure, and the hooks that put taps there.

A layer of vLLM passes the stream on as two tensors whose sum it is: `delta`, what was added last, and `residual`, the
rest. Hooks are traced by the compiler like the layer's own code when they are there before the first trace.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from steerscope.engines.vllm.tap import Tap, TappedNorm
from steerscope.residual.table import Key
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

_LISTS = ("layers", "h", "blocks")  # what decoder layers are called
_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward")
# Layers whose (delta, residual) is all that the next layer's input norm, or the model's final one, is given.
_NORM_FOLLOWS = (
    "LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer",
    "GemmaDecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer",
)  # fmt: skip
_RMS_NORMS = ("RMSNorm", "GemmaRMSNorm")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; a module is None where its site cannot be had."""

    module: nn.Module
    attention: nn.Module | None  # its output is added to the stream
    feed_forward: nn.Module | None  # likewise
    middle: nn.Module | None  # the norm between the two, called with (delta, residual)
    next_norm: tuple[nn.Module, str] | None = None  # whose, and its name: the norm over what leaves the layer


@dataclass(frozen=True, slots=True)
class Layers:
    name: str
    found: dict[int, Layer]  # the layers of this pipeline stage
    refused: dict[Site, str] = field(default_factory=dict)


def find_layers(model: nn.Module, count: int) -> Layers:
    """The list of `count` decoder layers, and the sites inside them."""
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
    found = {i: replace(_layer(module), next_norm=_next_norm(i, present, owner)) for i, module in present.items()}
    refused: dict[Site, str] = {}
    sites: dict[Site, str] = {"attn_out": "attention", "mlp_out": "feed_forward", "resid_mid": "middle"}
    for site, attribute in sites.items():
        bare = [layer.module for layer in found.values() if getattr(layer, attribute) is None]
        if bare:
            refused[site] = f"{type(bare[0]).__name__} does not show what it adds to the stream there"
    return Layers(name, found, refused)


def _layer(module: nn.Module) -> Layer:
    get = functools.partial(getattr, module)
    if hasattr(module, "residual_multiplier"):  # what is added is scaled after the modules we could tap
        return Layer(module, None, None, None)
    if hasattr(module, "pre_feedforward_layernorm") and hasattr(module, "post_feedforward_layernorm"):
        return Layer(module, get("post_attention_layernorm", None), get("post_feedforward_layernorm"),
                     get("pre_feedforward_layernorm"))  # fmt: skip
    feed = next((get(name) for name in _FEED_FORWARD if hasattr(module, name)), None)
    return Layer(module, get("self_attn", None), feed, get("post_attention_layernorm", None))


def _next_norm(number: int, layers: Mapping[int, nn.Module], owner: nn.Module) -> tuple[nn.Module, str] | None:
    """Where the model's own code is known, and the norm is on this pipeline stage."""
    following = layers.get(number + 1)
    holder, name = (owner, "norm") if following is None else (following, "input_layernorm")
    norm = getattr(holder, name, None)
    plain = type(norm).__name__ in _RMS_NORMS and getattr(norm, "variance_size_override", None) is None
    return (holder, name) if plain and type(layers[number]).__name__ in _NORM_FOLLOWS else None


def in_norms(layers: Layers, keys: Iterable[Key]) -> bool:
    """Whether every one of these taps can be a part of the norm that follows it."""
    return all(site == "resid_post" and layers.found[layer].next_norm is not None for layer, site in keys)


def attach(layers: Layers, taps: Mapping[Key, Tap], norms: bool = True) -> None:
    """Put the taps in: before the norm that follows, or as hooks, which act in place and return nothing."""
    for (number, site), tap in taps.items():
        layer = layers.found[number]
        if site == "resid_post" and norms and layer.next_norm is not None:
            holder, name = layer.next_norm
            setattr(holder, name, TappedNorm(getattr(holder, name), tap))
        elif site == "resid_post":
            _hook(layer.module, site, tap, _after_layer, before=False)
        elif site == "resid_pre":
            _hook(layer.module, site, tap, _before_layer, before=True)
        elif site == "resid_mid":
            _hook(layer.middle, site, tap, _before_norm, before=True)
        else:
            _hook(layer.attention if site == "attn_out" else layer.feed_forward, site, tap, _after_addend, before=False)


def _hook(module: nn.Module | None, site: Site, tap: Tap, hook: Callable, before: bool) -> None:
    assert module is not None
    name = f"steerscope_{site}"
    setattr(module, name, tap)  # as an attribute the compiler sees the same code in every layer
    if before:
        module.register_forward_pre_hook(functools.partial(hook, name), with_kwargs=True)
    else:
        module.register_forward_hook(functools.partial(hook, name))


def _after_layer(name: str, module: nn.Module, _args: tuple, output: object) -> None:
    if isinstance(output, Tensor):
        getattr(module, name)(output, None)
    elif isinstance(output, tuple) and len(output) == 2 and (output[1] is None or isinstance(output[1], Tensor)):
        getattr(module, name)(output[0], output[1])
    else:
        raise UnsupportedModel(f"{type(module).__name__} returns neither a tensor nor (delta, residual)")


def _before_layer(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
    residual = kwargs["residual"] if "residual" in kwargs else args[2] if len(args) > 2 else None
    getattr(module, name)(hidden, residual)


def _before_norm(name: str, module: nn.Module, args: tuple, _kwargs: dict) -> None:
    if len(args) != 2:
        raise UnsupportedModel(f"{type(module).__name__} before the feed-forward is not called with (delta, residual)")
    getattr(module, name)(args[0], args[1])


def _after_addend(name: str, module: nn.Module, _args: tuple, output: object) -> None:
    addend = output[0] if isinstance(output, tuple) else output
    getattr(module, name)(addend, None)


def returned(layer: nn.Module) -> str:
    """What a layer's forward says it returns; the hook judges what it really does."""
    return str(inspect.signature(layer.forward).return_annotation).replace("torch.", "")
