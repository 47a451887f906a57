"""Captured rows: tensors by layer and site, their labels, and their file.

The file is safetensors: the length of a JSON header, the header, then the tensors. Its bytes are made in small pieces
from the tensors' memory, so writing or sending a capture of gigabytes needs a few hundred KiB.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from steerscope.core.rows import Labels
from steerscope.core.slot_table import Key
from steerscope.files import atomic_path, reading
from steerscope.specs.errors import BadFile, InvalidRequest
from steerscope.specs.steering import SITES, Site
from steerscope.specs.tokens import MessageSpan

_FORMAT = "steerscope-rows-1"
_LABELS = ("position", "token_id", "generated", "message")
_PIECE_BYTES = 256 << 10
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


class RowFile:
    """The bytes of one safetensors file, made on demand. Tensors may be views that share memory."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        # The widest dtypes first, so that each tensor is aligned to its item size.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._tensors = [tensors[name] for name in names]
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        at = 0
        for name, tensor in zip(names, self._tensors, strict=True):
            offsets = [at, at + tensor.nbytes]
            header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            at += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + at

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop`."""
        stop = self.size if stop is None else stop
        if start < len(self._head):
            yield self._head[start:stop]
        begin = len(self._head)
        for tensor in self._tensors:
            yield from _bytes_of(tensor, max(0, start - begin), stop - begin)
            begin += tensor.nbytes


def _bytes_of(tensor: Tensor, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes of one tensor, a few rows at a time."""
    rows = tensor if tensor.dim() > 1 else tensor[None]
    row_bytes = rows[0].numel() * rows.element_size() if len(rows) else 0
    stop = min(stop, len(rows) * row_bytes)
    if start >= stop:
        return
    n_rows = max(1, _PIECE_BYTES // row_bytes)
    for first in range(start // row_bytes, -(-stop // row_bytes), n_rows):
        piece = rows[first : first + n_rows].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        at = first * row_bytes
        yield piece[max(0, start - at) : stop - at]


@dataclass(frozen=True, eq=False)
class Rows(Mapping[Key, Tensor]):
    """Captured rows: `rows[12]` or `rows[12, "attn_out"]` is a tensor [rows, hidden]; row i is labelled by `labels[i]`.

    With a reduction each tensor is [hidden], float32, and the labels are those of the `n` reduced rows.
    """

    tensors: Mapping[Key, Tensor]
    labels: Labels
    model: str
    reduce: str | None = None
    messages: tuple[MessageSpan, ...] | None = None

    @property
    def n(self) -> int:
        return len(self.labels)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(layer for layer, _ in self.tensors))

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(dict.fromkeys(site for _, site in self.tensors))

    def __getitem__(self, key: Key | int) -> Tensor:
        if not isinstance(key, tuple):
            if len(self.sites) > 1:
                what = f"{len(self.sites)} sites were captured"
                raise InvalidRequest.of("site", what, f"name one of {self.sites}")
            key = (key, next(iter(self.tensors))[1])
        if key not in self.tensors:
            what = f"layer {key[0]} at {key[1]} was not captured"
            raise InvalidRequest.of("layer", what, f"captured: layers {self.layers}, sites {self.sites}")
        return self.tensors[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or any(key == layer for layer in self.layers)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def message(self, i: int, template: bool = False) -> "Rows":
        """Return the rows of one chat message; with `template` also those of the template's text around it."""
        if self.reduce:
            raise InvalidRequest.of("message", "rows were reduced to one", "capture without reduce")
        if self.messages is None:
            remedy = "capture through chat(), with a template that keeps messages"
            raise InvalidRequest.of("message", "there are no proven message spans", remedy)
        count = len(self.labels.roles)
        if not -count <= i < count:
            raise InvalidRequest.of("message", f"message {i} does not exist", f"the chat has messages 0–{count - 1}")
        i %= count
        chosen = self.labels.message == i
        whole = [span.whole for span in self.messages if template and span.index == i]
        if None in whole:
            what = "this chat template's own text cannot be told apart"
            raise InvalidRequest.of("message", what, "ask without template")
        for start, stop in filter(None, whole):
            chosen |= (self.labels.position >= start) & (self.labels.position < stop)
        index = np.flatnonzero(chosen)
        tensors = {key: tensor[torch.from_numpy(index)] for key, tensor in self.tensors.items()}
        return Rows(tensors, self.labels.take(index), self.model, None, self.messages)

    def file(self) -> RowFile:
        """Return the safetensors file of these rows, `layer.{i}.{site}` and `label.*`, with bytes that are made on
        demand."""
        tensors = {f"layer.{layer}.{site}": tensor for (layer, site), tensor in self.tensors.items()}
        for name in _LABELS:
            tensors[f"label.{name}"] = torch.from_numpy(np.ascontiguousarray(getattr(self.labels, name)))
        spans = None if self.messages is None else [[s.index, s.role, s.content, s.whole] for s in self.messages]
        header = {
            "format": _FORMAT,
            "model": self.model,
            "request": self.labels.request,
            "reduce": self.reduce or "",
            "roles": json.dumps(self.labels.roles),
            "messages": json.dumps(spans),
        }
        return RowFile(tensors, header)

    def save(self, path: Path | str) -> Path:
        """Write that file atomically."""
        path = Path(path)
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            for piece in self.file().pieces():
                file.write(piece)
        return path


def load_rows(path: Path | str) -> Rows:
    """Read a file that `Rows.save` wrote."""
    with reading(path, "file of captured rows"):
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise BadFile(f"{path} holds no captured rows: expected format {_FORMAT}, found {header.get('format')}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return _unpack(path, tensors, header)


def _unpack(path: Path | str, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Rows:
    columns = [tensors[f"label.{name}"].numpy() for name in _LABELS]
    labels = Labels(header["request"], *columns, roles=tuple(json.loads(header["roles"])))
    rows: dict[Key, Tensor] = {}
    for name, tensor in tensors.items():
        kind, *rest = name.split(".")
        if kind == "layer":
            rows[int(rest[0]), SITES[SITES.index(rest[1])]] = tensor
    spans = json.loads(header["messages"])
    messages = None
    if spans is not None:
        messages = tuple(MessageSpan(i, role, tuple(own), whole and tuple(whole)) for i, role, own, whole in spans)
    reduce = header["reduce"] or None
    lengths = {len(column) for column in columns} | ({len(tensor) for tensor in rows.values()} if not reduce else set())
    if len(lengths) > 1 or max(labels.message, default=-1) >= len(labels.roles):
        raise BadFile(f"{path} is not a readable file of captured rows: its rows and labels do not fit; save it anew")
    return Rows(dict(sorted(rows.items())), labels, header["model"], reduce, messages)
