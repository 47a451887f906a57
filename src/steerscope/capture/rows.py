"""Captured rows: tensors by layer and site, their labels, and their file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from steerscope.capture.row_file import RowFile
from steerscope.core.rows import Labels
from steerscope.core.slot_table import Key
from steerscope.files import atomic_path, reading
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import SITES, Site
from steerscope.specs.tokens import MessageSpan

_FORMAT = "steerscope-rows-1"
_SITE: dict[str, Site] = {site: site for site in SITES}


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
                raise InvalidRequest(
                    [Problem("site", f"{len(self.sites)} sites were captured", f"name one of {self.sites}")]
                )
            key = (key, next(iter(self.tensors))[1])
        if key not in self.tensors:
            what = f"layer {key[0]} at {key[1]} was not captured"
            raise InvalidRequest([Problem("layer", what, f"captured: layers {self.layers}, sites {self.sites}")])
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
            raise InvalidRequest([Problem("message", "rows were reduced to one", "capture without reduce")])
        if self.messages is None:
            what = "there are no proven message spans"
            raise InvalidRequest(
                [Problem("message", what, "capture through chat(), with a template that keeps messages")]
            )
        count = len(self.labels.roles)
        if not -count <= i < count:
            raise InvalidRequest(
                [Problem("message", f"message {i} does not exist", f"the chat has messages 0–{count - 1}")]
            )
        i %= count
        chosen = self.labels.message == i
        for span in self.messages if template else ():
            if span.index == i and span.whole is None:
                what = "this chat template's own text cannot be told apart"
                raise InvalidRequest([Problem("message", what, "ask without template")])
            if span.index == i and span.whole is not None:
                chosen |= (self.labels.position >= span.whole[0]) & (self.labels.position < span.whole[1])
        index = np.flatnonzero(chosen)
        tensors = {key: tensor[torch.from_numpy(index)] for key, tensor in self.tensors.items()}
        return Rows(tensors, self.labels.take(index), self.model, None, self.messages)

    def file(self) -> RowFile:
        """Return the safetensors file of these rows, `layer.{i}.{site}` and `label.*`, with bytes that are made on
        demand."""
        tensors = {f"layer.{layer}.{site}": tensor for (layer, site), tensor in self.tensors.items()}
        for name in ("position", "token_id", "generated", "message"):
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
    columns = [tensors[f"label.{name}"].numpy() for name in ("position", "token_id", "generated", "message")]
    labels = Labels(header["request"], *columns, roles=tuple(json.loads(header["roles"])))
    rows: dict[Key, Tensor] = {}
    for name, tensor in tensors.items():
        kind, *rest = name.split(".")
        if kind == "layer":
            rows[int(rest[0]), _SITE[rest[1]]] = tensor
    spans = json.loads(header["messages"])
    messages = None
    if spans is not None:
        messages = tuple(MessageSpan(i, role, tuple(own), whole and tuple(whole)) for i, role, own, whole in spans)
    reduce = header["reduce"] or None
    lengths = {len(column) for column in columns} | ({len(tensor) for tensor in rows.values()} if not reduce else set())
    if len(lengths) > 1 or max(labels.message, default=-1) >= len(labels.roles):
        raise BadFile(f"{path} is not a readable file of captured rows: its rows and labels do not fit; save it anew")
    return Rows(dict(sorted(rows.items())), labels, header["model"], reduce, messages)
