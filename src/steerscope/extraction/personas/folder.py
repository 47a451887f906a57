"""The folder of a run, written so that a killed run goes on where it stopped and nothing is done twice.

A `Ledger` is a JSONL file with an `id` per line, read back into a dictionary; lines are added in whole batches, and
what a crash tore off is passed over, and cut off before the next lines are added: reading changes nothing, so that one
may look at a run that goes on. Activations lie in shards named by the hash of their bytes.
A batch writes its shard first and then its lines, so a line always finds its row, and a shard that is damaged takes its
lines with it: those answers count as not given.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from steerscope.files import atomic_path, reading
from steerscope.specs.errors import BadFile

Record = Mapping[str, Any]


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:24]


def write_json(path: Path, data: object) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_pt(path: Path, data: object) -> None:
    """The same bytes for the same data: torch would put the name of a temporary file into them."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


class Ledger:
    def __init__(self, path: Path, holds: Callable[[Record], bool] = lambda _: True) -> None:
        """`holds` says of a record whether what it speaks of is still there."""
        self._path, self.records = path, dict[str, Record]()
        raw = path.read_bytes() if path.is_file() else b""
        kept = []
        for line in raw.splitlines(keepends=True):
            record = _record(line)
            if record is not None and record["id"] not in self.records and holds(record):
                self.records[record["id"]] = record
                kept.append(line)
        whole = b"".join(kept)
        self._whole = None if whole == raw else whole

    def append(self, records: Sequence[Record]) -> None:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._whole is not None:
            with atomic_path(self._path) as temporary:
                temporary.write_bytes(self._whole)
            self._whole = None
        try:
            with self._path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadFile(f"cannot write {self._path}: {error.strerror}") from error
        self.records.update((record["id"], record) for record in records)


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:  # UnicodeDecodeError is one
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None


class Shards:
    """Activations [n, layers, hidden], float32, a file for each batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: dict[str, bool] = {}

    def write(self, persona: str, means: Tensor) -> str:
        data = safetensors.torch.save({"means": means.contiguous()})
        name = f"{persona}-{hashlib.sha256(data).hexdigest()[:24]}.safetensors"
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(self._folder / name) as temporary:
            temporary.write_bytes(data)
        self._whole[name] = True
        return name

    def holds(self, record: Record) -> bool:
        name = record.get("shard")
        if name is None:
            return True  # an answer without a single row
        if name not in self._whole:
            path = self._folder / name
            self._whole[name] = path.is_file() and path.parent == self._folder and _sha256(path) in name
        return self._whole[name]

    def read(self, records: Sequence[Record]) -> Tensor:
        """[records, layers, hidden], in their order."""
        shards = {}
        for name in {record["shard"] for record in records}:
            with reading(self._folder / name, "shard of activations"):
                shards[name] = safetensors.torch.load_file(self._folder / name)["means"]
        return torch.stack([shards[record["shard"]][record["row"]] for record in records])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]
