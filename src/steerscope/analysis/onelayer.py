"""One decoder layer of a checkpoint at a time, run by the model's own transformers code in float32.

The decoder is built on `meta`, where it costs nothing; the layer asked for gets its weights, all others hand the stream
on. So norms, activations, biases, head layout, scalings and RoPE are those of the model's class, never a copy of them.
Rows are put in as the layer's input. Either the MLP or the attention adds to the stream, the other adds nothing; the
attention's own function is replaced by one that keeps queries, keys and values and answers with what is asked of it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.engines.hf.blocks import Block, block_of, decoder_layers, first, keep_output, with_first
from steerscope.specs.errors import UnsupportedModel

_ATTENTION = "steerscope_onelayer"
_TOLERANCE = 1e-5  # relative, of float32 sums
_ROWS = 2048  # in one pass: bounds the memory of the MLP's inner rows


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's heads make of rows: queries [rows, heads, dim]; keys and values [rows, key heads, dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    softcap: float | None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def part(self, rows: slice) -> "Heads":
        return Heads(self.queries[rows], self.keys[rows], self.values[rows], self.scaling, self.softcap)


@dataclass(frozen=True, slots=True)
class Writing:
    """What heads write: `matrix` [heads, dim, hidden] and `bias` [hidden] of the output projection."""

    matrix: Tensor
    bias: Tensor


class _Skipped(nn.Module):
    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return hidden_states


class _PassedBy(nn.Module):
    """Stand-in for embeddings, whose inputs are numbers of tokens or positions, and for the final norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Stand-in for transformers' attention: queries are [1, heads, rows, dim], the answer [1, rows, heads, dim]."""
    answer: Callable[[Heads], Tensor] = module.steerscope_answer  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scaling, softcap = (
        float(given) if isinstance(given, int | float) else None for given in map(options.get, ("scaling", "softcap"))
    )
    heads = Heads(queries, keys, values, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
    return answer(heads).unsqueeze(0), None


AttentionInterface.register(_ATTENTION, _attend)


class OneLayer:
    """A decoder whose layers have weights only within `at(layer)`."""

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        config = checkpoint.config
        with torch.device("meta"):
            self._model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation=_ATTENTION).eval()
        self._layers = decoder_layers(self._model)
        self._modules = list(self._layers)
        for name, child in list(self._model.named_children()):
            if child is self._layers:
                continue
            # What has weights comes before or behind the layers; RoPE has tables alone, which are computed again.
            if any(True for _ in child.parameters()):
                setattr(self._model, name, _PassedBy())
            elif any(True for _ in child.buffers()):
                setattr(self._model, name, type(child)(config=config).to(self.device))  # type: ignore[call-arg]
        for i in range(len(self._modules)):
            self._layers[i] = _Skipped()
        self._block: Block | None = None

    @contextmanager
    def at(self, layer: int) -> Iterator["OneLayer"]:
        module = self._modules[layer]
        weights = {name: tensor.to(self.device, torch.float32) for name, tensor in self.checkpoint.layer(layer).items()}
        try:
            module.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            what = " ".join(str(error).split())
            raise UnsupportedModel(f"layer {layer} of {self.checkpoint.name} does not fit its class: {what}") from None
        self._block = block_of(module)
        self._layers[layer] = module
        try:
            yield self
        finally:
            self._block = None
            self._layers[layer] = _Skipped()
            module.to("meta")

    def mlp(self, rows: Tensor) -> Tensor:
        """Return what the MLP adds to a stream of `rows` [n, hidden] while the attention adds nothing."""
        return torch.cat([self._run(part, _nothing, of_mlp=True) for part in rows.split(_ROWS)])

    def heads(self, rows: Tensor, positions: Tensor) -> Heads:
        """Return queries, keys and values of rows at `positions`, behind q/k norms and RoPE."""
        seen: list[Heads] = []

        def keep(heads: Heads) -> Tensor:
            seen.append(heads)
            return _nothing(heads)

        self._run(rows, keep, positions)
        return seen[0]

    def attention(self, rows: Tensor) -> Tensor:
        """Return what the attention adds to the stream of a token all of whose heads look at a token with `rows`."""
        return self._run(rows, lambda heads: heads.values.repeat_interleave(heads.group, 1))

    def writing(self) -> Writing:
        """Return the output projection (before a post-norm), read by sending unit vectors of every head through it."""
        hidden = self.checkpoint.hidden
        shape = self.heads(torch.ones(1, hidden), torch.zeros(1)).queries.shape[1:]
        size = shape.numel()
        units = torch.cat([torch.zeros(1, size), torch.eye(size)]).view(-1, *shape).to(self.device)
        kept: dict[int, Tensor] = {}
        handle = self._loaded()[1].register_forward_hook(keep_output(kept, 0))
        try:
            self._run(torch.ones(len(units), hidden), lambda _: units)
        finally:
            handle.remove()
        bias = kept[0][0, 0]
        return Writing((kept[0][0, 1:] - bias).view(*shape, -1), bias)

    def _loaded(self) -> tuple[Block, nn.Module, nn.Module, nn.Module]:
        """Return the block with weights, its attention, and what its attention and its MLP add to the stream."""
        block = self._block
        assert block is not None, "a layer is run inside `with … .at(layer)`"
        if block.attention is None or block.attn_addend is None or block.mlp_addend is None:
            raise UnsupportedModel(f"no attention and MLP were found in {type(block.module).__name__}")
        return block, block.attention, block.attn_addend, block.mlp_addend

    @torch.no_grad()
    def _run(
        self, rows: Tensor, answer: Callable[[Heads], Tensor], positions: Tensor | None = None, *, of_mlp: bool = False
    ) -> Tensor:
        """Run the decoder once; return what attention or MLP adds to the stream while the other adds nothing."""
        block, attention, silenced, kept = self._loaded()
        if not of_mlp:
            kept, silenced = silenced, kept
        stream = rows.to(self.device, torch.float32).unsqueeze(0)
        found: dict[str, Tensor] = {}

        def put_in(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

        with ExitStack() as hooks:
            for handle in (
                block.module.register_forward_pre_hook(put_in, with_kwargs=True),
                silenced.register_forward_hook(_silence),
                kept.register_forward_hook(keep_output(found, "added")),
                block.module.register_forward_hook(keep_output(found, "after")),
            ):
                hooks.callback(handle.remove)
            if not of_mlp and block.mlp is not None:
                block.mlp.forward = torch.zeros_like  # its output is not used, and it is most of the work
                hooks.callback(delattr, block.mlp, "forward")
            attention.steerscope_answer = answer  # type: ignore[assignment]
            at = (torch.zeros(len(rows)) if positions is None else positions).to(self.device, torch.long).unsqueeze(0)
            name = type(block.module).__name__
            try:
                self._model(inputs_embeds=stream, position_ids=at, use_cache=False)
            except (AttributeError, KeyError, TypeError) as error:  # what was taken out of the model is needed
                raise UnsupportedModel(f"{name} cannot be run alone: {type(error).__name__}: {error}") from error
        wrong = (stream + found["added"] - found["after"]).norm() > _TOLERANCE * found["after"].norm()
        if wrong:
            raise UnsupportedModel(f"what {name} adds to the stream is not its attention's and MLP's output")
        return found["added"][0]


def _nothing(heads: Heads) -> Tensor:
    return torch.zeros_like(heads.queries)


def _silence(_module: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return with_first(output, torch.zeros_like(first(output)))
