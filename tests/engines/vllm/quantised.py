"""Tiny checkpoints in the formats quantised models are published in, written by hand, and the same model with the
weights that they stand for, so that only what the quantised kernels do to activations is left between the two."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from support import tiny

GROUP = 32  # input channels that share a scale in the 4-bit formats
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # how AutoAWQ lays eight numbers into one int32
Quantised = tuple[dict[str, Tensor], Tensor]  # what is stored in place of `weight`, and the weight it stands for


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    group["input_activations"] = activations and {"symmetric": True, "dynamic": True, **activations}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def _rounded(weight: Tensor, most: int, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Integers in [−most, most] and a scale per output channel, or per group of input channels of it."""
    parts = weight.view(weight.shape[0], -1, group or weight.shape[1])
    scale = (parts.abs().amax(-1, keepdim=True) / most).clamp(min=1e-8)
    return (parts / scale).round().clamp(-most, most).view_as(weight).to(torch.int32), scale.squeeze(-1)


def _spread(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(columns // scale.shape[1], dim=1)


def int8(weight: Tensor) -> Quantised:
    whole, scale = _rounded(weight, 127)
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


def int4_values(weight: Tensor) -> Quantised:
    whole, scale = _rounded(weight, 7, GROUP)
    scale = scale.bfloat16().float()  # the kernel takes them so
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * _spread(scale, weight.shape[1])


def fp8(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(-1, keepdim=True) / 448
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


def _packed(values: Tensor, bits: int = 4) -> Tensor:
    """Unsigned numbers along the last dimension, 32 / bits to an int32, the lowest first."""
    parts = values.to(torch.int64).view(*values.shape[:-1], -1, 32 // bits)
    return (parts << (torch.arange(32 // bits) * bits)).sum(-1).to(torch.int32)


def packed(bits: int) -> Callable[[Tensor], Quantised]:
    def store(weight: Tensor) -> Quantised:
        half = 1 << (bits - 1)
        whole, scale = _rounded(weight, half - 1, GROUP)
        stored = {"weight_packed": _packed(whole + half, bits), "weight_scale": scale}
        return stored | {"weight_shape": torch.tensor(weight.shape)}, whole * _spread(scale, weight.shape[1])

    return store


def gptq(weight: Tensor) -> Quantised:
    whole, scale = _rounded(weight, 7, GROUP)
    zeros = torch.full((scale.shape[1], weight.shape[0]), 7)  # GPTQ stores the zero point less one
    stored = {"qweight": _packed(whole + 8).T, "scales": scale.T, "qzeros": _packed(zeros)}
    stored["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return stored, whole * _spread(scale, weight.shape[1])


def awq(weight: Tensor) -> Quantised:
    whole, scale = _rounded(weight, 7, GROUP)

    def laid(values: Tensor) -> Tensor:
        return _packed(values.view(len(values), -1, 8)[:, :, list(_AWQ_ORDER)].reshape(len(values), -1))

    zeros = torch.full((scale.shape[1], weight.shape[0]), 8)
    stored = {"qweight": laid((whole + 8).T.contiguous()), "scales": scale.T, "qzeros": laid(zeros)}
    return stored, whole * _spread(scale, weight.shape[1])


_WEIGHT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
_TOKEN8 = {"type": "int", "num_bits": 8, "strategy": "token"}
FORMATS: dict[str, tuple[Callable[[Tensor], Quantised], dict[str, Any]]] = {
    "int8 W8A8": (int8, _compressed("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}, _TOKEN8)),
    "int4 W4A8": (int4_values, _compressed("int-quantized", _WEIGHT4, _TOKEN8)),
    "int4 W4A16": (packed(4), _compressed("pack-quantized", _WEIGHT4, None)),
    "int8 W8A16": (packed(8), _compressed("pack-quantized", {**_WEIGHT4, "num_bits": 8}, None)),
    "fp8 W8A8": (
        fp8,
        _compressed(
            "float-quantized",
            {"type": "float", "num_bits": 8, "strategy": "channel"},
            {"type": "float", "num_bits": 8, "strategy": "token"},
        ),
    ),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def write(folder: Path, form: str) -> PreTrainedModel:
    """Write the tiny Llama in this format; returns the model that has the weights it stands for."""
    store, config = FORMATS[form]
    model = copy.deepcopy(tiny.model())
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            stored, stands_for = store(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            module.weight.data.copy_(stands_for)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return model
