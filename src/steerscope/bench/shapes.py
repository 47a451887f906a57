"""Models for benchmarks: a directory, the embedded name, or the bare shape of a known model with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from steerscope.models import DEFAULT_MODEL, resolve

_QWEN = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768,
    "sliding_window": 512, "query_pre_attn_scalar": 256,
}  # fmt: skip
_LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 32768,
    "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_1B = _LLAMA_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True
}  # fmt: skip
_SMALL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 2048,
}  # fmt: skip
_TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2.5-3b": ("qwen2", "Qwen2ForCausalLM", _QWEN),
    "gemma-3-1b": ("gemma3_text", "Gemma3ForCausalLM", _GEMMA),
    "llama-8b": ("llama", "LlamaForCausalLM", _LLAMA_8B),
    "llama-1b": ("llama", "LlamaForCausalLM", _LLAMA_1B),
    "small": ("llama", "LlamaForCausalLM", _SMALL),
    "tiny": ("llama", "LlamaForCausalLM", _TINY),
}


class NoTokenizer:
    """Tokenizer of random weights: prompts are ids, and texts stay empty."""

    eos_token_id, chat_template = 1, None

    def decode(self, _ids: list[int], **_options: bool) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}


def shape_config(shape: str) -> PretrainedConfig:
    kind, architecture, sizes = SHAPES[shape]
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return AutoConfig.for_model(kind, architectures=[architecture], **sizes, **special)


def make_model(shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The embedded model, or weights drawn so that every layer changes the stream by a good part of itself."""
    if shape == DEFAULT_MODEL:
        return AutoModelForCausalLM.from_pretrained(resolve(shape), dtype=dtype).eval().to(device)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scaled = shape.startswith("gemma")  # they multiply embeddings by √hidden
                parameter.normal_(0, 1.0 if "embed" in name and not scaled else parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def load_model(model: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model for transformers, with the weights of a folder or of `make_model`."""
    if model in SHAPES:
        return make_model(model, device, dtype)
    return AutoModelForCausalLM.from_pretrained(resolve(model), dtype=dtype).to(device).eval()  # type: ignore[arg-type]


def model_config(model: str) -> PretrainedConfig:
    return shape_config(model) if model in SHAPES else AutoConfig.from_pretrained(resolve(model))


def vllm_model(model: str, scratch: Path) -> dict[str, Any]:
    """Return vLLM's arguments for a model; of a shape only the config is written, and vLLM draws the weights."""
    if model not in SHAPES:
        return {"model": str(resolve(model))}
    folder = scratch / model
    shape_config(model).save_pretrained(folder)
    return {"model": str(folder), "load_format": "dummy"}
