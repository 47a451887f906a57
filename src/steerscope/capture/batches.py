"""Shuffled batches of a store, for training: every row once per pass, in an order that depends on the seed alone.

Runs of neighbouring rows are visited in random order and mixed in a buffer. So disks read runs, and batches hold rows
of many documents. Each worker of a DataLoader and each rank of a training reads its own share of the runs.
"""

from collections.abc import Iterator
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from steerscope.capture.shards import Commit, StoreInfo
from steerscope.specs.errors import InvalidRequest, Problem

Part = Literal["all", "train", "test"]
_RUN_BYTES = 4 << 20
_BUFFER_BYTES = 256 << 20


class _Store(Protocol):
    """The members of an ActivationStore that are read here."""

    info: StoreInfo
    commits: list[Commit]

    def __len__(self) -> int: ...
    def shard(self, number: int) -> Tensor: ...
    def row_documents(self, number: int) -> np.ndarray: ...


def in_test(documents: np.ndarray, test: float) -> np.ndarray:
    """Return which documents are held out. It depends on their numbers alone, so all stores of a corpus agree."""
    mixed = documents.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64 < test


class ShuffledRows(IterableDataset[Tensor]):
    """Batches of shuffled rows; see `ActivationStore.batches` for the arguments."""

    def __init__(
        self, store: _Store, size: int, key: int | None, part: Part, test: float, seed: int, rank: int, world: int
    ) -> None:
        problems = []
        if size < 1:
            problems.append(Problem("size", f"is {size}", "give at least 1"))
        if part not in get_args(Part):
            problems.append(Problem("part", f"{part!r} is unknown", f"choose one of {get_args(Part)}"))
        if not 0 < test < 1:
            problems.append(Problem("test", f"is {test}", "give a share between 0 and 1"))
        if not 0 <= rank < world:
            problems.append(Problem("rank", f"{rank} of {world} does not exist", "give 0 ≤ rank < world"))
        if problems:
            raise InvalidRequest(problems)
        self.store, self.size, self.key, self.part, self.test = store, size, key, part, test
        self.seed, self.rank, self.world = seed, rank, world
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
                rows, free = rows[count:], free[count:]
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
