"""Documents of a corpus by number: lines of JSONL files, rows of Parquet files.

A document is an object with `text`, `messages` (a chat) or `token_ids`, perhaps an `id`, and other fields, which become
its labels. A bad document is recorded with the reason, file and line. Shards are cut by line numbers alone, so the same
file always has the same shards.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import Field

from steerscope.capture.shards import DocumentEntry, digest
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, not_json

CONTENT = {"text": (str, None), "messages": (list, dict), "token_ids": (list, int)}  # types: content, list items
_WANTED = {"text": "a text", "messages": "a list of objects", "token_ids": "a list of integers"}
_ROWS = 256  # of a Parquet file, decoded together


class SourceFile(Spec):
    """One file of a corpus: its digest, number of lines, and the offsets of its shards."""

    path: str
    digest: str
    lines: int = Field(ge=0)
    offsets: tuple[int, ...] = ()  # of a JSONL file: the byte at which each shard's first line begins


@dataclass(frozen=True, slots=True)
class Document:
    entry: DocumentEntry
    content: Any  # text, messages or token ids, later the prompt; None when the entry has an error

    def failed(self, why: str) -> "Document":
        return replace(self, entry=replace(self.entry, error=_unicode(why), tokens=0, cut=0), content=None)


def _unicode(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and files cannot."""
    return text.encode("utf-8", "replace").decode()


def check_paths(paths: Iterable[Path]) -> None:
    problems = []
    for path in paths:
        if path.suffix not in (".jsonl", ".parquet"):
            problems.append(Problem("data", f"{path} is neither .jsonl nor .parquet", "convert or rename it"))
        elif not path.is_file():
            problems.append(Problem("data", f"{path} does not exist", "check the path"))
    if problems:
        raise InvalidRequest(problems)


def scan(path: Path, shard_documents: int) -> SourceFile:
    """Return a file's lines, offsets of shards, and checksum, in one pass."""
    place = os.path.abspath(path)  # links stay: the target, e.g. in a cache, may have no suffix
    with reading(path, "corpus"):
        if path.suffix == ".parquet":
            lines = pq.ParquetFile(path).metadata.num_rows
            return SourceFile(path=place, digest=digest(path), lines=lines)
        found = xxhash.xxh3_128()
        lines = 0
        offsets = list[int]()
        at = 0
        with path.open("rb") as file:
            for line in file:
                if lines % shard_documents == 0:
                    offsets.append(at)
                found.update(line)
                at = at + len(line)
                lines = lines + 1
    return SourceFile(path=place, digest=found.hexdigest(), lines=lines, offsets=tuple(offsets))


def preview(path: Path, count: int) -> Iterator[Document]:
    """Yield the first documents of a file."""
    file = SourceFile(path=str(path), digest="", lines=count, offsets=(0,))
    yield from _documents(file, _lines(file, 0, count), 0, 0)


@dataclass(frozen=True, slots=True)
class Corpus:
    files: tuple[SourceFile, ...]
    shard_documents: int

    @property
    def shards(self) -> int:
        return sum(-(-file.lines // self.shard_documents) for file in self.files)

    def documents(self, shard: int) -> Iterator[Document]:
        """Yield the documents of one shard, without empty lines."""
        before = 0
        for file in self.files:
            count = -(-file.lines // self.shard_documents)
            if shard < count:
                lines = self._checked(file, shard)
                yield from _documents(file, lines, shard * self.shard_documents, before)
                return
            shard = shard - count
            before = before + file.lines

    def _checked(self, file: SourceFile, shard: int) -> Iterator["_Line"]:
        """Check the number of lines: a file that was edited since the scan has other documents under the same
        numbers."""
        wanted = min(file.lines - shard * self.shard_documents, self.shard_documents)
        count = 0
        for line in _lines(file, shard, self.shard_documents):
            count += 1
            yield line
        if count != wanted:
            raise _changed(file, f"{count} lines are where {wanted} were")


_Line = bytes | Mapping[str, Any]


def _documents(file: SourceFile, lines: Iterable[_Line], first: int, before: int) -> Iterator[Document]:
    for i, line in enumerate(lines, first):
        if not isinstance(line, bytes) or line.strip():
            yield _document(line, DocumentEntry(document=before + i, file=file.path, line=i + 1))


def _lines(file: SourceFile, shard: int, size: int) -> Iterator[_Line]:
    with reading(file.path, "corpus"):
        if file.path.endswith(".parquet"):
            yield from _parquet(file.path, shard * size, min(file.lines, (shard + 1) * size))
        else:
            yield from _jsonl(file, shard, size)


def _changed(file: SourceFile, how: str) -> BadFile:
    return BadFile(f"{file.path} has changed since the run began ({how}): put it back, or capture it into a new folder")


def _jsonl(file: SourceFile, shard: int, size: int) -> Iterator[bytes]:
    with open(file.path, "rb") as opened:
        opened.seek(file.offsets[shard])
        yield from islice(opened, size)
        if file.offsets[shard + 1 : shard + 2] not in ((), (opened.tell(),)):
            raise _changed(file, "its lines have other lengths")


def _parquet(path: str, first: int, stop: int) -> Iterator[Mapping[str, Any]]:
    found = os.stat(path)
    rows = _opened(path, (found.st_ino, found.st_mtime_ns, found.st_size))
    while first < stop and (some := rows.after(first, stop)):
        yield from some
        first += len(some)


class _ParquetRows:
    """Rows of a Parquet file by number. Read in ascending order, every row is decoded once, and few are held."""

    def __init__(self, path: str) -> None:
        self.file = pq.ParquetFile(path)
        groups = (self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups))
        self.begins = [*accumulate(groups, initial=0)]  # of row groups; the last is the end
        # decoded rows, from `at` on
        self.at = 0
        self.held = pa.table({})
        self.batches: Iterator[Any] = iter(())

    def after(self, first: int, stop: int) -> list[dict[str, Any]]:
        """Return some rows from `first` on, or none at the end."""
        group = bisect_right(self.begins, first) - 1
        if group >= self.file.num_row_groups:
            return []
        held = self.held.num_rows
        if not held or first < self.at or self.at + held < self.begins[group]:
            self.at = self.begins[group]
            self.held = pa.table({})
            self.batches = self.file.iter_batches(_ROWS, row_groups=[*range(group, self.file.num_row_groups)])
        while self.at + self.held.num_rows <= first:
            self.at = self.at + self.held.num_rows
            self.held = next(self.batches)
        return self.held.slice(first - self.at, stop - first).to_pylist()


@lru_cache(maxsize=1)
def _opened(path: str, version: tuple[int, ...]) -> _ParquetRows:
    del version  # part of the cache key: a replaced file is opened again
    return _ParquetRows(path)


def _document(line: bytes | Mapping[str, Any], entry: DocumentEntry) -> Document:
    bad = Document(entry, None)
    try:
        found = json.loads(line) if isinstance(line, bytes) else _given(line)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
        return bad.failed(not_json(error))
    if not isinstance(found, dict):
        return bad.failed(f"is {type(found).__name__}, not an object")
    given = [name for name in CONTENT if name in found]
    name = None if found.get("id") is None else _unicode(str(found["id"]))
    labels = {key: value for key, value in found.items() if key not in (*CONTENT, "id")}
    bad = Document(replace(entry, id=name, labels=labels), None)
    if len(given) != 1:
        return bad.failed(f"has {' and '.join(given) or 'no content'}; give one of {', '.join(CONTENT)}")
    content, (kind, part) = found[given[0]], CONTENT[given[0]]
    if not content or type(content) is not kind or (kind is list and any(type(item) is not part for item in content)):
        return bad.failed(f"{given[0]} is empty, or not {_WANTED[given[0]]}")
    return replace(bad, content=content)


def _given(value: Any) -> Any:
    """Remove null fields: an Arrow struct has all fields of its type."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value
