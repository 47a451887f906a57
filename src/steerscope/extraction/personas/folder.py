"""The files of a persona run: answers and scores as ledgers, mean activations as shards.

A batch writes its shard first and then its lines, so a line always finds its row. A shard is named by the hash of its
bytes; the answers of a damaged shard count as missing.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import Ledger, Record, file_digest
from steerscope.files import atomic_path, reading


def write_pt(path: Path, data: object) -> None:
    """Write the same bytes for the same data: `torch.save` to a path stores the name of the temporary file."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


class Shards:
    """Activations [n, layers, hidden], float32, one file per batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._intact: dict[str, bool] = {}

    def write(self, persona: str, means: Tensor) -> str:
        data = safetensors.torch.save({"means": means.contiguous()})
        name = f"{persona}-{hashlib.sha256(data).hexdigest()[:24]}.safetensors"
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(self._folder / name) as temporary:
            temporary.write_bytes(data)
        self._intact[name] = True
        return name

    def holds(self, record: Record) -> bool:
        """Whether the shard of an answer is intact; an answer without a row needs none."""
        name = record.get("shard")
        if name is None:
            return True
        if name not in self._intact:
            path = self._folder / name
            inside = path.is_file() and path.parent == self._folder
            self._intact[name] = inside and file_digest(path)[:24] in name
        return self._intact[name]

    def read(self, records: Sequence[Record]) -> Tensor:
        """Return [records, layers, hidden], in their order."""
        shards = {}
        for name in {record["shard"] for record in records}:
            with reading(self._folder / name, "shard of activations"):
                shards[name] = safetensors.torch.load_file(self._folder / name)["means"]
        return torch.stack([shards[record["shard"]][record["row"]] for record in records])


class Folder:
    """The parts of a run's folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.shards = Shards(out / "activations")

    def answers(self, persona: Persona) -> Ledger:
        return Ledger(self.out / "responses" / f"{persona.name}.jsonl", self.shards.holds)

    def scores(self, persona: Persona) -> Ledger:
        return Ledger(self.out / "scores" / f"{persona.name}.jsonl")
