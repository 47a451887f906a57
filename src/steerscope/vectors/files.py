"""Steering vectors on disk: `save` and `load`.

`.safetensors` is the own format: one tensor `layer.{i}` per layer or one tensor `shared`, in the dtype the vector has,
and model, site, method and provenance as JSON in the header. Every bit survives.

`.gguf` is the control vector of llama.cpp and repeng: float32 tensors `direction.{i}`. In both programs `direction.N`
acts on the output of block N, counted from 0, which is our layer N at resid_post (llama.cpp: llama_adapter_cvec::apply
and build_cvec; repeng: control.py). llama.cpp refuses `direction.0`, so layer 0 cannot be stored; a file of another
program that has it is read as layer 0. Other programs read only model_hint and the directions. Ours also reads the key
`steerscope.metadata`, which keeps model, method, provenance and a narrower dtype; float64 is rounded to float32.

The same vector gives the same bytes: nothing in a file depends on its name or the time, and JSON keys are sorted.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast

import numpy as np
import safetensors.torch
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.gguf_reader import ReaderField
from numpy.typing import DTypeLike, NDArray
from safetensors import safe_open
from torch import Tensor

from steerscope.files import atomic_path, check_folder, reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile
from steerscope.specs.steering import Site, VectorData
from steerscope.vectors.legacy import load_chatspace, load_pt, plain_tensor
from steerscope.vectors.vector import Json, SteeringVector

FORMAT = "steerscope-vector"
VERSION = "1"
CONTROL_VECTOR = "controlvector"
_MOST_LAYERS = 10_000
_ZIP = b"PK\x03\x04"  # how a .pt begins
_ABOUT_BYTES = 1 << 20  # for the header of an upload, beside its numbers
SUFFIXES = {".safetensors": "safetensors", ".gguf": "GGUF", ".pt": "pt", ".pth": "pt"}


def save(vector: SteeringVector, path: str | Path) -> None:
    """Write `.safetensors` or `.gguf` (`steerscope.save_vector`). On any error an existing file stays unchanged.

    ```python
    import steerscope as ss

    happy = ss.load_vector("happy.safetensors")
    ss.save_vector(happy.at("1-29"), "happy.gguf")  # llama.cpp has no place for layer 0
    ```
    """
    path = Path(path)
    check_target(path, vector.layers, vector.site)
    if path.suffix.lower() == ".gguf":
        _save_gguf(vector, path)
    else:
        _save_safetensors(vector, path)


def check_target(path: str | Path, layers: Sequence[int] | Literal["all"] | None, site: Site) -> None:
    """Refuse a file that cannot hold a vector of these layers (None: one for all) at this site. Commands check before
    they compute a vector; `save` checks again."""
    path = Path(path)
    instead = "save it as .safetensors"
    check_folder(path)
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", ".gguf"):
        raise BadFile(f"cannot write {path}: unknown suffix {suffix!r}; use .safetensors, or .gguf for llama.cpp")
    if suffix == ".safetensors":
        return
    if layers is None:
        raise BadFile(f"cannot write {path}: GGUF has no shared direction; choose layers with .at(…) or {instead}")
    if layers == "all" or 0 in layers:
        what = "GGUF has no place for layer 0 (llama.cpp refuses direction.0)"
        raise BadFile(f"cannot write {path}: {what}; choose layers from 1 on, or {instead}")
    if site != "resid_post":
        raise BadFile(f"cannot write {path}: llama.cpp would apply it at resid_post, not at {site}; {instead}")


def load(path: str | Path) -> SteeringVector:
    """Read a vector (`steerscope.load_vector`): our safetensors or a plain one, GGUF, a `.pt` of a prior system, or a
    chatspace folder. No code from a file is run."""
    path = Path(path)
    if path.is_dir():
        return load_chatspace(path)
    if not path.exists():
        raise BadFile(f"{path} does not exist")
    kind = _kind(path)
    if kind is None:
        raise BadFile(f"{path} is not a vector file; known are {', '.join(SUFFIXES)} and chatspace folders")
    return _load(path, kind)


def load_upload(data: bytes, name: str, layers: int, hidden: int) -> SteeringVector:
    """Read an uploaded vector for a model of `layers` layers: safetensors or GGUF, by the first bytes. Pickles, and
    files larger than a vector of this model, are refused unread."""
    gguf = data.startswith(b"GGUF")
    most = layers * hidden * 8 + _ABOUT_BYTES
    if not gguf and (data[8:9] != b"{" or data.startswith(_ZIP)):
        raise BadFile(f"{name} is neither safetensors nor GGUF: convert it first, e.g. with steerscope vectors convert")
    if len(data) > most:
        what = f"{name} has {len(data)} bytes; a vector of {layers} layers of {hidden} numbers has at most {most}"
        raise BadFile(f"{what}: take layers or notes out of it")
    with TemporaryDirectory(prefix="steerscope-upload-") as folder:
        path = Path(folder) / "vector"
        path.write_bytes(data)
        try:
            return _load(path, "GGUF" if gguf else "safetensors")
        except BadFile as error:
            raise BadFile(str(error).replace(str(path), name)) from None


def _load(path: Path, kind: str) -> SteeringVector:
    readers = {"safetensors": _load_safetensors, "GGUF": _load_gguf, "pt": load_pt}
    with reading(path, f"{kind} vector"):
        return readers[kind](path)


def _kind(path: Path) -> str | None:
    """Return the format by the first bytes, or by the suffix where these are ambiguous."""
    with reading(path, "file"), path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"GGUF"):
        return "GGUF"
    if head.startswith(_ZIP):
        return "pt"
    suffix = SUFFIXES.get(path.suffix.lower())
    return "safetensors" if head[8:] == b"{" and suffix != "pt" else suffix


class VectorFolder(Mapping[str, VectorData]):
    """A folder of vector files, by name. A file that changes is read again; vectors of deleted files are dropped at the
    next access."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._read: dict[Path, tuple[tuple[int, int, int], VectorData]] = {}

    def _files(self) -> dict[str, Path]:
        seen = self._folder.iterdir() if self._folder.is_dir() else ()
        # Files whose names begin with a dot are still being written.
        found = sorted(p for p in seen if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        for gone in self._read.keys() - set(found):
            self._read.pop(gone, None)
        return {path.stem: path for path in found}

    def __getitem__(self, name: str) -> VectorData:
        path = self._files()[name]
        try:
            state = path.stat()
        except FileNotFoundError:  # deleted meanwhile
            raise KeyError(name) from None
        mark = (state.st_mtime_ns, state.st_size, state.st_ino)
        known = self._read.get(path)
        if known is None or known[0] != mark:
            self._read[path] = known = (mark, load(path).to_spec())
        return known[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files())

    def __len__(self) -> int:
        return len(self._files())


# --- JSON metadata of both formats


class _Metadata(Spec):
    model: str | None = None
    site: Site = "resid_post"
    method: str | None = None
    provenance: dict[str, object] = {}
    dtypes: dict[int, str] = {}  # GGUF only: what the directions were before they became float32

    def vector(self, directions: dict[int | None, Tensor]) -> SteeringVector:
        return SteeringVector(directions, self.model, self.site, self.method, cast(dict[str, Json], self.provenance))


def _metadata(vector: SteeringVector, path: Path, **more: dict[str, str]) -> str:
    data = {key: getattr(vector, key) for key in ("model", "site", "method", "provenance")} | more
    try:
        text = json.dumps(data, sort_keys=True)
        survives = json.loads(text) == data
    except (TypeError, ValueError, RecursionError):
        survives = False
        text = ""
    if not survives:
        raise BadFile(f"cannot write {path}: the provenance is not plain JSON; use text, numbers, lists and text keys")
    return text


def _layer(name: str, prefix: str, path: Path) -> int:
    match = re.fullmatch(rf"{prefix}\.(0|[1-9][0-9]{{0,5}})", name)
    if match is None:
        raise BadFile(f"{path} holds a tensor {name!r}; expected only {prefix}.N, with N the number of a layer")
    return int(match[1])


# --- safetensors


def _save_safetensors(vector: SteeringVector, path: Path) -> None:
    header = {"format": FORMAT, "version": VERSION, "metadata": _metadata(vector, path)}
    # clone: layers of one vector may share memory, which safetensors refuses
    tensors = {"shared" if k is None else f"layer.{k}": direction.clone() for k, direction in vector.directions.items()}
    data = _with_sorted_header(safetensors.torch.save(tensors, header))
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def _with_sorted_header(data: bytes) -> bytes:
    """Sort the header's keys, which the library writes in an order that changes with every call."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    return len(header).to_bytes(8, "little") + header + data[end:]


def _load_safetensors(path: Path) -> SteeringVector:
    with safe_open(str(path), framework="pt") as file:
        header = file.metadata() or {}
        names = file.keys()
        foreign = header.get("format") != FORMAT
        if foreign and len(names) != 1:  # perhaps a whole model: no tensor is read
            shown = ", ".join(sorted(names)[:8])
            wanted = "give a file with one tensor, [hidden] or [layers, hidden]"
            raise BadFile(f"{path} was not written by steerscope and holds {len(names)} tensors ({shown}); {wanted}")
        if len(names) > _MOST_LAYERS:
            raise BadFile(f"{path} holds {len(names)} tensors; a vector has at most {_MOST_LAYERS} layers")
        tensors = {name: file.get_tensor(name).clone() for name in names}
    if foreign:
        ((name, tensor),) = tensors.items()
        return plain_tensor(path, tensor, {"tensor": name})
    if header.get("version") != VERSION:
        raise BadFile(f"{path} has format version {header.get('version')}, known is {VERSION}; update steerscope")
    directions = {None if name == "shared" else _layer(name, "layer", path): t for name, t in tensors.items()}
    return _Metadata.parse(json.loads(header.get("metadata", ""))).vector(directions)


# --- GGUF


class _Reader(GGUFReader):
    """A strict GGUF reader. gguf's own silently slices past the end of a truncated file, loops for ever over a missing
    array, and reads the whole vocabulary of a language model before it can be refused."""

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order=None) -> NDArray:  # type: ignore[override]
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            what = f"it ends at byte {self.data.size}, but its header promises at least {end}"
            raise BadFile(f"{self.data.filename} is not a readable GGUF vector: {what}; copy it anew")
        return super()._get(offset, dtype, count, override_order)

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        if field.name == "general.architecture" and field.contents() != CONTROL_VECTOR:
            what = f"a GGUF of architecture {field.contents()!r} (a language model?)"
            raise BadFile(f"{self.data.filename} is {what}, not a control vector; expected {CONTROL_VECTOR!r}")
        return super()._push_field(field, skip_sum)


def _save_gguf(vector: SteeringVector, path: Path) -> None:
    arrays = {k: direction.float().numpy() for k, direction in vector.directions.items()}
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise BadFile(f"cannot write {path}: it holds numbers beyond float32; scale it down or save it as .safetensors")
    dtypes = {str(k): str(d.dtype).removeprefix("torch.") for k, d in vector.directions.items()}
    metadata = _metadata(vector, path, dtypes=dtypes)
    with atomic_path(path) as temporary, closing(GGUFWriter(temporary, CONTROL_VECTOR)) as writer:
        writer.add_string(f"{CONTROL_VECTOR}.model_hint", vector.model or "unknown")  # repeng insists on the key
        writer.add_uint32(f"{CONTROL_VECTOR}.layer_count", len(arrays))
        writer.add_string("steerscope.metadata", metadata)
        for layer, array in arrays.items():
            writer.add_tensor(f"direction.{layer}", array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _load_gguf(path: Path) -> SteeringVector:
    reader = _Reader(path)
    if "general.architecture" not in reader.fields:
        raise BadFile(f"{path} has no general.architecture; a control vector says {CONTROL_VECTOR!r}")
    directions: dict[int | None, Tensor] = {}
    for tensor in reader.tensors:
        layer = _layer(tensor.name, "direction", path)
        if tensor.tensor_type != GGMLQuantizationType.F32 or len(tensor.shape) != 1:
            shape = tensor.shape.tolist()
            raise BadFile(f"{path}: {tensor.name} is {tensor.tensor_type.name} {shape}; expected F32 [hidden]")
        directions[layer] = torch.from_numpy(np.array(tensor.data, dtype=np.float32))
    own = reader.get_field("steerscope.metadata")
    hint = reader.get_field(f"{CONTROL_VECTOR}.model_hint")
    if own is None:  # the hint names an architecture ("mistral"), not a model
        about = {"name": path.stem, "file": path.name, "model_hint": hint and hint.contents()}
        return SteeringVector(directions, provenance=about)
    metadata = _Metadata.parse(json.loads(own.contents()))
    return metadata.vector({k: _narrow(t, metadata.dtypes.get(k or 0)) for k, t in directions.items()})


def _narrow(direction: Tensor, name: str | None) -> Tensor:
    """Convert a direction to the dtype it was saved from, if that loses nothing."""
    narrow = direction.to({"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name or "", torch.float32))
    return narrow if torch.equal(narrow.float(), direction) else direction
