"""Documents of a corpus, found by number: lines of JSONL files, rows of Parquet files.

A document is an object with `text`, `messages` (a chat) or `token_ids`, perhaps an `id`, and any other fields, which
become its labels. One that is not is handed on with the reason, its file and its line. A corpus is cut into shards by
numbers of lines alone, so that the same file always gives the same shards.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import xxhash
from pydantic import Field

from steerscope.capture.index import DocumentEntry
from steerscope.capture.shards import digest
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem

CONTENT = {"text": (str, None), "messages": (list, dict), "token_ids": (list, int)}  # and what is in the list
_WANTED = {"text": "a text", "messages": "a list of objects", "token_ids": "a list of integers"}
_PIECE = 1 << 24


class SourceFile(Spec):
    """One file of a corpus: its content, how many lines it has, and where its shards begin."""

    path: str
    digest: str
    lines: int = Field(ge=0)
    offsets: tuple[int, ...] = ()  # of a JSONL file: the byte at which each shard's first line begins


@dataclass(frozen=True, slots=True)
class Document:
    entry: DocumentEntry
    content: str | list[Any] | None  # text, messages or token ids; None when the entry tells an error

    def failed(self, why: str) -> "Document":
        return replace(self, entry=replace(self.entry, error=_unicode(why), tokens=0, cut=0), content=None)


def _unicode(text: str) -> str:
    """JSON can spell lone surrogates, which no file takes."""
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
    """Count lines, note where shards begin, and take the checksum, in one pass."""
    with reading(path, "corpus"):
        if path.suffix == ".parquet":
            lines = pq.ParquetFile(path).metadata.num_rows
            return SourceFile(path=str(path.resolve()), digest=digest(path), lines=lines)
        found, lines, offsets, at = xxhash.xxh3_128(), 0, [0], 0
        last = b"\n"
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                found.update(piece)
                end = -1
                while (end := piece.find(b"\n", end + 1)) >= 0:
                    lines += 1
                    if lines % shard_documents == 0:
                        offsets.append(at + end + 1)
                at, last = at + len(piece), piece[-1:]
    if last != b"\n":
        lines += 1
    shards = -(-lines // shard_documents)
    return SourceFile(path=str(path.resolve()), digest=found.hexdigest(), lines=lines, offsets=tuple(offsets[:shards]))


def preview(path: Path, count: int) -> Iterator[Document]:
    """The first documents of a file."""
    yield from _documents(SourceFile(path=str(path), digest="", lines=count, offsets=(0,)), 0, count, 0)


@dataclass(frozen=True, slots=True)
class Corpus:
    files: tuple[SourceFile, ...]
    shard_documents: int

    @property
    def lines(self) -> int:
        return sum(file.lines for file in self.files)

    @property
    def shards(self) -> int:
        return sum(-(-file.lines // self.shard_documents) for file in self.files)

    def documents(self, shard: int) -> Iterator[Document]:
        """Those of one shard; empty lines are none."""
        before = 0
        for file in self.files:
            count = -(-file.lines // self.shard_documents)
            if shard < count:
                yield from _documents(file, shard, self.shard_documents, before)
                return
            shard, before = shard - count, before + file.lines


def _documents(file: SourceFile, shard: int, size: int, before: int) -> Iterator[Document]:
    first, stop = shard * size, min(file.lines, (shard + 1) * size)
    lines = _parquet(Path(file.path), first, stop) if file.path.endswith(".parquet") else _jsonl(file, shard, size)
    for i, line in enumerate(lines, first):
        if line is not None:
            yield _document(line, DocumentEntry(document=before + i, file=file.path, line=i + 1))


def _jsonl(file: SourceFile, shard: int, size: int) -> Iterator[bytes | None]:
    with open(file.path, "rb") as opened:
        opened.seek(file.offsets[shard])
        for line, _ in zip(opened, range(size), strict=False):
            yield line if line.strip() else None


def _parquet(path: Path, first: int, stop: int) -> Iterator[Mapping[str, Any]]:
    """Only the row groups that hold lines of the shard are read."""
    with reading(path, "corpus"):
        file, begin = pq.ParquetFile(path), 0
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            if begin < stop and end > first:
                cut = max(first - begin, 0)
                yield from file.read_row_group(group).slice(cut, min(stop, end) - begin - cut).to_pylist()
            begin = end


def _document(line: bytes | Mapping[str, Any], entry: DocumentEntry) -> Document:
    bad = Document(entry, None)
    try:
        found = json.loads(line) if isinstance(line, bytes) else {k: v for k, v in line.items() if v is not None}
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        return bad.failed(f"not JSON: {error}")
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
