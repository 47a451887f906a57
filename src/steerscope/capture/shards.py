"""One shard of a corpus on its way to disk: rows, the index of their labels, its documents, and then its commit.

A shard is a safetensors file with one tensor `rows` [rows, keys, hidden] whose header is written last, two Parquet
files, and a small JSON file with their checksums. That JSON is the commit: it appears atomically after the other files,
and a shard without it does not count.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import torch
import xxhash
from pydantic import Field, JsonValue
from torch import Tensor

from steerscope.capture.index import DocumentEntry, Indexer
from steerscope.capture.row_file import TYPES
from steerscope.core.rows import Labels
from steerscope.core.slot_table import Key
from steerscope.files import atomic_path
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.steering import Site

HEADER = 4096  # bytes; rows begin on a page
_PIECE = 4 << 20
RowType = Literal["bfloat16", "float16", "float32"]


class StoreInfo(Spec):
    """The contents of every shard of a store."""

    format: Literal["steerscope-store-1"] = "steerscope-store-1"
    model: str
    hidden: int = Field(ge=1)
    keys: tuple[tuple[int, Site], ...] = Field(min_length=1)  # in the order of a row's second dimension
    dtype: RowType = "bfloat16"
    capture: Capture = Capture()
    shards: int = Field(ge=0)  # when the store is complete
    job: dict[str, JsonValue] = {}  # the job that makes them

    @property
    def row_bytes(self) -> int:
        return len(self.keys) * self.hidden * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Commit(Spec):
    """A shard on disk. `rows_xxh3` is the checksum of the tensor's bytes, without the header."""

    shard: int
    rows: int
    documents: int
    bad: int
    cut: int
    tokens: int
    rows_xxh3: str
    index_xxh3: str
    documents_xxh3: str


def rows_path(folder: Path, shard: int) -> Path:
    return folder / "rows" / f"{shard:08}.safetensors"


def index_path(folder: Path, shard: int) -> Path:
    return folder / "index" / f"{shard:08}.parquet"


def documents_path(folder: Path, shard: int) -> Path:
    return folder / "documents" / f"{shard:08}.parquet"


def commit_path(folder: Path, shard: int) -> Path:
    return folder / "commits" / f"{shard:08}.json"


def digest(path: Path, skip: int = 0) -> str:
    """Return the 128-bit XXH3 of a file. It finds faults of disks and networks at a tenth of the cost of SHA-256."""
    found, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(skip)
        while got := file.readinto(piece):
            found.update(piece[:got])
    return found.hexdigest()


class ShardWriter:
    """Writes documents in order. `commit` is set when the block of `writing_shard` has ended without an error."""

    commit: Commit

    def __init__(self, info: StoreInfo, shard: int, file: BinaryIO) -> None:
        self.info, self.shard, self.rows = info, shard, 0
        self.index = Indexer(shard)
        self._file, self._hash = file, xxhash.xxh3_128()
        file.seek(HEADER)

    def add(self, entry: DocumentEntry, rows: Tensor | None = None, labels: Labels | None = None, n: int = 1) -> None:
        """Add a document and its rows [rows, keys, hidden]; without rows, a document that could not be read."""
        count = 0 if rows is None else len(rows)
        self.index.add(entry, self.rows, count, labels, n)
        self.rows += count
        if rows is not None and count:
            kept = rows.detach().to("cpu", self.info.torch_dtype).contiguous()
            data = memoryview(kept.view(torch.uint8).numpy().reshape(-1))  # pyright: ignore[reportArgumentType]
            self._hash.update(data)
            while data:  # an unbuffered write may write only a part
                data = data[self._file.write(data) :]

    def finish(self) -> str:
        """Write the header and return the checksum of the rows."""
        size, shape = self.rows * self.info.row_bytes, [self.rows, len(self.info.keys), self.info.hidden]
        tensor = {"dtype": TYPES[self.info.torch_dtype], "shape": shape, "data_offsets": [0, size]}
        header = {"__metadata__": {"format": "pt", "model": self.info.model}, "rows": tensor}
        text = json.dumps(header).encode()
        self._file.seek(0)
        self._file.write((HEADER - 8).to_bytes(8, "little") + text.ljust(HEADER - 8))
        return self._hash.hexdigest()


@contextmanager
def writing_shard(folder: Path, info: StoreInfo, shard: int) -> Iterator[ShardWriter]:
    """Write one shard completely, or leave no commit when anything in the block or while writing fails."""
    with atomic_path(rows_path(folder, shard)) as temporary, temporary.open("r+b", buffering=0) as file:
        writer = ShardWriter(info, shard, file)
        yield writer
        found = writer.finish()
        commit_path(folder, shard).unlink(missing_ok=True)  # the shard may be written again
    writer.index.write(index_path(folder, shard), documents_path(folder, shard))
    writer.commit = Commit(
        shard=shard,
        rows=writer.rows,
        **writer.index.counts(),
        rows_xxh3=found,
        index_xxh3=digest(index_path(folder, shard)),
        documents_xxh3=digest(documents_path(folder, shard)),
    )
    with atomic_path(commit_path(folder, shard)) as temporary:
        temporary.write_text(writer.commit.to_json() + "\n", encoding="utf-8")


def checksum(commits: Sequence[Commit]) -> str:
    """Return the checksum of all shards' checksums, in order."""
    parts = [f"{c.shard} {c.rows_xxh3} {c.index_xxh3} {c.documents_xxh3}\n" for c in commits]
    return xxhash.xxh3_128("".join(parts).encode()).hexdigest()


def stacked(rows: "dict[Key, Tensor]", keys: Sequence[Key]) -> Tensor:
    """Stack tensors by key to [rows, keys, hidden]; a reduction's [hidden] is one row."""
    return torch.stack([rows[key] if rows[key].dim() > 1 else rows[key].unsqueeze(0) for key in keys], dim=1)
