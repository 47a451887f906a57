"""Tiers: expansion over a pack that the device cannot hold.

- **hot**: a stack of a fixed number of lenses on the device. The base levels and pinned concepts are always in it.
- **warm**: lenses encoded as in the stack, in host memory (pinned for a GPU), up to a number of bytes.
- **cold**: the pack's mapped file.

The children of a concept are loaded together, and the least recently used lenses are evicted. A load delays a result
and never changes it. The smallest budget is the pinned lenses and one more; a group larger than the rest of the stack
is scored in parts.

On a GPU all hot lenses are first scored and expanded in one pass, a CUDA graph per number of rows: rows whose groups
are all hot cost one launch, and one copy to the host of which groups were used.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.lenses.expand import Expanded, Expansion, Groups, expand, expand_rows
from steerscope.lenses.graph_pool import GraphPool
from steerscope.lenses.pack import Pack
from steerscope.lenses.stack import WORKSPACE, Stack, Weights, gather, slot_ranges
from steerscope.specs.errors import InvalidRequest, Problem

_MOST_ROWS_AT_ONCE = 64  # for more rows it is faster to score only the needed lenses
_MAX_GRAPHS = 16  # cached; each holds its results, all share one workspace


@dataclass
class Stats:
    """Hits and misses count lenses of groups."""

    hits: int = 0
    misses: int = 0
    bytes_moved: int = 0  # into the hot stack
    bytes_read: int = 0  # from the cold file

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class LensSlots:
    """Slots by lens. Pinned lenses have the first slots and stay; of the others the least recently used goes first."""

    def __init__(self, count: int, pinned: Sequence[int]) -> None:
        self.of: dict[int, int] = {lens: slot for slot, lens in enumerate(pinned)}
        self.room = count - len(pinned)
        self.changes = 0  # number of placements
        self._free = list(range(len(pinned), count))
        self._recent: OrderedDict[int, None] = OrderedDict()  # lenses that are not pinned, last used at the end

    def touch(self, lenses: Iterable[int]) -> None:
        """Mark these lenses as used now."""
        for lens in lenses:
            if lens in self._recent:
                self._recent.move_to_end(lens)

    def place(self, lenses: Sequence[int]) -> list[int]:
        """Return ascending slots for lenses that have none, at most as many as there is room for."""
        while len(self._free) < len(lenses):
            evicted, _ = self._recent.popitem(last=False)
            self._free.append(self.of.pop(evicted))
        self._free.sort()
        slots = self._free[: len(lenses)]
        self._free = self._free[len(lenses) :]
        self.of.update(zip(lenses, slots, strict=True))
        self._recent.update(dict.fromkeys(lenses))
        self.changes += 1
        return slots


class WarmCache:
    """Least recently used cache of encoded lenses in host memory."""

    def __init__(self, pack: Pack, stack: Stack, max_bytes: int, stats: Stats) -> None:
        self.pack = pack
        self.stack = stack
        self.max_bytes = max_bytes
        self.stats = stats
        self.nbytes = 0
        self._parts: OrderedDict[tuple[int, ...], dict[str, Tensor]] = OrderedDict()

    def get(self, lenses: tuple[int, ...]) -> dict[str, Tensor]:
        """Return encoded lenses, read from the pack if they are not cached together."""
        if lenses in self._parts:
            self._parts.move_to_end(lenses)
            return self._parts[lenses]
        cold = gather(self.pack.tensors, lenses)
        # Copied even if nothing is converted: a mapped page may be dropped and read from disk again.
        encoded = {name: tensor.clone() for name, tensor in self.stack.encode(cold).items()}
        if self.stack.device.type == "cuda":
            encoded = {name: tensor.pin_memory() for name, tensor in encoded.items()}
        self.stats.bytes_read += _nbytes(cold)
        if _nbytes(encoded) <= self.max_bytes:
            self._parts[lenses] = encoded
            self.nbytes += _nbytes(encoded)
        while self.nbytes > self.max_bytes:
            self.nbytes -= _nbytes(self._parts.popitem(last=False)[1])
        return encoded


class Tiers:
    """Scores a pack with at most `budget` lenses, or `budget_bytes`, on the device.

    `pinned` are concepts (names, ids or indices) that are always hot, such as those of rules. `at_once` (by default on
    a GPU) scores the whole stack first, which suffices for rows whose groups are hot: fewer launches, more products.
    """

    def __init__(
        self,
        pack: Pack,
        *,
        budget: int | None = None,
        budget_bytes: int | None = None,
        base_levels: int = 2,
        pinned: Sequence[str | int] = (),
        warm_bytes: int = 4 << 30,
        device: str | torch.device = "cpu",
        weights: Weights = "fp32",
        workspace: int = WORKSPACE,
        at_once: bool | None = None,
    ) -> None:
        self.pack = pack
        self.device = torch.device(device)
        self.groups = Groups(pack, base_levels, self.device)
        self.pinned = [pack.index(each) if isinstance(each, str) else range(len(pack))[each] for each in pinned]
        always = list(dict.fromkeys([*self.groups.base, *self.pinned]))
        self._always = range(len(always))  # slots
        count = self._slots_for(budget, budget_bytes, len(always), weights)
        self.slots = LensSlots(count, always)
        self.stats = Stats()
        self._stack = Stack(pack, count, self.device, weights, workspace)
        self._stack.fill(always)
        self._warm = WarmCache(pack, self._stack, warm_bytes, self.stats)
        at_once = self.device.type == "cuda" if at_once is None else at_once
        self._pass = _HotPass(self._stack, self.groups) if at_once else None
        self._lock = Lock()

    def _slots_for(self, budget: int | None, budget_bytes: int | None, always: int, weights: Weights) -> int:
        if (budget is None) == (budget_bytes is None):
            raise InvalidRequest([Problem("budget", "is given twice or not at all", "give budget or budget_bytes")])
        one = Stack(self.pack, 1, torch.device("meta"), weights).lens_bytes
        count = budget if budget is not None else (budget_bytes or 0) // one
        least = min(always + 1, len(self.pack))
        if count < least:
            what = f"holds {count} lenses; the base levels and pinned concepts are {always}"
            remedy = f"give at least {least} lenses ({least * one} bytes), or fewer base levels"
            raise InvalidRequest([Problem("budget", what, remedy)])
        return min(count, len(self.pack))

    def expand(self, rows: Tensor, top_k: int = 10, depth: int = 5, keep_scores: bool = False) -> Expansion:
        """Return the top concepts of rows [n, hidden]."""
        with self._lock:
            return expand_rows(self.groups, rows, top_k, depth, keep_scores, self._run)

    def pinned_scores(self, rows: Tensor) -> Tensor:
        """Return scores [n, pinned] of the pinned concepts, in the given order, without loading anything."""
        with torch.no_grad():
            slots = torch.tensor([self.slots.of[lens] for lens in self.pinned], device=self.device)
            return self._stack.scores(rows, [self._always])[:, slots]

    def _run(self, rows: Tensor, top_k: int, depth: int) -> Expanded:
        return self._all_hot(rows, top_k, depth) or self._expand(rows, top_k, depth)

    def _all_hot(self, rows: Tensor, top_k: int, depth: int) -> Expanded | None:
        """Expand in one pass over the hot lenses; return None if it lacks a group that the expansion needed."""
        if self._pass is None or not 1 <= len(rows) <= _MOST_ROWS_AT_ONCE:
            return None
        found = self._pass.expand(rows, top_k, depth, self.slots)
        lenses = [lens for parent in found.used.nonzero().flatten().tolist() for lens in self.groups.of(parent)]
        if not all(lens in self.slots.of for lens in lenses):
            return None
        self.slots.touch(lenses)
        self.stats.hits += len(lenses)
        return found

    def _expand(self, rows: Tensor, top_k: int, depth: int) -> Expanded:
        """Expand step by step, and load what each step needs."""
        known = torch.full((len(rows), len(self.pack)), -torch.inf, device=self.device)
        self._score(rows, self.groups.base, known)
        return expand(self.groups, known, top_k, depth, lambda parents: self._score_groups(rows, parents, known))

    def _score_groups(self, rows: Tensor, parents: Sequence[int], known: Tensor) -> None:
        """Write the scores of the groups of these parents to `known`: of hot lenses first, since loads evict some."""
        wanted = dict.fromkeys(lens for parent in parents for lens in self.groups.of(parent))
        hot = [lens for lens in wanted if lens in self.slots.of]
        cold = [lens for lens in wanted if lens not in self.slots.of]
        self.slots.touch(hot)
        self.stats.hits += len(hot)
        self.stats.misses += len(cold)
        self._score(rows, hot, known)
        for start in range(0, len(cold), max(1, self.slots.room)):
            part = cold[start : start + self.slots.room]
            self._load(part)
            self._score(rows, part, known)

    def _score(self, rows: Tensor, lenses: Sequence[int], known: Tensor) -> None:
        """Write the scores of hot lenses to `known`."""
        lens_of = {self.slots.of[lens]: lens for lens in lenses}
        slots = sorted(lens_of)
        columns = torch.tensor([lens_of[slot] for slot in slots], dtype=torch.long, device=self.device)
        known[:, columns] = self._stack.scores(rows, slot_ranges(slots))

    def _load(self, lenses: Sequence[int]) -> None:
        """Load lenses, siblings together, over the least recently used ones."""
        for _, siblings in itertools.groupby(lenses, key=lambda lens: self.pack.hierarchy.parents[lens][0]):
            unit = tuple(siblings)
            encoded = self._warm.get(unit)
            done = 0
            for run in slot_ranges(self.slots.place(unit)):
                part = {name: tensor[done : done + len(run)] for name, tensor in encoded.items()}
                self._stack.write(slice(run.start, run.stop), part, non_blocking=True)
                done += len(run)
            self.stats.bytes_moved += _nbytes(encoded)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    rows: Tensor
    results: Expanded


class _HotPass:
    """One pass over all slots of a stack, and its CUDA graphs. The result holds if all used groups are hot."""

    def __init__(self, stack: Stack, groups: Groups) -> None:
        self._stack = stack
        self._groups = groups
        self._nowhere = len(groups.pack)  # column of empty slots
        self._lens_of = torch.full((stack.slots,), self._nowhere, device=stack.device)
        self._changes: int | None = None
        self._graphs: dict[object, _Graph] = {}
        self._pool = GraphPool()

    def expand(self, rows: Tensor, top_k: int, depth: int, slots: LensSlots) -> Expanded:
        """Expand over the hot lenses; `used` [lenses] is whether any row used a concept's group."""
        if self._changes != slots.changes:
            lens_of = [self._nowhere] * self._stack.slots
            for lens, slot in slots.of.items():
                lens_of[slot] = lens
            self._lens_of.copy_(torch.tensor(lens_of))
            self._changes = slots.changes
        if rows.device.type != "cuda":
            return self._run(rows, top_k, depth)
        key = (rows.shape, rows.dtype, top_k, depth)
        if key not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = self._captured(rows, top_k, depth)
        found = self._graphs[key]
        found.rows.copy_(rows)
        found.graph.replay()
        return Expanded(*(each.clone() for each in found.results))

    def _run(self, rows: Tensor, top_k: int, depth: int) -> Expanded:
        known = torch.full((len(rows), self._nowhere + 1), -torch.inf, device=self._stack.device)
        known.index_copy_(1, self._lens_of, self._stack.scores(rows, [range(self._stack.slots)]))
        found = expand(self._groups, known[:, :-1], top_k, depth)
        return found._replace(used=found.used.any(0))

    def _captured(self, rows: Tensor, top_k: int, depth: int) -> _Graph:
        static = rows.clone()
        here = torch.cuda.current_stream(rows.device)
        side = torch.cuda.Stream(rows.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self._run(static, top_k, depth)  # libraries initialise here, which a capture cannot
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that load other packs may use the device meanwhile.
        with torch.cuda.graph(graph, self._pool.handle(), capture_error_mode="thread_local"):
            results = self._run(static, top_k, depth)
        self._pool.add(graph)
        return _Graph(graph, static, results)


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
