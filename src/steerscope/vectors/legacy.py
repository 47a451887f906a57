"""Vectors in the `.pt` files of prior systems: chatspace folders, assistant-axis capping configs, persona files.

A `.pt` file is a pickle and may hold a program. It is read with torch's weights-only reader, which accepts tensors and
plain containers; other files are refused. All these formats count decoder layers from 0, and their vectors belong to
the residual stream after the layer (resid_post).
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from steerscope.files import reading
from steerscope.specs.errors import BadFile
from steerscope.specs.steering import Cap, Steering, VectorData
from steerscope.vectors.vector import Json, SteeringVector

# Of traits and roles; the first that is there.
DEFAULT_KEYS = ("pos_neg_50", "pos_neg", "pos_3-default_1", "pos_all-default_1")
_VECTOR_FILE = "steering_vector.pt"
_CONFIG_FILE = "steering_config.json"
_DEFAULTS_FILE = "default_vectors.pt"


def load_pt(path: str | Path) -> SteeringVector:
    """Read any `.pt` vector; the keys of its content determine the prior system."""
    path = Path(path)
    data = read_pt(path)
    if isinstance(data, Tensor):
        return plain_tensor(path, data)
    if not isinstance(data, Mapping):
        raise BadFile(f"{path} holds a {type(data).__name__}; expected a tensor or a dictionary of tensors")
    if "vectors" in data and "experiments" in data:
        raise BadFile(f"{path} is a capping config, not a vector; use steerscope.vectors.legacy.load_capping")
    if path.name == _VECTOR_FILE or "layer_vectors" in data or "steering_vector" in data:
        return _chatspace(path, data)
    if isinstance(data.get("vector"), Tensor):  # assistant-axis pipeline: {"vector", "type", "role"}
        about: dict[str, Json] = {key: data[key] for key in ("type", "role") if isinstance(data.get(key), str)}
        return plain_tensor(path, data["vector"], about)
    if _blocks(data):
        return load_persona(path)
    raise BadFile(f"{path} holds no vector that is known; its keys are {_list(data)}")


def plain_tensor(path: Path, tensor: Tensor, about: Mapping[str, Json] | None = None) -> SteeringVector:
    """Make a vector of a tensor: [hidden] is shared by all layers, row i of [layers, hidden] is layer i."""
    if tensor.dim() not in (1, 2) or not tensor.numel() or (tensor.dim() == 2 and len(tensor) == 1):
        shape = list(tensor.shape)
        raise BadFile(f"{path} holds a tensor of shape {shape}; expected [hidden], or [layers, hidden] with all layers")
    directions = {None: tensor} if tensor.dim() == 1 else dict(enumerate(tensor))
    return _vector(path, directions, {"name": path.stem, "file": path.name, **(about or {})})


# --- chatspace


def load_chatspace(directory: str | Path) -> SteeringVector:
    """Read a folder with `steering_vector.pt` and `steering_config.json`.

    The trainer writes {"steering_vector": [hidden]} and `target_layer` in the config; the vLLM model writes
    {"layer_vectors": {layer: [hidden]}}. Vectors are stored at their full strength; scales in the config
    (`init_scale` of the training) are kept as provenance and not applied.
    """
    path = Path(directory) / _VECTOR_FILE
    if not path.is_file():
        raise BadFile(f"{directory} is not a chatspace folder: it has no {_VECTOR_FILE}")
    return _chatspace(path, read_pt(path))


def _chatspace(path: Path, data: object) -> SteeringVector:
    config_path = path.with_name(_CONFIG_FILE)
    if not config_path.is_file():
        raise BadFile(f"{path} needs a {_CONFIG_FILE} beside it, which says the model and the layer")
    with reading(config_path, "chatspace config"):
        config = dict(json.loads(config_path.read_bytes()))
    state = data if isinstance(data, Mapping) else {"steering_vector": data}
    others = " and ".join(key for key in ("projection_caps", "ablations") if state.get(key))
    if others:
        raise BadFile(f"{path} also holds {others}, which a vector cannot; make Cap and Ablate ops of them")
    directions = state.get("layer_vectors")
    if not isinstance(directions, Mapping) or not directions:
        layer = config.get("target_layer", config.get("layer"))
        if not isinstance(layer, int):
            wanted = "model_name (or model) and target_layer (or layer), a number"
            raise BadFile(f"{config_path} does not say the layer; its keys are {_list(config)}, expected {wanted}")
        vector = state.get("steering_vector", state.get("vector"))
        if vector is None:
            wanted = "steering_vector, vector or layer_vectors"
            raise BadFile(f"{path} holds no vector; its keys are {_list(state)}, expected {wanted}")
        directions = {layer: vector}
    model = config.get("model_name", config.get("model"))
    about: dict[str, Json] = {"name": path.absolute().parent.name, "config": config}
    return _vector(path, directions, about, model if isinstance(model, str) else None, "chatspace")


# --- assistant-axis


def load_capping(path: str | Path) -> dict[str, Steering]:
    """Read a `capping_config.pt`: the caps of each experiment, in order. `cap` is the maximum of the projection."""
    path = Path(path)
    data = read_pt(path)
    with reading(path, "capping config"):
        if not isinstance(data, Mapping) or not {"vectors", "experiments"} <= data.keys():
            found = _list(data) if isinstance(data, Mapping) else type(data).__name__
            raise BadFile(f"{path} is not a capping config: expected the keys vectors and experiments, found {found}")
        vectors: dict[object, VectorData] = {}
        for name, entry in data["vectors"].items():
            if not isinstance(entry, Mapping) or entry.get("vector") is None or entry.get("layer") is None:
                raise BadFile(f"{path}: vector {name!r} needs the keys vector and layer")
            with reading(path, f"capping config at vector {name!r}"):
                vectors[name] = _vector(path, {entry["layer"]: entry["vector"]}, {}).to_spec()
        result: dict[str, Steering] = {}
        for experiment in data["experiments"]:
            name = str(experiment["id"])
            if name in result:
                raise BadFile(f"{path} has two experiments with the id {name!r}")
            result[name] = Steering.of(*(_cap(path, name, x, vectors) for x in experiment["interventions"]))
        return result


def _cap(path: Path, experiment: str, intervention: Mapping[str, object], vectors: Mapping[object, VectorData]) -> Cap:
    vector = intervention.get("vector")
    cap = intervention.get("cap")
    cap = cap.item() if isinstance(cap, Tensor) and not cap.dim() else cap
    if vector not in vectors:
        raise BadFile(f"{path}: experiment {experiment!r} caps unknown vector {vector!r}; known are {_list(vectors)}")
    if isinstance(cap, bool) or not isinstance(cap, int | float):
        raise BadFile(f"{path}: experiment {experiment!r} has cap {cap!r} for {vector!r}; expected a number")
    return Cap(vector=vectors[vector], max=float(cap))


# --- persona files


def load_persona(path: str | Path, key: str | None = None, default: str | Path | None = None) -> SteeringVector:
    """Read a role or trait file: a dictionary of [layers, hidden] tensors.

    `key` is one of its keys or a difference of two, "pos_3-default_1". Without a key a trait gives `pos_neg_50` and a
    role `pos_3-default_1`, or where they are not there `pos_neg` and `pos_all-default_1`. Keys the file lacks, and all
    that start with "default", come from the file `default`; if none is given, from the `default_vectors.pt` beside the
    file or one folder up, if there is one.

    Other programs write zeros for what was not measured: a block of zeros counts as missing, and a layer whose row is
    zero in one of the blocks is left out of the vector.
    """
    path = Path(path)
    found = _blocks(read_pt(path))
    own = _measured(found)
    if key is None:
        key = next((one for one in DEFAULT_KEYS if one.partition("-")[0] in own), None)
    if key is None:
        wanted = "neither a role (pos_3, pos_all) nor a trait (pos_neg_50, pos_neg)"
        raise BadFile(f"{path} is {wanted}; choose a key of {_list(own)}{_zeros(found, own)}")
    parts = [key] if key in own else [part.strip() for part in key.split("-")]
    near = (folder / _DEFAULTS_FILE for folder in (path.parent, path.absolute().parent.parent))
    source = Path(default) if default else next((file for file in near if file.is_file()), None)
    needed = any(part not in own or part.startswith("default") for part in parts)
    beside = _blocks(read_pt(source)) if source and needed else {}
    usable = _measured(beside).items()
    more = {name: block for name, block in usable if name not in found or name.startswith("default")}
    blocks = {**own, **more}
    missing = [part for part in parts if part not in blocks]
    if missing or len(parts) > 2:
        wrong = f"has no {' and no '.join(missing)}" if missing else f"cannot give {key!r} (one key, or two with a -)"
        hint = "" if source else f" (no {_DEFAULTS_FILE} is near it; pass default=…)"
        raise BadFile(f"{path} {wrong}; keys are {_list(blocks)}{_zeros({**beside, **found}, blocks)}{hint}")
    about: dict[str, Json] = {"name": path.stem, "file": path.name, "key": key}
    return _vector(path, _persona_rows(path, key, [blocks[part] for part in parts]), about, method="persona")


def _persona_rows(path: Path, key: str, blocks: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return layer → direction: one block, or the first minus the second, at the layers that every block has."""
    first, *rest = blocks
    for other in rest:
        if first.shape != other.shape:
            raise BadFile(f"{path}: {key} subtracts {list(other.shape)} from {list(first.shape)}")
    layers = [layer for layer in range(len(first)) if all(block[layer].any() for block in blocks)]
    if not layers:
        raise BadFile(f"{path}: {key} has no layer that was measured: every row is zero in one of its blocks")
    wide = torch.promote_types(first.dtype, torch.float32)  # the blocks of a difference are large and close together
    rows = first.to(wide) - rest[0].to(wide) if rest else first
    return {layer: rows[layer] for layer in layers}


def _blocks(data: object) -> dict[str, Tensor]:
    """The [layers, hidden] tensors of a persona file; default_vectors.pt keeps them under "activations"."""
    if isinstance(data, Mapping) and isinstance(data.get("activations"), Mapping):
        data = data["activations"]
    entries = data.items() if isinstance(data, Mapping) else ()
    return {k: v for k, v in entries if isinstance(k, str) and isinstance(v, Tensor) and v.dim() == 2 and v.numel()}


def _measured(blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the blocks that hold a number other than zero."""
    return {name: block for name, block in blocks.items() if block.any()}


def _zeros(found: Mapping[str, Tensor], measured: Mapping[str, Tensor]) -> str:
    missing = [name for name in found if name not in measured]
    return f" ({', '.join(missing)}: all zeros, so not measured)" if missing else ""


# --- common


def read_pt(path: Path) -> object:
    """Read plain tensors and containers. Files with code, or with tensors larger than the file, are refused."""
    if not path.is_file():
        raise BadFile(f"{path} does not exist")
    with reading(path, ".pt file"):
        _check_zip(path)
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            code = re.search(r"GLOBAL (\S+)", str(error))
            if code is None and "Weights only load failed" not in str(error):
                raise
            wants = f"wants to run code ({code[1]})" if code else "is damaged, or a pickle that wants to run code"
            raise BadFile(f"{path} was not opened: it {wants}; convert it to plain tensors where it was made") from None
        if not all(_is_plain(tensor, path.stat().st_size) for tensor in _tensors(data)):
            raise BadFile(f"{path} holds a sparse or quantised tensor, or one that claims to be larger than the file")
    return data


def _check_zip(path: Path) -> None:
    """Refuse compressed files: torch never writes them, and they may expand a thousandfold."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as file:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
            raise BadFile(f"{path} was not opened: it is compressed, as torch.save never does; save it anew")


def _is_plain(tensor: Tensor, size: int) -> bool:
    usual = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
    return usual and tensor.numel() * tensor.element_size() <= size  # with strides of 0 a tiny file claims terabytes


def _tensors(data: object) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _tensors(item)


def _vector(
    path: Path, directions: Mapping, about: dict[str, Json], model: str | None = None, method: str | None = None
) -> SteeringVector:
    for layer, direction in directions.items():
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            raise BadFile(f"{path}: {layer!r} is not a layer; layers are numbers from 0")
        if not isinstance(direction, Tensor):
            where = "the vector" if layer is None else f"layer {layer}"
            raise BadFile(f"{path}: {where} is {type(direction).__name__}; expected a tensor of floats")
    with reading(path, "vector"):
        return SteeringVector(directions, model=model, method=method, provenance=about)


def _list(keys: Mapping) -> str:
    return ", ".join(map(str, keys)) or "none"
