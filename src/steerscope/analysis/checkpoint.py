"""A checkpoint on disk, read a layer at a time: weights of any decoder model without loading the model.

Only `config.json` and safetensors are read, one file or many (`model.safetensors.index.json`). A file is opened for one
layer and closed again: its pages are mapped, and a mapping that stays open keeps every page that was ever touched.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from steerscope.files import reading
from steerscope.models import resolve
from steerscope.specs.errors import BadFile, InvalidRequest, ModelNotFound, Problem, UnsupportedModel

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_NUMBERED = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)(?P<layer>\d+)\.(?P<name>.+)")
_OTHER_TOWERS = ("vis", "audio")  # encoders of multimodal models, which may have as many layers
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")


class Checkpoint:
    """A checkpoint of `layers` decoder layers and `hidden` numbers per row."""

    def __init__(self, model: str | Path) -> None:
        self.name = str(model)
        self.path = _directory(self.name)
        config = self.path / "config.json"
        with reading(config, "model config"):
            kind = dict(json.loads(config.read_bytes())).get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise UnsupportedModel(f"{model}: the installed transformers knows no model type {kind!r}; update it")
        with reading(config, "model config"):
            whole = AutoConfig.from_pretrained(self.path, local_files_only=True)
        if getattr(whole, "quantization_config", None):
            raise UnsupportedModel(f"{model} is quantised: give a checkpoint in bfloat16, float16 or float32")
        self.config: PreTrainedConfig = whole.get_text_config(decoder=True)
        self.layers: int = self.config.num_hidden_layers
        self.hidden: int = self.config.hidden_size
        self._files = _files(self.path)
        self._prefix = self._find_prefix()

    def __repr__(self) -> str:
        return f"Checkpoint({self.name}, {self.layers} layers, hidden {self.hidden})"

    def layer(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a layer, named as in its module (`self_attn.q_proj.weight`), in the file's dtype."""
        if not 0 <= number < self.layers:
            what = f"layer {number} is out of range"
            raise InvalidRequest([Problem("layer", what, f"{self.name} has layers 0-{self.layers - 1}")])
        start = f"{self._prefix}{number}."
        names = self._layers[number]
        found = {}
        for file in sorted({self._files[name] for name in names}):
            with _opened(file) as opened:
                for name in names:
                    if self._files[name] == file:
                        found[name.removeprefix(start)] = _checked(opened.get_tensor(name).clone(), name, file)
        return found

    def rows(self, name: str, step: int = 8192) -> Iterator[Tensor]:
        """Yield a large tensor in parts of `step` rows."""
        file = self._files[name]
        with _opened(file) as opened:
            length = opened.get_slice(name).get_shape()[0]
        for start in range(0, length, step):
            with _opened(file) as opened:
                part = opened.get_slice(name)[start : start + step].clone()
            yield _checked(part, name, file)

    @cached_property
    def embedding(self) -> str:
        """Return the name of the tensor that turns tokens into rows."""
        return self._outer(_EMBEDDINGS)

    @cached_property
    def head(self) -> str:
        """Return the name of the tensor that turns rows into logits; with tied weights, the embedding's."""
        return self.embedding if self.config.tie_word_embeddings else self._outer(_HEADS)

    def _outer(self, endings: tuple[str, ...]) -> str:
        inside = {name for names in self._layers.values() for name in names}
        root = self._prefix.split(".")[0]
        found = [name for name in self._files if name.endswith(endings) and name not in inside]
        found = [name for name in found if name.startswith(root)] or found
        if len(found) != 1:
            raise UnsupportedModel(f"{self.name}: looked for one tensor named {' or '.join(endings)}, found {found}")
        return found[0]

    @cached_property
    def _layers(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {number: [] for number in range(self.layers)}
        for name in self._files:
            match = _NUMBERED.fullmatch(name)
            if match and match["prefix"] == self._prefix and int(match["layer"]) in found:
                found[int(match["layer"])].append(name)
        return found

    def _find_prefix(self) -> str:
        """Return the part of tensor names before the number of a decoder layer."""
        seen: dict[str, set[int]] = {}
        for match in filter(None, map(_NUMBERED.fullmatch, self._files)):
            if "att" in match["name"]:
                seen.setdefault(match["prefix"], set()).add(int(match["layer"]))
        fits = [
            prefix
            for prefix, numbers in seen.items()
            if sum(number < self.layers for number in numbers) == self.layers
            and not any(part in prefix for part in _OTHER_TOWERS)
        ]
        if len(fits) != 1:
            listed = ", ".join(f"{prefix}N ({len(numbers)})" for prefix, numbers in seen.items()) or "none"
            raise UnsupportedModel(
                f"{self.name}: looked for one family of {self.layers} layers with attention among the names of its "
                f"tensors, found {len(fits)}; families seen: {listed}"
            )
        return fits[0]


def _directory(model: str) -> Path:
    found = resolve(model)
    if isinstance(found, Path):
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found, allow_patterns=["config.json", _ADAPTER, "*.safetensors", _INDEX]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFound(f"{model} is no directory, and the hub did not give it: {reason}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Return name of tensor → its file, after checking that each file exists and holds what the index says."""
    if (folder / _ADAPTER).is_file():
        raise UnsupportedModel(f"{folder} holds an adapter: merge it into its model and give the merged checkpoint")
    if (folder / _INDEX).is_file():
        with reading(folder / _INDEX, "index of shards"):
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / Path(str(file)).name for name, file in index.items()}
    elif (folder / _ONE).is_file():
        with _opened(folder / _ONE) as opened:
            files = dict.fromkeys(opened.keys(), folder / _ONE)
    else:
        raise BadFile(f"{folder} has no {_ONE} and no {_INDEX}; save the model with save_pretrained")
    held = {}
    for file in set(files.values()):
        if not file.is_file():
            raise BadFile(f"{file} does not exist, but the index names it; the checkpoint is incomplete")
        with _opened(file) as opened:
            held[file] = set(opened.keys())
    missing = [name for name, file in files.items() if name not in held[file]]
    if missing:
        raise BadFile(f"{files[missing[0]]} lacks {len(missing)} tensors of the index, {missing[0]} among them")
    return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with reading(file, "safetensors file"), safe_open(str(file), framework="pt") as opened:
        yield opened


def _checked(tensor: Tensor, name: str, file: Path) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise BadFile(f"{file}: {name} is {tensor.dtype}; give a checkpoint in bfloat16, float16 or float32")
    return tensor
