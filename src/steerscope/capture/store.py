"""Corpora of rows on disk.

    DIR/store.json                the contents of every shard, and the job that makes them
    DIR/rows/00000000.safetensors rows [rows, keys, hidden], bfloat16 by default
    DIR/index/00000000.parquet    one line per row: shard, row, document, position, token_id, n, message, role
    DIR/documents/….parquet       one line per document: id, file, line, first_row, rows, error, labels
    DIR/commits/00000000.json     the shard's checksums; without it the shard does not exist
    DIR/manifest.json             all commits and one checksum, when the last shard is there

`ActivationStore` maps the rows into memory: opening reads the commits; rows are read from disk on first use.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from safetensors import safe_open
from torch import Tensor

from steerscope.capture.batches import Part, ShuffledRows
from steerscope.capture.rows import Rows
from steerscope.capture.shards import (
    HEADER,
    Commit,
    StoreInfo,
    checksum,
    commit_path,
    digest,
    documents_path,
    index_path,
    rows_path,
)
from steerscope.core.rows import Labels
from steerscope.core.slot_table import Key
from steerscope.files import atomic_path, reading
from steerscope.specs.errors import BadFile, InvalidRequest, Problem

PARTS = ("rows", "index", "documents", "commits")


def create(folder: Path, info: StoreInfo) -> None:
    for part in PARTS:
        (folder / part).mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "store.json") as temporary:
        temporary.write_text(info.to_json() + "\n", encoding="utf-8")


def read_info(folder: Path) -> StoreInfo:
    with reading(folder / "store.json", "description of a store"):
        return StoreInfo.from_json((folder / "store.json").read_bytes())


def present(folder: Path) -> list[int]:
    """Return the committed shards, in order."""
    return sorted(int(path.stem) for path in (folder / "commits").glob("[0-9]*.json"))


def committed(folder: Path, known: Mapping[int, Commit] | None = None) -> list[Commit]:
    """Return the commits of all committed shards. Those in `known` are not read again."""
    found = ((known or {}).get(shard) or read_commit(folder, shard) for shard in present(folder))
    return [commit for commit in found if commit is not None]


def read_commit(folder: Path, shard: int) -> Commit | None:
    """Return the commit of one shard, or None when it has none yet."""
    path = commit_path(folder, shard)
    with reading(path, "commit of a shard"):
        return Commit.from_json(path.read_bytes()) if path.is_file() else None


def finish(folder: Path, info: StoreInfo) -> str | None:
    """Write the manifest and return the store's checksum, or None when shards are missing."""
    commits = committed(folder)
    if [c.shard for c in commits] != list(range(info.shards)):
        return None
    whole = {"checksum": checksum(commits), "shards": [c.model_dump() for c in commits]}
    with atomic_path(folder / "manifest.json") as temporary:
        temporary.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    return checksum(commits)


class ActivationStore:
    """A corpus of rows on disk, memory-mapped. A store that is still being written shows the shards committed so far.

    ```python
    import steerscope as ss

    store = ss.ActivationStore("rows")
    print(len(store), store.keys, store.document(0)[12].shape)
    for batch in store.batches(64, layer=12, part="train"):
        print(batch.shape)
    ```
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.info = read_info(self.folder)
        manifest = self.folder / "manifest.json"
        self.complete = manifest.is_file()
        if self.complete:
            with reading(manifest, "manifest of a store"):
                found = json.loads(manifest.read_text(encoding="utf-8"))
                self.commits = [Commit.parse(one) for one in found["shards"]]
        else:
            self.commits = committed(self.folder)
        self.checksum = checksum(self.commits)
        self._place = {commit.shard: i for i, commit in enumerate(self.commits)}

    def __len__(self) -> int:
        return sum(commit.rows for commit in self.commits)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The layer and site of each tensor of a row."""
        return self.info.keys

    def shard(self, number: int) -> Tensor:
        """Return the rows [rows, keys, hidden] of one shard, memory-mapped."""
        path, commit = rows_path(self.folder, number), self.commits[self._place[number]]
        with reading(path, "shard of rows"):
            with safe_open(path, framework="pt") as file:
                rows = file.get_tensor("rows")
            if rows.shape != (commit.rows, len(self.keys), self.info.hidden) or rows.dtype != self.info.torch_dtype:
                raise BadFile(f"{path} holds {rows.dtype} {list(rows.shape)}, its commit says {commit.rows} rows")
        return rows

    def index(self, where: ds.Expression | None = None, columns: list[str] | None = None) -> pa.Table:
        """Return lines of the index, e.g. `store.index(pc.field("token_id") == 13)`; `take` returns their rows."""
        return self._table("index", where, columns)

    def documents(self, where: ds.Expression | None = None, columns: list[str] | None = None) -> pa.Table:
        """Return lines of the list of documents: their file and line, rows, labels as JSON, and error."""
        return self._table("documents", where, columns)

    def bad(self) -> pa.Table:
        """Return the documents that could not be read, with file, line and error."""
        return self.documents(ds.field("error").is_valid(), ["file", "line", "id", "error"])

    def take(self, lines: pa.Table, layer: int | None = None, site: str | None = None) -> Tensor:
        """Return the rows of lines of the index, in order: [lines, keys, hidden], or [lines, hidden] of one layer."""
        key, shards, rows = self.column(layer, site), lines["shard"].to_numpy(), lines["row"].to_numpy()
        shape = (len(lines), len(self.keys), self.info.hidden) if key is None else (len(lines), self.info.hidden)
        out = torch.empty(shape, dtype=self.info.torch_dtype)
        for number in np.unique(shards):
            places = np.flatnonzero(shards == number)
            mapped = self.shard(int(number))
            out[torch.from_numpy(places)] = (mapped if key is None else mapped[:, key])[torch.from_numpy(rows[places])]
        return out

    def document(self, number: int) -> Rows:
        """Return the rows of one document, memory-mapped, with their labels."""
        found = self.documents(ds.field("document") == number).to_pylist()
        if not found:
            raise InvalidRequest([Problem("document", f"{number} is not in the store", "see documents()")])
        line = found[0]
        if line["error"] is not None:
            where = f"{line['file']}:{line['line']}"
            raise InvalidRequest([Problem("document", f"{number} has no rows: {line['error']}", f"correct {where}")])
        with reading(self.folder, "store"):
            first, stop = line["first_row"], line["first_row"] + line["rows"]
            rows = self.shard(line["shard"])[first:stop]
            path = index_path(self.folder, line["shard"])
            lines = ds.dataset(path).to_table(filter=(ds.field("row") >= first) & (ds.field("row") < stop))
            labels = _labels(str(line["id"] or number), lines)
            return Rows({key: rows[:, i] for i, key in enumerate(self.keys)}, labels, self.info.model)

    def batches(
        self,
        size: int,
        layer: int | None = None,
        site: str | None = None,
        *,
        part: Part = "all",
        test: float = 0.1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> ShuffledRows:
        """Return a torch IterableDataset of all rows, shuffled: tensors [size, hidden], or [size, keys, hidden] for all
        layers. `part` selects documents of `train` or `test`; each `rank` of `world` reads its share."""
        return ShuffledRows(self, size, self.column(layer, site), part, test, seed, rank, world)

    def verify(self) -> list[str]:
        """Read all files again and return one line for each difference from what was written."""
        wrong = []
        for commit in self.commits:
            for path, skip, known in (
                (rows_path(self.folder, commit.shard), HEADER, commit.rows_xxh3),
                (index_path(self.folder, commit.shard), 0, commit.index_xxh3),
                (documents_path(self.folder, commit.shard), 0, commit.documents_xxh3),
            ):
                if not path.is_file():
                    wrong.append(f"{path} is missing")
                elif digest(path, skip) != known:
                    wrong.append(f"{path} has changed since it was written")
                elif skip:  # the checksum leaves out the header
                    try:
                        self.shard(commit.shard)
                    except BadFile as error:
                        wrong.append(str(error))
        return wrong

    def column(self, layer: int | None, site: str | None) -> int | None:
        """Return the index of a key in a row; None means all keys."""
        if layer is None and site is None:
            return 0 if len(self.keys) == 1 else None
        found = [i for i, (at, name) in enumerate(self.keys) if layer in (at, None) and site in (name, None)]
        if len(found) != 1:
            what = f"{len(found)} of the store's {len(self.keys)} keys are at layer {layer}, site {site}"
            raise InvalidRequest([Problem("layer", what, f"name one of {', '.join(f'{a} {b}' for a, b in self.keys)}")])
        return found[0]

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a store is small and lives long)
    def row_documents(self, number: int) -> np.ndarray:
        """Return the document of every row of a shard."""
        path = documents_path(self.folder, number)
        with reading(path, "list of documents"):
            lines = ds.dataset(path).to_table(columns=["document", "rows"])
        return np.repeat(lines["document"].to_numpy(), lines["rows"].to_numpy())

    def _table(self, part: str, where: ds.Expression | None, columns: list[str] | None) -> pa.Table:
        path = {"index": index_path, "documents": documents_path}[part]
        files = [str(path(self.folder, commit.shard)) for commit in self.commits]
        if not files:
            raise BadFile(f"{self.folder} holds no shard yet: run the capture first")
        with reading(self.folder / part, "part of a store"):
            return ds.dataset(files).to_table(filter=where, columns=columns)

    def __repr__(self) -> str:
        state = "" if self.complete else f", {len(self.commits)} of {self.info.shards} shards"
        return f"ActivationStore({self.folder}, {len(self):,} rows of {self.info.model}{state})"


def _labels(request: str, lines: pa.Table) -> Labels:
    messages, names = lines["message"].to_pylist(), lines["role"].to_pylist()
    roles: dict[int, str] = {m: role for m, role in zip(messages, names, strict=True) if m is not None}
    message = np.array([-1 if m is None else m for m in messages], np.int32)
    known = tuple(roles.get(i, "") for i in range(max(roles, default=-1) + 1))
    position, token = lines["position"].to_numpy().astype(np.int64), lines["token_id"].to_numpy().astype(np.int64)
    return Labels(request, position, token, np.zeros(len(lines), bool), message, known)
