"""Shuffled batches of a store, for training: every row once per pass, in an order that only the seed decides.

Runs of neighbouring rows are visited in random order and mixed in a buffer, so that disks read runs and batches hold
rows of many documents. Workers of a DataLoader and ranks of a training each get their own share of the runs.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from steerscope.specs.errors import InvalidRequest, Problem

if TYPE_CHECKING:
    from steerscope.capture.store import ActivationStore

Part = Literal["all", "train", "test"]
_RUN_BYTES = 4 << 20
_BUFFER_BYTES = 256 << 20


def in_test(documents: np.ndarray, test: float) -> np.ndarray:
    """Which documents are held out: by their number alone, so that it is the same in every store of a corpus."""
    mixed = documents.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64 < test


class ShuffledRows(IterableDataset[Tensor]):
    def __init__(
        self,
        store: "ActivationStore",
        size: int,
        key: int | None,
        part: Part,
        test: float,
        seed: int,
        rank: int,
        world: int,
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
        # All keys of a row lie together: the buffer counts what is kept of them, a run what is passed over.
        bytes_kept = store.info.row_bytes // (1 if key is None else len(store.keys))
        self.buffer = min(max(2 * size, _BUFFER_BYTES // bytes_kept), max(2 * size, len(store)))
        self.run = max(1, _RUN_BYTES // store.info.row_bytes)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        me, all_of_us = (worker.id, worker.num_workers) if worker else (0, 1)
        runs = [(c.shard, a) for c in self.store.commits for a in range(0, c.rows, self.run)]
        order = np.random.default_rng((self.seed, 0)).permutation(len(runs))
        mine = order[self.rank * all_of_us + me :: self.world * all_of_us]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.rank * all_of_us + me)
        shape = self.store.shard(runs[0][0]).shape[1:] if runs else (0,)
        held = torch.empty(self.buffer, *(shape if self.key is None else shape[1:]), dtype=self.store.info.torch_dtype)
        into = held.flatten(1).view(torch.uint8).numpy()  # numpy puts rows into places several times as fast as torch
        free = torch.arange(self.buffer)
        for i in mine:
            rows = self._read(*runs[i])
            while len(rows):
                now = min(len(rows), len(free))
                into[free[:now].numpy()] = rows[:now].flatten(1).view(torch.uint8).numpy()
                rows, free = rows[now:], free[now:]
                if not len(free):  # half stays, to be mixed with what comes
                    free = torch.randperm(self.buffer, generator=generator)[: self.buffer // 2 // self.size * self.size]
                    yield from (held.index_select(0, some) for some in free.split(self.size))
        full = torch.ones(self.buffer, dtype=torch.bool)
        full[free] = False
        rest = full.nonzero().squeeze(1)
        if len(rest):
            order = torch.randperm(len(rest), generator=generator)
            yield from (held.index_select(0, rest[some]) for some in order.split(self.size))

    def _read(self, shard: int, first: int) -> Tensor:
        rows = self.store.shard(shard)[first : first + self.run]
        rows = rows if self.key is None else rows[:, self.key]
        if self.part == "all":
            return rows
        documents = self.store.row_documents(shard)[first : first + self.run]
        wanted = in_test(documents, self.test) == (self.part == "test")
        return rows[torch.from_numpy(np.flatnonzero(wanted))]
