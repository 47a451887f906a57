"""Tiers: expansion over a pack that the device cannot hold.

- **hot**: a slab of a fixed number of lenses on the device. The base levels and pinned concepts are always in it.
- **warm**: lenses encoded as in the slab, in host memory (pinned for a GPU), up to a number of bytes.
- **cold**: the pack's mapped file.

The children of a concept are loaded together, and the least recently used lenses are evicted. A thread loads them, on
a GPU through its own stream, while hot lenses are scored. A late load delays a result and never changes it. The
smallest budget is the pinned lenses and one more; a group larger than the rest of the slab is scored in parts.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import RLock
from typing import NamedTuple, Self

import torch
from torch import Tensor

from steerscope.lenses.bank import Scoring, input_kinds
from steerscope.lenses.expand import MOST_ROWS, Expanded, Expansion, Groups, check, expand, joined
from steerscope.lenses.pack import Pack
from steerscope.lenses.slab import MOST_ROWS as SLAB_ROWS
from steerscope.lenses.slab import Slab
from steerscope.lenses.slots import LensSlots
from steerscope.lenses.stack import WORKSPACE, Stack, Weights, gather, slot_ranges
from steerscope.lenses.tensors import PER_LENS
from steerscope.specs.errors import InvalidRequest, Problem

Unit = tuple[int, ...]  # children of one concept, at most as many as the slab has room for
_MAX_PLANS = 256  # cached; one is a few kilobytes
COMPONENTS = ("base detection", "child loading", "child detection", "cache management", "python")


@dataclass
class Stats:
    """Hits and misses count lenses of groups. Seconds are host time of the calling thread."""

    hits: int = 0
    misses: int = 0
    bytes_moved: int = 0  # into the hot slab
    bytes_read: int = 0  # from the cold file
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0.0))

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    @contextmanager
    def timed(self, component: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[component] += time.perf_counter() - start


class WarmCache:
    """Least recently used cache of encoded units in host memory. Only the loading thread uses it."""

    def __init__(self, pack: Pack, stack: Stack, max_bytes: int, stats: Stats) -> None:
        self.pack = pack
        self.stack = stack
        self.max_bytes = max_bytes
        self.stats = stats
        self.nbytes = 0
        self._units: OrderedDict[Unit, dict[str, Tensor]] = OrderedDict()

    def get(self, lenses: Unit) -> dict[str, Tensor]:
        """Return encoded lenses, read from the pack if they are not cached."""
        if lenses in self._units:
            self._units.move_to_end(lenses)
            return self._units[lenses]
        cold = gather(self.pack.tensors, lenses)
        # Copied even if nothing is converted: a mapped page may be dropped and read from disk again.
        encoded = {name: tensor.clone() for name, tensor in self.stack.encode(cold).items()}
        if self.stack.device.type == "cuda":
            encoded = {name: tensor.pin_memory() for name, tensor in encoded.items()}
        self.stats.bytes_read += sum(tensor.nbytes for tensor in cold.values())
        size = _nbytes(encoded)
        if size <= self.max_bytes:
            while self.nbytes + size > self.max_bytes:
                self.nbytes -= _nbytes(self._units.popitem(last=False)[1])
            self._units[lenses] = encoded
            self.nbytes += size
        return encoded


class _Plan(NamedTuple):
    """How some hot lenses are evaluated: their slots, and what turns their logits into scores."""

    lenses: Tensor
    slots: list[int]
    ranges: list[range]
    columns: Tensor | None  # of the lenses among those of the ranges, where these differ
    scoring: Scoring


class Tiers:
    """Scores a pack with at most `budget` lenses, or `budget_bytes`, on the device.

    `pinned` are concepts (names, ids or indices) that are always hot, such as those of rules. `at_once` (by default on
    a GPU) scores the whole slab first, which suffices for rows whose groups are hot: fewer launches, more products.
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
        count = self._slots_for(budget, budget_bytes, len(always), weights)
        self._stack = Stack(pack.info, count, self.device, weights, workspace, input_kinds(pack))
        self._stack.fill(pack.tensors, always)
        self.slots = LensSlots(count, always)
        # Unneeded slots between needed ones are evaluated too if that costs less than another launch.
        self._bridge = (1 << 20 if self.device.type == "cpu" else 64 << 20) // self._stack.lens_bytes
        self.stats = Stats()
        self._warm = WarmCache(pack, self._stack, warm_bytes, self.stats)
        self._loading: dict[int, Future[torch.cuda.Event | None]] = {}
        self._read_at: list[torch.cuda.Event | None] = [None] * count  # last evaluation of each slot, on a GPU
        self._worker = ThreadPoolExecutor(1, "steerscope-lenses")
        self._lock = RLock()
        self._base = self._plan(self.groups.base)
        self._named = self._plan(self.pinned)  # these slots never change
        self._plans: dict[Unit, _Plan] = {}
        self._plans_of = self.slots.changes
        on_gpu = self.device.type == "cuda"
        at_once = on_gpu if at_once is None else at_once
        self._slab = Slab(self._stack, self.groups) if at_once else None
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the slab is filled with zeros first

    def _slots_for(self, budget: int | None, budget_bytes: int | None, always: int, weights: Weights) -> int:
        if (budget is None) == (budget_bytes is None):
            raise InvalidRequest([Problem("budget", "is given twice or not at all", "give budget or budget_bytes")])
        one = Stack(self.pack.info, 1, torch.device("meta"), weights, normed=input_kinds(self.pack)).lens_bytes
        count = budget if budget is not None else (budget_bytes or 0) // one
        least = min(always + 1, len(self.pack))
        if count < least:
            what = f"holds {count} lenses; the base levels and pinned concepts are {always}"
            remedy = f"give at least {least} lenses ({least * one} bytes), or fewer base levels"
            raise InvalidRequest([Problem("budget", what, remedy)])
        return min(count, len(self.pack))

    def expand(self, rows: Tensor, top_k: int = 10, depth: int = 5, keep_scores: bool = False) -> Expansion:
        """Return the top concepts of rows [n, hidden]."""
        check(top_k, depth)
        with self._lock, torch.no_grad():
            before, start = sum(self.stats.seconds.values()), time.perf_counter()
            all_hot = self._all_hot(rows, top_k, depth)
            parts = [all_hot] if all_hot else [self._expand(part, top_k, depth) for part in rows.split(MOST_ROWS)]
            inside = sum(self.stats.seconds.values()) - before
            self.stats.seconds["python"] += time.perf_counter() - start - inside
            return joined(self.groups, parts, keep_scores)

    def _all_hot(self, rows: Tensor, top_k: int, depth: int) -> Expanded | None:
        """Expand in one pass over the slab; return None if it lacks a group that the expansion needed."""
        if self._slab is None or not 1 <= len(rows) <= SLAB_ROWS:
            return None
        with self.stats.timed("base detection"):
            found = self._slab.expand(rows, top_k, depth, self.slots)
            self._mark_read(range(len(self._read_at)))
            parents = found.used.nonzero().flatten().tolist()
        with self.stats.timed("cache management"):
            lenses = [lens for parent in parents for lens in self.groups.of(parent)]
            if not self.slots.holds(lenses) or not self._loading.keys().isdisjoint(lenses):
                return None
            self.slots.touch(lenses)
            self.stats.hits += len(lenses)
        return found

    def _expand(self, rows: Tensor, top_k: int, depth: int) -> Expanded:
        """Expand step by step, and load what each step needs."""
        known = torch.full((len(rows), len(self.pack)), -torch.inf, device=self.device)
        with self.stats.timed("base detection"):
            known[:, self._base.lenses] = self._score(rows, self._base)
        return expand(self.groups, known, top_k, depth, lambda parents: self._score_children(rows, parents, known))

    def _score_children(self, rows: Tensor, parents: Sequence[int], known: Tensor) -> None:
        """Write the scores of the groups of these parents to `known`, hot lenses first while a thread loads others."""
        with self.stats.timed("cache management"):
            self._forget_failed()
            units = [unit for parent in parents for unit in self._units(parent)]
            ready = [unit for unit in units if self.slots.holds(unit)]
            missing = [unit for unit in units if not self.slots.holds(unit)]
            for unit in ready:
                self.slots.touch(unit)
                self.stats.hits += len(unit)
        while ready or missing:
            with self.stats.timed("cache management"):
                coming = self._place(missing, locked=ready)
                missing = missing[len(coming) :]
            if ready:
                lenses = tuple(dict.fromkeys(lens for unit in ready for lens in unit))
                with self.stats.timed("child loading"):
                    self._wait_for(lenses)
                with self.stats.timed("child detection"):
                    plan = self._plan_of(lenses)
                    known[:, plan.lenses] = self._score(rows, plan)
            ready = coming

    def prewarm(self, rows: Tensor, top_k: int = 10, depth: int = 5) -> None:
        """Make hot what these rows need, such as the rows of a prompt."""
        self.expand(rows, top_k, depth)

    def prefetch(self, parents: Sequence[int]) -> None:
        """Start loading the children of these concepts, as far as they fit, and return."""
        with self._lock:
            asked = [unit for parent in parents for unit in self._units(parent)]
            for unit in asked:
                if self.slots.holds(unit):
                    self.slots.touch(unit)
            self._place([unit for unit in asked if not self.slots.holds(unit)], locked=asked, count=False)

    def pinned_scores(self, rows: Tensor) -> Tensor:
        """Return scores [n, pinned] of the pinned concepts, in the given order, without loading anything."""
        with torch.no_grad():
            return self._score(rows, self._named)

    # --- inside

    def _units(self, parent: int) -> list[Unit]:
        members, size = self.groups.of(parent), max(1, self.slots.room)
        return [members[start : start + size] for start in range(0, len(members), size)]

    def _place(self, units: Sequence[Unit], locked: Sequence[Unit], count: bool = True) -> list[Unit]:
        """Find slots for as many of these units as fit beside the locked ones, and start loading them."""
        placed: list[Unit] = []
        stay = {lens for unit in locked for lens in unit}
        for unit in units:
            found = self.slots.place(unit, stay)
            if found is None:
                break
            placed.append(unit)
            stay.update(unit)
            if count:
                self.stats.hits += len(unit) - len(found)
                self.stats.misses += len(found)
            if found:
                slots = list(found.values())
                job = self._worker.submit(self._load, tuple(found), slots, [self._read_at[slot] for slot in slots])
                self._loading.update(dict.fromkeys(found, job))
        return placed

    def _load(
        self, lenses: Unit, slots: Sequence[int], after: Sequence[torch.cuda.Event | None]
    ) -> torch.cuda.Event | None:
        """Load lenses into slots, in the loading thread, after the last evaluations that read these slots."""
        encoded = self._warm.get(lenses)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext(), torch.no_grad():
            for event in {id(event): event for event in after if event is not None}.values():
                assert self._stream is not None
                self._stream.wait_event(event)
            done = 0
            for run in slot_ranges(slots):
                part = {name: tensor[done : done + len(run)] for name, tensor in encoded.items()}
                self._stack.write(slice(run.start, run.stop), part, non_blocking=True)
                done += len(run)
            self.stats.bytes_moved += _nbytes(encoded)
            return _event(self._stream) if self._stream else None

    def _wait_for(self, lenses: Sequence[int]) -> None:
        for job in dict.fromkeys(self._loading[lens] for lens in lenses if lens in self._loading):
            try:
                event = job.result()
            except BaseException:
                for other in set(self._loading.values()):
                    other.exception()  # wait: later ones may fail for the same reason
                self._forget_failed()
                raise
            for lens in [lens for lens, other in self._loading.items() if other is job]:
                del self._loading[lens]
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def _forget_failed(self) -> None:
        """Evict lenses whose load failed, so that they are loaded again when they are needed."""
        failed = [lens for lens, job in self._loading.items() if job.done() and job.exception() is not None]
        self.slots.evict(lens for lens in failed if lens in self.slots.of)
        for lens in failed:
            del self._loading[lens]

    def _plan(self, lenses: Iterable[int]) -> _Plan:
        """Return the plan of hot lenses, in this order. Valid while they keep their slots."""
        members = list(lenses)
        slots = [self.slots.of[lens] for lens in members]
        ranges = slot_ranges(sorted(set(slots)), self._bridge)
        evaluated = [slot for part in ranges for slot in part]
        column_of = {slot: column for column, slot in enumerate(evaluated)}
        columns = None
        if evaluated != slots:
            columns = torch.tensor([column_of[slot] for slot in slots], device=self.device)
        at = torch.tensor(slots, dtype=torch.long, device=self.device)
        scoring = Scoring(self.pack, {name: self._stack.tensors[name][at] for name in PER_LENS})
        return _Plan(torch.tensor(members, dtype=torch.long, device=self.device), slots, ranges, columns, scoring)

    def _plan_of(self, lenses: Unit) -> _Plan:
        """Return the plan of hot lenses, cached: a text needs the same ones again and again."""
        if self._plans_of != self.slots.changes or len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            self._plans_of = self.slots.changes
        if lenses not in self._plans:
            self._plans[lenses] = self._plan(lenses)
        return self._plans[lenses]

    def _score(self, rows: Tensor, plan: _Plan) -> Tensor:
        """Return the scores [n, lenses] of a plan."""
        logits = torch.empty(len(rows), sum(map(len, plan.ranges)), device=self.device)
        self._stack.logits(rows, plan.ranges, logits)
        self._mark_read(plan.slots)
        return plan.scoring.scores(logits if plan.columns is None else logits[:, plan.columns])

    def _mark_read(self, slots: Iterable[int]) -> None:
        """Note when the device reads these slots, so that a load waits for it."""
        if self._stream is None:
            return
        event = _event(torch.cuda.current_stream(self.device))
        for slot in slots:
            self._read_at[slot] = event

    def close(self) -> None:
        """Stop the loading thread and wait for its copies, because the slab is freed next."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event on a stream."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
