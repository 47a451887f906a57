"""Tiny random models of every supported architecture, and tokenizers of every kind, made from nothing.

Weights are drawn at a scale where layers really change the stream: a shuffled layer map must not pass.
"""

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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


def model(architecture: str = "llama", layers: int = 4, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Always the same object for the same arguments."""
    return _model(architecture, layers, seed, tuple(sorted(changes.items())))


_ODD: dict[str, dict[str, object]] = {"granite": {}}  # not on the list above: some sites cannot be had


@functools.cache
def _model(architecture: str, layers: int, seed: int, changes: tuple[tuple[str, object], ...]) -> PreTrainedModel:
    torch.manual_seed(seed)
    settings = {**_COMMON, **{**ARCHITECTURES, **_ODD}[architecture], "num_hidden_layers": layers, **dict(changes)}
    config = AutoConfig.for_model(architecture, **settings)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    0, 1.5 / parameter.shape[-1] ** 0.5 if "embed" not in name and "wte" not in name else 1.0
                )
            elif "norm" in name or "ln_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return built


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
