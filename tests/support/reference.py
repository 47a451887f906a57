"""An independent reference: plain transformers, no cache, no batching, one forward per token, modules named by hand per
architecture, ops computed row by row in float64. Nothing here shares code with the engine except the oracle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from steerscope.specs.steering import Coefficients
from support.float64 import change_float64

_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
_TRANSFORMER = ("transformer.h", "attn", "mlp", "transformer.ln_f")
_QWEN_VL = ("model.language_model.layers", "self_attn", "mlp", "model.language_model.norm")
_MAMBA = ("model.layers", "mamba|self_attn", "feed_forward", "model.final_layernorm")
# decoder list, attention addend, MLP addend, final norm; of names with | between them the one that a block has
PATHS = {
    "bamba": _MAMBA,
    "bloom": ("transformer.h", "self_attention.dense", "mlp.dense_4h_to_h", "transformer.ln_f"),
    "exaone4": ("model.layers", *_POST, "model.norm"),
    "falcon_h1": ("model.layers", "self_attn", "feed_forward", "model.final_layernorm"),
    "falcon": ("transformer.h", "self_attention", "mlp", "transformer.ln_f"),
    "gemma2": ("model.layers", *_POST, "model.norm"),
    "gemma3_text": ("model.layers", *_POST, "model.norm"),
    "gemma4_text": ("model.layers", "post_attention_layernorm", "post_per_layer_input_norm", "model.norm"),
    "glm4": ("model.layers", "post_self_attn_layernorm", "post_mlp_layernorm", "model.norm"),
    "gpt2": _TRANSFORMER,
    "gpt_bigcode": _TRANSFORMER,
    "gpt_neo": _TRANSFORMER,
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp", "gpt_neox.final_layer_norm"),
    "gptj": _TRANSFORMER,
    "granitemoe": ("model.layers", "self_attn", "block_sparse_moe", "model.norm"),
    "granitemoehybrid": ("model.layers", "mamba|self_attn", "shared_mlp", "model.norm"),
    "hyperclovax": ("model.layers", "post_norm1", "post_norm2", "model.norm"),
    "jamba": _MAMBA,
    "lfm2": ("model.layers", "conv|self_attn", "feed_forward", "model.embedding_norm"),
    "llama4_text": ("model.layers", "self_attn", "feed_forward", "model.norm"),
    "mpt": ("transformer.blocks", "attn", "ffn.down_proj", "transformer.norm_f"),
    "nemotron_h": ("model.layers", "mixer", "mixer", "model.norm_f"),
    "olmo2": ("model.layers", *_POST, "model.norm"),
    "olmo3": ("model.layers", *_POST, "model.norm"),
    "opt": ("model.decoder.layers", "self_attn", "fc2", "model.decoder.final_layer_norm"),
    "phi": ("model.layers", "self_attn", "mlp", "model.final_layernorm"),
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
}
DEFAULT = ("model.layers", "linear_attn|self_attn", "mlp", "model.norm")
# What a block multiplies the outputs of these modules by before it adds them, as its family's code says.
MULTIPLIERS: dict[str, Callable[[PreTrainedConfig], float]] = {
    "granite": lambda config: config.residual_multiplier,
    "granitemoe": lambda config: config.residual_multiplier,
    "granitemoehybrid": lambda config: config.residual_multiplier,
    "hyperclovax": lambda config: config.residual_multiplier,
    "minicpm3": lambda config: config.scale_depth / config.num_hidden_layers**0.5,
}
# The first part of what is added behind the attention, where another one follows.
FIRST_PARTS = {"gemma4_text": "post_feedforward_layernorm", "granitemoehybrid": "block_sparse_moe"}


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    return dict(module.named_modules()).get(path)


@dataclass(frozen=True)
class RefOp:
    layer: int
    site: str
    vector: np.ndarray  # unit length where the op needs it
    coefficients: Coefficients
    where: Callable[[int], bool] = lambda _position: True


class Reference:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        layers, attention, mlp, norm = PATHS.get(model.config.model_type, DEFAULT)
        self.layers = model.get_submodule(layers)
        self.norm = model.get_submodule(norm)
        self.attention, self.mlp = attention, mlp
        self.first_part = FIRST_PARTS.get(model.config.model_type)
        multiplier = MULTIPLIERS.get(model.config.model_type)
        self.multiplier = multiplier(model.config) if multiplier else 1.0

    def run(self, ids: Sequence[int], ops: Sequence[RefOp] = ()) -> tuple[Tensor, dict[tuple[int, str], Tensor]]:
        """Logits [n, vocab] and rows by (layer, site) of one forward over all ids."""
        rows: dict[tuple[int, str], Tensor] = {}
        rests: dict[tuple[int, str], Tensor] = {}  # the part of a site that its module does not return
        handles = []

        def apply(layer: int, site: str, hidden: Tensor, rest: Tensor | None = None) -> Tensor:
            mine = [op for op in ops if (op.layer, op.site) == (layer, site)]
            changed = hidden.clone()
            for position in range(hidden.shape[1]):
                here = [(op.vector, op.coefficients, 1.0) for op in mine if op.where(position)]
                if here:
                    stream = hidden[0, position] if rest is None else hidden[0, position] + rest[0, position]
                    gained = change_float64(stream.double().numpy(), here)
                    changed[0, position] = (hidden[0, position].double() + torch.from_numpy(gained)).to(hidden.dtype)
            rows[layer, site] = (changed if rest is None else changed + rest)[0].clone()
            return changed

        def enter(layer: int) -> Callable[..., object]:
            def hook(_module: nn.Module, args: tuple, kwargs: dict) -> object:
                hidden = apply(layer, "resid_pre", args[0] if args else kwargs["hidden_states"])
                rests[layer, "resid_mid"] = hidden
                return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

            return hook

        def keep(layer: int) -> Callable[..., object]:
            def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
                rests[layer, "mlp_out"] = output * self.multiplier

            return hook

        def leave(layer: int, *sites: str, multiplier: float = 1.0) -> Callable[..., object]:
            def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> object:
                given = output[0] if isinstance(output, tuple) else output
                hidden = given.view(1, -1, given.shape[-1]) * multiplier
                for site in sites:
                    hidden = apply(layer, site, hidden, rests.get((layer, site)))
                hidden = (hidden / multiplier).view(given.shape)
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            return hook

        for i, block in enumerate(self.layers.children()):
            handles.append(block.register_forward_pre_hook(enter(i), with_kwargs=True))
            attention = next(found for name in self.attention.split("|") if (found := _submodule(block, name)))
            added = leave(i, "attn_out", "resid_mid", multiplier=self.multiplier)
            handles.append(attention.register_forward_hook(added))
            added = leave(i, "mlp_out", multiplier=self.multiplier)
            handles.append(block.get_submodule(self.mlp).register_forward_hook(added))
            if self.first_part:
                handles.append(block.get_submodule(self.first_part).register_forward_hook(keep(i)))
            handles.append(block.register_forward_hook(leave(i, "resid_post")))
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return logits, rows

    def greedy(self, prompt: Sequence[int], count: int, ops: Sequence[RefOp] = ()) -> tuple[list[int], list[float]]:
        """Tokens and, for each, the gap between the two best logits."""
        ids, gaps = list(prompt), []
        for _ in range(count):
            best = self.run(ids, ops)[0][-1].topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
        return ids[len(prompt) :], gaps


def distance(rows: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the size of the rows where that is above 1."""
    return float((rows.double() - wanted.double()).abs().max() / max(1.0, float(wanted.abs().max())))


def same_until_tie(tokens: Sequence[int], wanted: Sequence[int], gaps: Sequence[float], tie: float = 1e-3) -> bool:
    """Equal token for token up to the first place where the reference itself is nearly undecided."""
    for token, expected, gap in zip(tokens, wanted, gaps, strict=True):
        if gap <= tie:
            return True
        if token != expected:
            return False
    return True
