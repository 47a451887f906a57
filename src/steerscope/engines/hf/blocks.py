"""Where the sites live in a transformers model: found by structure, then proven by running it.

The decoder is the ModuleList of `num_hidden_layers` modules. In each block, `attn_out` and `mlp_out` are the outputs of
the modules whose output is added to the stream: the attention and the MLP themselves, or the norms behind them where
the block has `post_feedforward_layernorm` (Gemma 2/3, OLMo 2). A dry run then checks that the stream is unbroken from
block to block and that resid_pre + attn_out + mlp_out = resid_post; a block that does otherwise (scaled addends,
parallel branches) loses the sites that would be wrong, with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "feed_forward", "block_sparse_moe")
_PROBE_TOKENS = 4
K = TypeVar("K")  # whatever names a place


@dataclass(frozen=True, slots=True)
class Block:
    module: nn.Module
    attention: nn.Module | None
    mlp: nn.Module | None
    attn_addend: nn.Module | None
    mlp_addend: nn.Module | None


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


def find_blocks(model: PreTrainedModel) -> Blocks:
    """Find the decoder blocks and prove the sites; an unknown model is refused with what was looked for."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModel(f"{type(model).__name__} lies on several devices ({names}): load it on one")
    modules = decoder_layers(model)
    blocks = tuple(block_of(module) for module in modules)
    try:
        stream = _Stream(model, blocks)
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be read: {type(error).__name__}: {error}") from error
    stream.check_unbroken()
    refused: dict[Site, str] = {}
    why = stream.why_not_additive()
    if why:
        refused = dict.fromkeys(("attn_out", "mlp_out", "resid_mid"), why)
    elif stream.is_parallel():
        refused["resid_mid"] = "attention and MLP read the same input (parallel block), so there is no state in between"
    return Blocks(blocks, refused)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    fits = {
        name: m
        for name, m in lists.items()
        if len(m) == count and any(isinstance(getattr(m[0], attention, None), nn.Module) for attention in _ATTENTION)
    }
    if len(fits) != 1:
        seen = ", ".join(f"{name} ({len(m)} × {type(m[0]).__name__})" for name, m in lists.items() if len(m)) or "none"
        raise UnsupportedModel(
            f"{type(model).__name__} is not supported: looked for one ModuleList of {count} decoder blocks "
            f"(num_hidden_layers) with an attention module named {', '.join(_ATTENTION)}; found {len(fits)} that fit. "
            f"Module lists seen: {seen}"
        )
    return next(iter(fits.values()))


def block_of(module: nn.Module) -> Block:
    def named(*names: str) -> nn.Module | None:
        return next((m for name in names if isinstance(m := getattr(module, name, None), nn.Module)), None)

    attention, mlp = named(*_ATTENTION), named(*_MLP)
    if named("post_feedforward_layernorm") is not None:
        return Block(module, attention, mlp, named("post_attention_layernorm"), named("post_feedforward_layernorm"))
    return Block(module, attention, mlp, attention, mlp)


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


class _Stream:
    """What a few tokens look like at every block, recorded with plain hooks."""

    def __init__(self, model: PreTrainedModel, blocks: tuple[Block, ...]) -> None:
        self.model, self.blocks = model, blocks
        self.before: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        self.attn: dict[int, Tensor] = {}
        self.mlp: dict[int, Tensor] = {}
        handles = []
        for i, block in enumerate(blocks):
            handles.append(block.module.register_forward_pre_hook(keep_input(self.before, i), with_kwargs=True))
            handles.append(block.module.register_forward_hook(keep_output(self.after, i)))
            for module, place in ((block.attn_addend, self.attn), (block.mlp_addend, self.mlp)):
                if module is not None:
                    handles.append(module.register_forward_hook(keep_output(place, i)))
        self._run(handles)

    def _run(self, handles: list) -> None:
        ids = torch.arange(_PROBE_TOKENS, device=self.model.device).unsqueeze(0)
        try:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    def check_unbroken(self) -> None:
        name = type(self.blocks[0].module).__name__
        for i in range(len(self.blocks)):
            out = self.after.get(i)
            if out is None or not isinstance(out, Tensor) or out.dim() != 3 or out.shape != self.before[i].shape:
                found = "it did not run" if out is None else f"it returns shape {list(out.shape)}"
                raise UnsupportedModel(
                    f"block {i} ({name}) is not a residual block: {found}; looked for [batch, tokens, hidden]"
                )
            if out.dtype != self.model.dtype:
                raise UnsupportedModel(f"block {i} ({name}) computes in {out.dtype}, the model in {self.model.dtype}")
            if i and not torch.equal(self.after[i - 1], self.before[i]):
                raise UnsupportedModel(f"the input of block {i} ({name}) is not the output of block {i - 1}")

    def why_not_additive(self) -> str | None:
        name = type(self.blocks[0].module).__name__
        for i, block in enumerate(self.blocks):
            if i not in self.attn or i not in self.mlp:
                sought = " or ".join((*_ATTENTION, *_MLP))
                return f"no attention and MLP module was found in {type(block.module).__name__} (looked for {sought})"
            if self.attn[i].shape != self.before[i].shape or self.mlp[i].shape != self.before[i].shape:
                return f"the attention or MLP of {name} does not return a hidden state"
            total = self.before[i].double() + self.attn[i].double() + self.mlp[i].double()
            error = (total - self.after[i].double()).norm() / self.after[i].double().norm()
            if error > 8 * torch.finfo(self.after[i].dtype).eps:
                return f"what layer {i} ({name}) adds to the stream is not its attention's and MLP's output"
        return None

    def is_parallel(self) -> bool:
        """Whether a change of attn_out leaves the MLP's input alone (looked at in the first block)."""
        block = self.blocks[0]
        assert block.mlp is not None
        assert block.attn_addend is not None
        seen: list[Tensor] = []

        def read(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            seen.append(block_input(args, kwargs).clone())

        def push(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> object:
            hidden = first(output)
            ramp = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device, dtype=hidden.dtype)
            return with_first(output, hidden + ramp * (1 + hidden.abs().max()))

        self._run([block.mlp.register_forward_pre_hook(read, with_kwargs=True)])
        handle = block.mlp.register_forward_pre_hook(read, with_kwargs=True)
        self._run([handle, block.attn_addend.register_forward_hook(push)])
        return torch.equal(seen[0], seen[1])
