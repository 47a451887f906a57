"""Where the sites live in a transformers model: found by structure, then proven by running it.

The decoder is the ModuleList of `num_hidden_layers` modules. In each block, `attn_out` and `mlp_out` are what is added
to the stream: the output of the attention and of the MLP, of the norms behind them, or of the projection inside a
module that adds the stream itself, times the block's multiplier. The proof replaces the input of every block and what
it adds by small random integers, whose sums are exact in every dtype: each block must return their sum, and the next
block must be given what was returned. A block that does otherwise loses the sites that would be wrong, with the reason.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from steerscope.specs.errors import SteerscopeError, UnsupportedModel
from steerscope.specs.steering import Site

_MIXERS = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "conv", "mixer")  # of tokens
_MLP = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "ffn", "fc2")
_MIXER_NORMS = ("post_self_attn_layernorm", "post_norm1")
_MLP_NORMS = ("post_mlp_layernorm", "post_norm2", "post_feedforward_layernorm")
# Where one of these exists, `post_attention_layernorm` stands behind the attention and not before the MLP.
_NORMS_AROUND_MLP = ("post_feedforward_layernorm", "pre_mlp_layernorm")
_MULTIPLIERS = ("residual_multiplier", "residual_scale")
PROBE_TOKENS = 4
_STATEFUL = LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer
_LARGEST = 8  # of the integers: sums of a dozen of them are exact in bfloat16
_ROUNDING = 4  # tolerance in units of the dtype's eps, where multipliers make the sums inexact
K = TypeVar("K")  # whatever names a place


@dataclass(frozen=True, slots=True)
class Block:
    module: nn.Module
    attention: nn.Module | None
    mlp: nn.Module | None
    attn_addend: nn.Module | None
    mlp_addend: nn.Module | None
    multiplier: float = 1.0  # of both addends, applied behind these modules
    mlp_part: nn.Module | None = None  # a first part of mlp_out, added before the output of `mlp_addend` is


@dataclass(frozen=True, slots=True)
class Blocks:
    blocks: tuple[Block, ...]
    refused: dict[Site, str]  # site → why it cannot be had

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, layer: int) -> Block:
        return self.blocks[layer]


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden state of a module that returns it alone or first in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def with_first(output: Tensor | tuple[Tensor, ...], hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def block_input(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def with_input(args: tuple, kwargs: dict, hidden: Tensor) -> tuple[tuple, dict]:
    """The arguments of a block with another hidden state."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def find_blocks(model: PreTrainedModel) -> Blocks:
    """Find the decoder blocks and prove the sites; an unknown model is refused with what was looked for."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModel(f"{type(model).__name__} lies on several devices ({names}): load it on one")
    _check_state(model)
    blocks = tuple(block_of(module) for module in decoder_layers(model))
    try:
        return Blocks(blocks, _refused(model, blocks))
    except SteerscopeError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be read: {type(error).__name__}: {error}") from error


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    decoder = model.get_decoder()  # without the towers of images and audio, which may have as many layers
    lists = {name: m for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList)}
    fits = {
        name: m
        for name, m in lists.items()
        if len(m) == count and all(_named(block, *_MIXERS) is not None for block in m)
    }
    if len(fits) != 1:
        seen = ", ".join(f"{name} ({len(m)} × {type(m[0]).__name__})" for name, m in lists.items() if len(m)) or "none"
        raise UnsupportedModel(
            f"{type(model).__name__} is not supported: looked for one ModuleList of {count} decoder blocks "
            f"(num_hidden_layers) with an attention module named {', '.join(_MIXERS)}; found {len(fits)} that fit. "
            f"Module lists seen: {seen}"
        )
    return next(iter(fits.values()))


def block_of(module: nn.Module) -> Block:
    attention = _named(module, *_MIXERS)
    mlp = _named(module, *_MLP)
    attn_names = _MIXER_NORMS
    if _named(module, *_NORMS_AROUND_MLP) is not None:
        attn_names = (*attn_names, "post_attention_layernorm")
    attn_addend = _named(module, *attn_names) or _projection(attention)
    mlp_addend = _named(module, *_MLP_NORMS) or _projection(mlp)
    mlp_part = None
    if per_layer := _named(module, "post_per_layer_input_norm"):  # Gemma 4 adds this to what the MLP has added
        mlp_part = mlp_addend
        mlp_addend = per_layer
    if (experts := _named(module, "block_sparse_moe")) and (shared := _named(module, "shared_mlp")):  # Granite 4
        mlp_part = experts
        mlp_addend = shared
    found = [value for name in _MULTIPLIERS if isinstance(value := getattr(module, name, None), int | float)]
    multiplier = float(found[0]) if found else 1.0
    return Block(module, attention, mlp, attn_addend, mlp_addend, multiplier, mlp_part)


def _named(module: nn.Module, *names: str) -> nn.Module | None:
    return next((m for name in names if isinstance(m := getattr(module, name, None), nn.Module)), None)


def _projection(module: nn.Module | None) -> nn.Module | None:
    """The module itself, or its output projection where it adds the stream to it (BLOOM, MPT)."""
    if module is None or "residual" not in inspect.signature(module.forward).parameters:
        return module
    return next((m for m in reversed(list(module.children())) if isinstance(m, nn.Linear)), None)


def _check_state(model: PreTrainedModel) -> None:
    """Refuse a model that remembers more of a text than keys and values."""
    name = type(model).__name__
    try:
        cache = getattr(forward(model, use_cache=True), "past_key_values", None)
    except Exception:
        return  # what is looked for next says what is wrong
    if type(cache) is not DynamicCache:
        found = "no keys and values" if cache is None else f"a {type(cache).__name__}"
        raise UnsupportedModel(f"{name} is not supported: it returns {found} where a DynamicCache was looked for")
    known = (DynamicLayer, DynamicSlidingWindowLayer, *_STATEFUL)
    odd = {i: type(layer).__name__ for i, layer in enumerate(cache.layers) if type(layer) not in known}
    if odd:
        raise UnsupportedModel(
            f"{name} is not supported: layers {', '.join(map(str, odd))} keep of a text what the batch of the "
            f"transformers engine cannot ({', '.join(sorted(set(odd.values())))})"
        )
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(cache.layers) != count:
        raise UnsupportedModel(
            f"{name} is not supported: it keeps keys and values of {len(cache.layers)} of its {count} layers (the "
            "others share them), and the batch of the transformers engine needs those of every layer"
        )


def keep_input(place: dict[K, Tensor], i: K) -> Callable[[nn.Module, tuple, dict], None]:
    """A pre-hook that keeps a copy of what a block is given."""

    def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        place[i] = block_input(args, kwargs).clone()

    return hook


def keep_output(place: dict[K, Tensor], i: K) -> Callable[[nn.Module, tuple, Tensor | tuple], None]:
    """A hook that keeps a copy of the hidden state a module returns."""

    def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        place[i] = first(output).clone()

    return hook


# --- the proof


@dataclass(slots=True)
class Probe:
    """Integers [layers, tokens, hidden] in the place of what every block is given and adds, and what became of them."""

    stream: Tensor
    attn: Tensor
    mlp: Tensor
    part: Tensor  # of a block with `mlp_part`
    arrived: dict[int, Tensor] = field(default_factory=dict)  # what a block was given before it was replaced
    returned: dict[int, Tensor] = field(default_factory=dict)
    by_itself: dict[int, Tensor] = field(default_factory=dict)  # what the MLP returned before it was replaced

    @classmethod
    def of(cls, model: PreTrainedModel, layers: int, seed: int = 0) -> "Probe":
        hidden = model.config.get_text_config(decoder=True).hidden_size
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-_LARGEST, _LARGEST + 1, (4, layers, PROBE_TOKENS, hidden), generator=generator)
        stream, attn, mlp, part = numbers.to(model.device, model.dtype).unbind()
        return cls(stream, attn, mlp, part)

    def moved(self, by: Tensor) -> "Probe":
        """The same streams behind the attention, with other inputs."""
        return Probe(self.stream + by, self.attn - by, self.mlp, self.part)

    @contextlib.contextmanager
    def inside(self, blocks: tuple[Block, ...]) -> Iterator[None]:
        """Replace and record in the forwards inside the block."""
        with contextlib.ExitStack() as hooks:
            for i, block in enumerate(blocks):
                hooks.enter_context(block.module.register_forward_pre_hook(self._enter(i), with_kwargs=True))
                addends = (block.attn_addend, self.attn), (block.mlp_part, self.part), (block.mlp_addend, self.mlp)
                for module, values in addends:
                    if module is not None:
                        keep = module is (block.mlp_part or block.mlp_addend)
                        replace = self._replace(i, values, block.multiplier, keep)
                        hooks.enter_context(module.register_forward_hook(replace))
                hooks.enter_context(block.module.register_forward_hook(keep_output(self.returned, i)))
            yield

    def terms(self, i: int, block: Block) -> Tensor:
        """What block `i` should sum up, in float64: [stream, attention, MLP; tokens; hidden]."""
        mlp = self.mlp[i] if block.mlp_part is None else self.mlp[i] + self.part[i]
        return torch.stack([self.stream[i], self.attn[i], mlp]).double()

    def _enter(self, i: int) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            hidden = block_input(args, kwargs)
            if hidden.shape != (1, *self.stream[i].shape):
                raise UnsupportedModel(
                    f"block {i} ({type(module).__name__}) is not a residual block: it is given shape "
                    f"{list(hidden.shape)}; looked for [batch, tokens, hidden]"
                )
            self.arrived[i] = hidden[0].clone()
            return with_input(args, kwargs, self.stream[i].unsqueeze(0).to(hidden.dtype))

        return hook

    def _replace(
        self, i: int, values: Tensor, multiplier: float, keep: bool
    ) -> Callable[[nn.Module, tuple, Tensor | tuple], Tensor | tuple | None]:
        def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple | None:
            hidden = first(output)
            if not isinstance(hidden, Tensor) or hidden.numel() != values[i].numel():
                return None
            if keep:
                self.by_itself[i] = hidden.reshape(values[i].shape).clone()
            return with_first(output, (values[i] / multiplier).to(hidden.dtype).view(hidden.shape))

        return hook


def forward(model: PreTrainedModel, use_cache: bool = False) -> object:
    """Run a few tokens; which ones does not matter."""
    with torch.no_grad():
        return model(input_ids=torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0), use_cache=use_cache)


def stream_scale(block: Block) -> float:
    """What a block multiplies the whole stream by at its end (Gemma 4)."""
    scale = getattr(block.module, "layer_scalar", None)
    return float(scale) if isinstance(scale, Tensor) and scale.numel() == 1 else 1.0


def other_than_sum(found: Tensor, terms: Tensor, eps: float, exact: bool) -> str | None:
    """Return None where `found` is the sum of `terms`, else what it is instead.

    Without multipliers it must be, bit by bit. Else rounding is averaged out: each term must be in it once, within the
    dtype's precision, and the rest must be rounding of numbers as large as the terms.
    """
    if exact and torch.equal(found, terms.sum(0)):
        return None
    columns = terms.flatten(1).T.cpu()
    shares = torch.linalg.lstsq(columns, found.flatten().unsqueeze(1).cpu()).solution
    rest = float((found.flatten().cpu() - (columns @ shares)[:, 0]).norm() / columns[:, 1].norm())
    if not exact and bool((shares - 1).abs().max() <= eps) and rest <= _ROUNDING * eps:
        return None
    names = ("its input", "attention", "MLP")
    parts = " + ".join(f"{float(share):.3g} × {name}" for share, name in zip(shares, names, strict=True))
    return parts + (" + something else" if rest > _ROUNDING * eps else "")


def _refused(model: PreTrainedModel, blocks: tuple[Block, ...]) -> dict[Site, str]:
    """Sites that cannot be had. Both runs have the same streams behind the attention, but other block inputs."""
    probe = Probe.of(model, len(blocks))
    moved = probe.moved(Probe.of(model, len(blocks), seed=1).stream)
    for run in (probe, moved):
        with run.inside(blocks):
            forward(model)
        for i, block in enumerate(blocks):
            _check_unbroken(i, type(block.module).__name__, model.dtype, run)
    for i, block in enumerate(blocks):
        if why := _why_not_additive(i, block, probe):
            return dict.fromkeys(("attn_out", "mlp_out", "resid_mid"), why)
    if any(_is_parallel(probe.by_itself[i], moved.by_itself[i]) for i in range(len(blocks))):
        why = "attention and MLP read the same input (parallel block), so there is no state in between"
        return {"resid_mid": why}
    return {}


def _check_unbroken(i: int, name: str, dtype: torch.dtype, run: Probe) -> None:
    out = run.returned.get(i)
    if out is None or out.shape != (1, *run.stream[i].shape):
        found = "it did not run" if out is None else f"it returns shape {list(out.shape)}"
        raise UnsupportedModel(
            f"block {i} ({name}) is not a residual block: {found}; looked for [batch, tokens, hidden]"
        )
    if out.dtype != dtype:
        raise UnsupportedModel(f"block {i} ({name}) computes in {out.dtype}, the model in {dtype}")
    if i and not torch.equal(run.returned[i - 1][0], run.arrived[i]):
        raise UnsupportedModel(f"the input of block {i} ({name}) is not the output of block {i - 1}")


def _why_not_additive(i: int, block: Block, run: Probe) -> str | None:
    name = type(block.module).__name__
    if block.attn_addend is None or block.mlp_addend is None:
        sought = " or ".join((*_MIXERS, *_MLP))
        return f"no attention and MLP module was found in layer {i}, {name} (looked for {sought})"
    if i not in run.by_itself:
        return f"the MLP of layer {i} ({name}) does not return a hidden state"
    scale = stream_scale(block)
    found = run.returned[i][0].double() / scale
    eps = torch.finfo(run.returned[i].dtype).eps
    instead = other_than_sum(found, run.terms(i, block), eps, exact=scale == block.multiplier == 1)
    if instead is None:
        return None
    return f"what layer {i} ({name}) adds to the stream is not its attention's and MLP's output: it returns {instead}"


def _is_parallel(mlp: Tensor, moved: Tensor) -> bool:
    """Whether the MLP heeds which part of the stream came from the attention: it reads the block's input alone.

    The typical token decides: rounding may send one of them to another expert.
    """
    change = (mlp.double() - moved.double()).norm(dim=-1) / mlp.double().norm(dim=-1)
    return bool(change.median() > 0.1)
