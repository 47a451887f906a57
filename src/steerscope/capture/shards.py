"""Shards of a corpus on their way to disk: rows, the index of their labels, their documents, and then their commits.

A shard is a safetensors file with one tensor `rows` [rows, keys, hidden] whose header is written last, two Parquet
files for pyarrow, pandas and duckdb (a line per row; a line per document, also for one that could not be read), and a
small JSON file with their checksums. That JSON is the commit: it appears atomically after the other files, and a shard
without it does not count.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from pydantic import Field, JsonValue
from torch import Tensor

from steerscope.capture.rows import TYPES
from steerscope.core.rows import Labels
from steerscope.core.slot_table import Key
from steerscope.files import atomic_path, write_text
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.steering import Site

HEADER = 4096  # bytes; rows begin on a page
PARTS = {"rows": "safetensors", "index": "parquet", "documents": "parquet", "commits": "json"}  # folders and suffixes
_PIECE = 4 << 20
RowType = Literal["bfloat16", "float16", "float32"]

INDEX = pa.schema(
    [
        ("shard", pa.int32()),
        ("row", pa.int32()),  # within the shard
        ("document", pa.int64()),
        ("position", pa.int32()),  # of a reduction: that of its last token
        ("token_id", pa.int32()),
        ("n", pa.int32()),  # tokens that were reduced to the row
        ("message", pa.int32()),
        ("role", pa.dictionary(pa.int32(), pa.string())),
    ]
)
DOCUMENTS = pa.schema(
    [
        ("document", pa.int64()),
        ("id", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("shard", pa.int32()),
        ("first_row", pa.int32()),  # within the shard
        ("rows", pa.int32()),
        ("tokens", pa.int32()),
        ("cut", pa.int32()),  # tokens at the end that were left out
        ("error", pa.string()),
        ("labels", pa.string()),  # the other fields of the document, as JSON
    ]
)


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


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """One document without its rows."""

    document: int
    file: str
    line: int
    id: str | None = None
    tokens: int = 0
    cut: int = 0
    error: str | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)


class DocumentRows(NamedTuple):
    """A document with its rows [rows, keys, hidden] and their labels; without rows, one that could not be read."""

    entry: DocumentEntry
    rows: Tensor | None = None
    labels: Labels | None = None
    n: int = 1  # tokens per row: more than 1 for a reduction


def part_path(folder: Path, part: str, shard: int) -> Path:
    return folder / part / f"{shard:08}.{PARTS[part]}"


def digest(path: Path, skip: int = 0) -> str:
    """Return the 128-bit XXH3 of a file. It finds faults of disks and networks at a tenth of the cost of SHA-256."""
    found = xxhash.xxh3_128()
    piece = memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(skip)
        while got := file.readinto(piece):
            found.update(piece[:got])
    return found.hexdigest()


class ShardWriter:
    """Writes documents in order. `commit` is set when the block of `writing_shard` has ended without an error."""

    commit: Commit

    def __init__(self, info: StoreInfo, shard: int, file: BinaryIO) -> None:
        self.info = info
        self.shard = shard
        self.rows = 0
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._index: list[pa.RecordBatch] = []
        self._documents: list[dict[str, Any]] = []
        file.seek(HEADER)

    def add(self, pieces: Iterable[DocumentRows]) -> None:
        for piece in pieces:
            count = 0 if piece.rows is None else len(piece.rows)
            line = asdict(piece.entry) | {"shard": self.shard, "first_row": self.rows, "rows": count}
            other = piece.entry.labels
            line["labels"] = json.dumps(dict(other), sort_keys=True, default=str) if other else None
            self._documents.append(line)
            if piece.rows is not None and count:
                self._index.append(self._lines(piece, count))
                self._write(piece.rows)
                self.rows += count

    def _lines(self, piece: DocumentRows, count: int) -> pa.RecordBatch:
        """Return the lines of the index for a document's rows."""
        labels = piece.labels
        if labels is None or len(labels) != count:
            raise ValueError(f"{count} rows need as many labels")
        message = pa.array(labels.message.astype(np.int32), mask=labels.message < 0)
        columns = {
            "shard": np.full(count, self.shard),
            "row": np.arange(self.rows, self.rows + count),
            "document": np.full(count, piece.entry.document),
            "position": labels.position,
            "token_id": labels.token_id,
            "n": np.full(count, piece.n),
            "message": message,
            "role": pa.array(labels.roles, pa.string()).dictionary_encode().take(message),
        }
        return pa.RecordBatch.from_pydict(columns, schema=INDEX)

    def _write(self, rows: Tensor) -> None:
        kept = rows.detach().to("cpu", self.info.torch_dtype).contiguous()
        data = memoryview(kept.view(torch.uint8).numpy().reshape(-1))  # pyright: ignore[reportArgumentType]
        self._hash.update(data)
        while data:  # an unbuffered write may write only a part
            data = data[self._file.write(data) :]

    def finish_rows(self) -> str:
        """Write the header and return the checksum of the rows."""
        size = self.rows * self.info.row_bytes
        shape = [self.rows, len(self.info.keys), self.info.hidden]
        tensor = {"dtype": TYPES[self.info.torch_dtype], "shape": shape, "data_offsets": [0, size]}
        header = {"__metadata__": {"format": "pt", "model": self.info.model}, "rows": tensor}
        text = json.dumps(header).encode()
        self._file.seek(0)
        self._file.write((HEADER - 8).to_bytes(8, "little") + text.ljust(HEADER - 8))
        return self._hash.hexdigest()

    def finish(self, folder: Path, rows_digest: str) -> None:
        """Write the two tables and then the commit."""
        labels = pa.Table.from_batches(self._index, schema=INDEX).unify_dictionaries().combine_chunks()
        documents = pa.Table.from_pylist(self._documents, schema=DOCUMENTS)
        digests = {"rows_xxh3": rows_digest}
        for part, table in (("index", labels), ("documents", documents)):
            path = part_path(folder, part, self.shard)
            with atomic_path(path) as temporary:
                pq.write_table(table, temporary, compression="zstd")
            digests[f"{part}_xxh3"] = digest(path)
        self.commit = Commit(
            shard=self.shard,
            rows=self.rows,
            documents=len(self._documents),
            bad=sum(line["error"] is not None for line in self._documents),
            cut=sum(line["cut"] > 0 for line in self._documents),
            tokens=sum(line["tokens"] for line in self._documents),
            **digests,
        )
        write_text(part_path(folder, "commits", self.shard), self.commit.to_json() + "\n")


@contextmanager
def writing_shard(folder: Path, info: StoreInfo, shard: int) -> Iterator[ShardWriter]:
    """Write one shard completely, or leave no commit when anything in the block or while writing fails."""
    with atomic_path(part_path(folder, "rows", shard)) as temporary, temporary.open("r+b", buffering=0) as file:
        writer = ShardWriter(info, shard, file)
        yield writer
        rows_digest = writer.finish_rows()
        part_path(folder, "commits", shard).unlink(missing_ok=True)  # the shard may be written again
    writer.finish(folder, rows_digest)


def write_shards(
    folder: Path, info: StoreInfo, shards: Iterable[tuple[int, Iterator[list[DocumentRows]]]]
) -> Iterator[Commit]:
    """Write each shard from its documents, and yield its commit when it is on disk.

    Rows are made in the caller's thread and written in another, one list at a time: engine and disk work at the same
    time, and a slow disk stops the engine instead of filling memory. The end of a shard (tables, sync, commit) overlaps
    with the start of the next. The other threads wait for nothing of this one, so a signal here cannot leave them
    waiting.
    """
    ending: Future[Commit] | None = None
    with ThreadPoolExecutor(2, "steerscope-disk") as disk:
        for number, made in shards:
            with ExitStack() as shard:
                writer = shard.enter_context(writing_shard(folder, info, number))
                writing: Future[None] | None = None
                for some in made:
                    if writing is not None:
                        writing.result()
                    writing = disk.submit(writer.add, some)
                if writing is not None:
                    writing.result()
                if ending is not None:
                    yield ending.result()
                ending = disk.submit(_end, shard.pop_all(), writer)
        if ending is not None:
            yield ending.result()


def _end(shard: ExitStack, writer: ShardWriter) -> Commit:
    shard.close()
    return writer.commit


def checksum(commits: Sequence[Commit]) -> str:
    """Return the checksum of all shards' checksums, in order."""
    parts = [f"{c.shard} {c.rows_xxh3} {c.index_xxh3} {c.documents_xxh3}\n" for c in commits]
    return xxhash.xxh3_128("".join(parts).encode()).hexdigest()


def stacked(rows: "dict[Key, Tensor]", keys: Sequence[Key]) -> Tensor:
    """Stack tensors by key to [rows, keys, hidden]; a reduction's [hidden] is one row."""
    return torch.stack([rows[key] if rows[key].dim() > 1 else rows[key].unsqueeze(0) for key in keys], dim=1)
