"""Tiny random models of every supported architecture, and tokenizers of every kind, made from nothing.

Weights are drawn at a scale where layers really change the stream: a shuffled layer map must not pass.
"""

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

TEXT = (
    "The quick brown fox jumps over the lazy dog. How was your week at work? I had a wonderful time at the beach, "
    "and then it rained. Der schnelle braune Fuchs, café, naïve, 你好世界, こんにちは, 🎉👩‍👩‍👧 1234567890 "
    "def main(argument): return [x * 2 for x in range(10)]\n"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_WINDOW: dict[str, object] = {"sliding_window": 8}
_HEADS: dict[str, object] = {"head_dim": 32}  # vLLM's CPU build has no attention for smaller heads
_FEW: dict[str, object] = {"num_attention_heads": 2, "num_key_value_heads": 1}  # the same, where it is hidden / heads
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": _HEADS,
    "mistral": {**_HEADS, **_WINDOW},
    "qwen2": _FEW,
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},  # older versions of vLLM insist
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        **_WINDOW,
    },
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, **_WINDOW},
    "phi3": _FEW,
    "olmo2": {},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"n_inner": 128, "n_positions": 256},
}
_MLA: dict[str, object] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
}
_EXPERTS: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED: dict[str, object] = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_MAMBA: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 8,
}
_LINEAR: dict[str, object] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LAYER_TYPES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_SPARSE = ["dense", "sparse", "sparse", "sparse"]
_MROPE: dict[str, object] = {"rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_TOWER: dict[str, object] = {"depth": 4, "hidden_size": 64, "num_heads": 2}  # as many layers as the decoder has
_TOWER_OUT: dict[str, object] = {**_TOWER, "intermediate_size": 128, "out_hidden_size": 64}
# Every other architecture that users were seen to bring. Multipliers differ from 1 wherever a family has them.
MORE: dict[str, dict[str, object]] = {
    "apertus": _FEW,
    "arcee": _HEADS,
    "bamba": {**_FEW, **_MAMBA, "attn_layer_indices": [1, 3]},
    "bloom": {"n_head": 2},
    "cohere": _FEW,
    # vLLM's windows of these are one token longer than transformers': no text here may fill them.
    "cohere2": {**_HEADS, "sliding_window": 64, "layer_types": _SLIDING},
    "cohere2_moe": {**_HEADS, **_MOE, "sliding_window": 64, "layer_types": _SLIDING, "mlp_layer_types": _SPARSE},
    "deepseek_v2": {**_MLA, **_ROUTED, "n_shared_experts": 1, "topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_MLA, **_ROUTED, "n_shared_experts": 1},
    "ernie4_5": _HEADS,
    "ernie4_5_moe": {
        **_FEW,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {**_HEADS, **_WINDOW, "layer_types": _SLIDING},
    "exaone_moe": {**_HEADS, **_MOE, **_WINDOW, "layer_types": _SLIDING, "mlp_layer_types": _SPARSE},
    "falcon": {"num_attention_heads": 2, "ffn_hidden_size": 128},
    "falcon_h1": {**_HEADS, **_MAMBA},
    "gemma4_text": {
        **_HEADS,
        **_WINDOW,
        "layer_types": _SLIDING,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
        "per_layer_config": {},
    },
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": {**_HEADS, **_ROUTED},
    "gpt_bigcode": {"n_inner": 128, "n_positions": 256, "num_attention_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 2, "window_size": 8},
    "gpt_oss": {**_HEADS, **_EXPERTS, **_WINDOW, "layer_types": _SLIDING, "rope_parameters": {"rope_theta": 10000.0}},
    "gptj": {"rotary_dim": 16, "n_positions": 256, "num_attention_heads": 2},
    "granite": {**_FEW, "residual_multiplier": 0.94, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "granitemoe": {**_FEW, **_EXPERTS, "residual_multiplier": 0.94, "attention_multiplier": 0.2},
    "granitemoehybrid": {
        **_FEW,
        **_EXPERTS,
        **_MAMBA,
        "layer_types": _LAYER_TYPES,
        "shared_intermediate_size": 64,
        "residual_multiplier": 0.94,
    },
    "hunyuan_v1_dense": _HEADS,
    "hyperclovax": {**_HEADS, "residual_multiplier": 0.94},
    "jamba": {**_FEW, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {
        **_MLA,
        **_MOE,
        "q_lora_rank": None,
        "num_experts_per_token": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "layer_types": _LAYER_TYPES,
        "mlp_layer_types": _SPARSE,
    },
    "lfm2": {**_FEW, "block_multiple_of": 32, "layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        **_HEADS,
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "intermediate_size_mlp": 128,
        "moe_layers": [1, 3],
        "attention_chunk_size": 64,
    },
    "minicpm3": {**_MLA, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32},
    "minimax_m2": {**_HEADS, **_EXPERTS},
    "ministral": {**_HEADS, **_WINDOW, "layer_types": _SLIDING},
    "ministral3": {
        **_HEADS,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 256,
        },
    },
    "mixtral": {**_HEADS, **_EXPERTS},
    "mpt": {"n_heads": 2, "expansion_ratio": 2, "max_seq_len": 256},
    "nemotron": _HEADS,
    "nemotron_h": {
        **_HEADS,
        **_ROUTED,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "time_step_min": 1e-9,  # transformers heeds it in prompts and not in single tokens
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo": _FEW,
    "olmo3": {**_FEW, **_WINDOW, "layer_types": _SLIDING},
    "olmoe": {**_FEW, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {**_FEW, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi": _FEW,
    "phimoe": {**_FEW, **_EXPERTS},
    "qwen2_5_vl": {**_FEW, "rope_parameters": _MROPE, "vision_config": {**_TOWER_OUT, "fullatt_block_indexes": [1, 3]}},
    "qwen2_moe": {**_FEW, **_MOE, "shared_expert_intermediate_size": 64},
    "qwen2_vl": {**_FEW, "rope_parameters": _MROPE, "vision_config": {**_TOWER, "embed_dim": 64}},
    "qwen3_5_moe_text": {
        **_HEADS,
        **_MOE,
        **_LINEAR,
        "layer_types": _LAYER_TYPES,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_5_text": {**_HEADS, **_LINEAR, "layer_types": _LAYER_TYPES},
    "qwen3_next": {**_HEADS, **_MOE, **_LINEAR, "layer_types": _LAYER_TYPES, "shared_expert_intermediate_size": 64},
    "qwen3_vl": {
        **_HEADS,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True},
        "vision_config": {**_TOWER_OUT, "deepstack_visual_indexes": [1, 2]},
    },
    "recurrent_gemma": {
        **_HEADS,
        "lru_width": 64,
        "attention_window_size": 64,
        "block_types": ["recurrent", "attention"],
    },
    "seed_oss": _HEADS,
    "smollm3": _FEW,
    "stablelm": _FEW,
    "starcoder2": _FEW,
}
# Both engines run these with text prompts.
VISION_LANGUAGE = [name for name, settings in MORE.items() if "vision_config" in settings]
_PLACEHOLDERS = {
    "vision_start_token_id": 508,
    "vision_end_token_id": 509,
    "image_token_id": 510,
    "video_token_id": 511,
}


def model(architecture: str = "llama", layers: int = 4, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Always the same object for the same arguments."""
    return _model(architecture, layers, seed, tuple(sorted(changes.items())))


@functools.cache
def _model(architecture: str, layers: int, seed: int, changes: tuple[tuple[str, object], ...]) -> PreTrainedModel:
    torch.manual_seed(seed)
    settings = {**_COMMON, **{**ARCHITECTURES, **MORE}[architecture], "num_hidden_layers": layers, **dict(changes)}
    built = _random(architecture, settings).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    0, 1.5 / parameter.shape[-1] ** 0.5 if "embed" not in name and "wte" not in name else 1.0
                )
            elif "norm" in name or "ln_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in built.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4 scales the stream behind each layer
                buffer.fill_(0.94)
    return built


def _random(architecture: str, settings: dict[str, object]) -> PreTrainedModel:
    if architecture not in VISION_LANGUAGE:
        config = AutoConfig.for_model(architecture, **settings)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tower = settings.pop("vision_config")
    config = AutoConfig.for_model(architecture, text_config=settings, vision_config=tower, **_PLACEHOLDERS)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


@functools.cache
def tokenizer(kind: str = "bytes", template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """`bytes`: byte-level BPE (GPT-2, Llama 3, Qwen); `metaspace`: sentencepiece, byte fallback (Llama 2, Gemma)."""
    special = ["<|start|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator([TEXT], trainer)
    else:
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[*special, "<unk>"], show_progress=False)
        core.train_from_iterator([TEXT.encode("ascii", "ignore").decode()], trainer)
        core.add_tokens([])
        state = core.to_str()
        core = _with_bytes(state, fallback)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = template
    return fast


def _with_bytes(state: str, fallback: list[str]) -> Tokenizer:
    """Put the 256 byte tokens into the vocabulary, as sentencepiece models have them."""
    import json

    data = json.loads(state)
    vocab = data["model"]["vocab"]
    for token in fallback:
        vocab.setdefault(token, len(vocab))
    return Tokenizer.from_str(json.dumps(data))
