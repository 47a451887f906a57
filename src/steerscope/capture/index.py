"""The labels of a store as Parquet, for pyarrow, pandas and duckdb: one line per row in `index/`, one line per document
in `documents/`, also for documents that could not be read, with the reason, file and line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steerscope.core.rows import Labels
from steerscope.files import atomic_path

ROLE = pa.dictionary(pa.int32(), pa.string())
INDEX = pa.schema(
    [
        ("shard", pa.int32()),
        ("row", pa.int32()),  # within the shard
        ("document", pa.int64()),
        ("position", pa.int32()),  # of a reduction: that of its last token
        ("token_id", pa.int32()),
        ("n", pa.int32()),  # tokens that were reduced to the row
        ("message", pa.int32()),
        ("role", ROLE),
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


class Indexer:
    """Collects the lines of one shard."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._parts: list[pa.RecordBatch] = []
        self._documents: list[dict[str, Any]] = []

    def add(self, entry: DocumentEntry, first: int, count: int, labels: Labels | None, n: int) -> None:
        other = json.dumps(dict(entry.labels), sort_keys=True, default=str)
        line = {name: getattr(entry, name) for name in ("document", "id", "file", "line", "tokens", "cut", "error")}
        found = {"shard": self._shard, "first_row": first, "rows": count, "labels": other if entry.labels else None}
        self._documents.append({**line, **found})
        if not count:
            return
        if labels is None or len(labels) != count:
            raise ValueError(f"{count} rows need as many labels")
        none = labels.message < 0
        names = list(dict.fromkeys(labels.roles)) or [""]
        codes = np.array([names.index(role) for role in labels.roles] or [0], np.int32)[np.maximum(labels.message, 0)]
        roles = pa.DictionaryArray.from_arrays(pa.array(codes, mask=none), pa.array(names))
        columns = [
            np.full(count, self._shard, np.int32),
            np.arange(first, first + count, dtype=np.int32),
            np.full(count, entry.document, np.int64),
            labels.position.astype(np.int32),
            labels.token_id.astype(np.int32),
            np.full(count, n, np.int32),
        ]
        message = pa.array(labels.message.astype(np.int32), mask=none)
        self._parts.append(pa.record_batch([*map(pa.array, columns), message, roles], schema=INDEX))

    def counts(self) -> dict[str, int]:
        bad = sum(line["error"] is not None for line in self._documents)
        cut = sum(line["cut"] > 0 for line in self._documents)
        tokens = sum(line["tokens"] for line in self._documents)
        return {"documents": len(self._documents), "bad": bad, "cut": cut, "tokens": tokens}

    def write(self, index: Path, documents: Path) -> None:
        labels = pa.Table.from_batches(self._parts, schema=INDEX).unify_dictionaries().combine_chunks()
        _write(labels, index)
        _write(pa.Table.from_pylist(self._documents, schema=DOCUMENTS), documents)


def _write(table: pa.Table, path: Path) -> None:
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
