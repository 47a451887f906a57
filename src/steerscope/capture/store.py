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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from steerscope.capture.rows import Rows
from steerscope.capture.shards import HEADER, PARTS, Commit, StoreInfo, checksum, digest, part_path
from steerscope.core.rows import Labels
from steerscope.core.slot_table import Key
from steerscope.files import reading, write_text
from steerscope.specs.errors import BadFile, InvalidRequest, Problem

Part = Literal["all", "train", "test"]
_RUN_BYTES = 4 << 20
_BUFFER_BYTES = 256 << 20


def create(folder: Path, info: StoreInfo) -> None:
    for part in PARTS:
        (folder / part).mkdir(parents=True, exist_ok=True)
    write_text(folder / "store.json", info.to_json() + "\n")


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
    path = part_path(folder, "commits", shard)
    with reading(path, "commit of a shard"):
        return Commit.from_json(path.read_bytes()) if path.is_file() else None


def finish(folder: Path, info: StoreInfo) -> str | None:
    """Write the manifest and return the store's checksum, or None when shards are missing."""
    commits = committed(folder)
    if [c.shard for c in commits] != list(range(info.shards)):
        return None
    whole = {"checksum": checksum(commits), "shards": [c.model_dump() for c in commits]}
    write_text(folder / "manifest.json", json.dumps(whole) + "\n")
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
        path = part_path(self.folder, "rows", number)
        commit = self.commits[self._place[number]]
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
        key = self.column(layer, site)
        shards = lines["shard"].to_numpy()
        rows = lines["row"].to_numpy()
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
            raise InvalidRequest.of("document", f"{number} is not in the store", "see documents()")
        line = found[0]
        if line["error"] is not None:
            what = f"{number} has no rows: {line['error']}"
            raise InvalidRequest.of("document", what, f"correct {line['file']}:{line['line']}")
        with reading(self.folder, "store"):
            first = line["first_row"]
            stop = line["first_row"] + line["rows"]
            rows = self.shard(line["shard"])[first:stop]
            path = part_path(self.folder, "index", line["shard"])
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
    ) -> "ShuffledRows":
        """Return a torch IterableDataset of all rows, shuffled: tensors [size, hidden], or [size, keys, hidden] for all
        layers. `part` selects documents of `train` or `test`; each `rank` of `world` reads its share."""
        return ShuffledRows(self, size, self.column(layer, site), part, test, seed, rank, world)

    def verify(self) -> list[str]:
        """Read all files again and return one line for each difference from what was written."""
        wrong = []
        for commit in self.commits:
            for part, skip in (("rows", HEADER), ("index", 0), ("documents", 0)):
                path = part_path(self.folder, part, commit.shard)
                if not path.is_file():
                    wrong.append(f"{path} is missing")
                elif digest(path, skip) != getattr(commit, f"{part}_xxh3"):
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
            raise InvalidRequest.of("layer", what, f"name one of {', '.join(f'{a} {b}' for a, b in self.keys)}")
        return found[0]

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a store is small and lives long)
    def row_documents(self, number: int) -> np.ndarray:
        """Return the document of every row of a shard."""
        path = part_path(self.folder, "documents", number)
        with reading(path, "list of documents"):
            lines = ds.dataset(path).to_table(columns=["document", "rows"])
        return np.repeat(lines["document"].to_numpy(), lines["rows"].to_numpy())

    def _table(self, part: str, where: ds.Expression | None, columns: list[str] | None) -> pa.Table:
        files = [str(part_path(self.folder, part, commit.shard)) for commit in self.commits]
        if not files:
            raise BadFile(f"{self.folder} holds no shard yet: run the capture first")
        with reading(self.folder / part, "part of a store"):
            return ds.dataset(files).to_table(filter=where, columns=columns)

    def __repr__(self) -> str:
        state = "" if self.complete else f", {len(self.commits)} of {self.info.shards} shards"
        return f"ActivationStore({self.folder}, {len(self):,} rows of {self.info.model}{state})"


def _labels(request: str, lines: pa.Table) -> Labels:
    message = lines["message"].fill_null(-1).to_numpy()
    roles: dict[int, str] = dict(zip(message.tolist(), lines["role"].to_pylist(), strict=True))
    known = tuple(roles.get(i, "") for i in range(message.max(initial=-1) + 1))
    position, token = (lines[name].to_numpy().astype(np.int64) for name in ("position", "token_id"))
    return Labels(request, position, token, np.zeros(len(lines), bool), message, known)


def in_test(documents: np.ndarray, test: float) -> np.ndarray:
    """Return which documents are held out. It depends on their numbers alone, so all stores of a corpus agree."""
    mixed = documents.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64 < test


class ShuffledRows(IterableDataset[Tensor]):
    """Batches of shuffled rows, for training: every row once per pass, in an order that depends on the seed alone.

    Runs of neighbouring rows are visited in random order and mixed in a buffer. So disks read runs, and batches hold
    rows of many documents. Each worker of a DataLoader and each rank of a training reads its own share of the runs.
    `ActivationStore.batches` explains the arguments.
    """

    def __init__(
        self,
        store: ActivationStore,
        size: int,
        key: int | None,
        part: Part,
        test: float,
        seed: int,
        rank: int,
        world: int,
    ) -> None:
        checks = (
            (size >= 1, "size", f"is {size}", "give at least 1"),
            (part in get_args(Part), "part", f"{part!r} is unknown", f"choose one of {get_args(Part)}"),
            (0 < test < 1, "test", f"is {test}", "give a share between 0 and 1"),
            (0 <= rank < world, "rank", f"{rank} of {world} does not exist", "give 0 ≤ rank < world"),
        )
        problems = [Problem(*problem) for right, *problem in checks if not right]
        if problems:
            raise InvalidRequest(problems)
        self.store = store
        self.size = size
        self.key = key
        self.part = part
        self.test = test
        self.seed = seed
        self.rank = rank
        self.world = world
        # The keys of a row lie together on disk, so a run counts all of them, the buffer only those it keeps.
        row_bytes = store.info.row_bytes // (1 if key is None else len(store.info.keys))
        self.buffer = min(max(2 * size, _BUFFER_BYTES // row_bytes), max(2 * size, len(store)))
        self.run = max(1, _RUN_BYTES // store.info.row_bytes)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        n_workers = worker.num_workers if worker else 1
        reader = self.rank * n_workers + (worker.id if worker else 0)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + reader)
        held = torch.empty(self.buffer, *self._row_shape(), dtype=self.store.info.torch_dtype)
        held_bytes = held.flatten(1).view(torch.uint8).numpy()  # numpy scatters rows several times as fast as torch
        free = torch.arange(self.buffer)
        for rows in self._runs(reader, self.world * n_workers):
            while len(rows):
                count = min(len(rows), len(free))
                held_bytes[free[:count].numpy()] = rows[:count].flatten(1).view(torch.uint8).numpy()
                rows = rows[count:]
                free = free[count:]
                if not len(free):  # one half stays, to be mixed with later rows
                    free = torch.randperm(self.buffer, generator=generator)[: self.buffer // 2 // self.size * self.size]
                    yield from (held.index_select(0, batch) for batch in free.split(self.size))
        full = torch.ones(self.buffer, dtype=torch.bool)
        full[free] = False
        rest = full.nonzero().squeeze(1)
        if len(rest):
            order = torch.randperm(len(rest), generator=generator)
            yield from (held.index_select(0, rest[batch]) for batch in order.split(self.size))

    def _row_shape(self) -> tuple[int, ...]:
        hidden = self.store.info.hidden
        return (len(self.store.info.keys), hidden) if self.key is None else (hidden,)

    def _runs(self, reader: int, n_readers: int) -> Iterator[Tensor]:
        """Yield the rows of one reader's runs."""
        runs = [(commit.shard, a) for commit in self.store.commits for a in range(0, commit.rows, self.run)]
        order = np.random.default_rng((self.seed, 0)).permutation(len(runs))
        for i in order[reader::n_readers]:
            yield self._read(*runs[i])

    def _read(self, shard: int, first: int) -> Tensor:
        rows = self.store.shard(shard)[first : first + self.run]
        rows = rows if self.key is None else rows[:, self.key]
        if self.part == "all":
            return rows
        documents = self.store.row_documents(shard)[first : first + self.run]
        wanted = in_test(documents, self.test) == (self.part == "test")
        return rows[torch.from_numpy(np.flatnonzero(wanted))]
