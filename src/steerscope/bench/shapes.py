"""Models for benchmarks: a directory, the embedded name, or the bare shape of a known model with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from steerscope.models import resolve

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "llama": "LlamaForCausalLM"}
# name → (type of transformers, sizes in the order of _SIZES, other fields of the configuration)
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "qwen2.5-3b": (
        "qwen2",
        (2048, 11008, 36, 16, 2, 128, 151936, 32768),
        {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "gemma-3-1b": (
        "gemma3_text",
        (1152, 6912, 26, 4, 1, 256, 262144, 32768),
        {"sliding_window": 512, "query_pre_attn_scalar": 256},
    ),
    "llama-8b": ("llama", (4096, 14336, 32, 32, 8, 128, 128256, 32768), {"rope_theta": 5e5}),
    "llama-1b": (
        "llama",
        (2048, 8192, 16, 32, 8, 64, 128256, 32768),
        {"rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "small": ("llama", (256, 704, 16, 4, 2, 64, 2048, 2048), {}),
    "tiny": ("llama", (128, 256, 4, 4, 2, 32, 512, 1024), {}),
}


class NoTokenizer:
    """Tokenizer of random weights: prompts are ids, and texts stay empty."""

    eos_token_id = 1
    chat_template = None

    def decode(self, _ids: list[int], **_options: bool) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}


def shape_config(shape: str) -> PretrainedConfig:
    kind, sizes, more = SHAPES[shape]
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    known = dict(zip(_SIZES, sizes, strict=True))
    return AutoConfig.for_model(kind, architectures=[_ARCHITECTURES[kind]], **known, **more, **special)


def load_model(model: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model for transformers; weights of a shape are drawn so that every layer changes the stream by a good
    part of itself."""
    if model not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(resolve(model), dtype=dtype).to(device).eval()  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(shape_config(model), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                scaled = model.startswith("gemma")  # they multiply embeddings by √hidden
                parameter.normal_(0, 1.0 if "embed" in name and not scaled else parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def model_config(model: str) -> PretrainedConfig:
    return shape_config(model) if model in SHAPES else AutoConfig.from_pretrained(resolve(model))


def vllm_model(model: str, scratch: Path) -> dict[str, Any]:
    """Return vLLM's arguments for a model; of a shape only the config is written, and vLLM draws the weights."""
    if model not in SHAPES:
        return {"model": str(resolve(model))}
    folder = scratch / model
    shape_config(model).save_pretrained(folder)
    return {"model": str(folder), "load_format": "dummy"}
