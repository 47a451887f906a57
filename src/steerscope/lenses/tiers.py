"""Tiers: expansion over a pack that the device cannot hold.

- **hot**: a slab of a fixed number of lenses on the device. The base levels and pinned concepts are always in it.
- **warm**: lenses encoded as in the slab, in host memory (pinned for a GPU), up to a number of bytes.
- **cold**: the pack's mapped file.

The children of a concept are loaded together, and the least recently used ones are evicted. A thread loads them, on a
GPU through its own stream, while hot lenses are scored. A late load delays a result and never changes it. The smallest
budget is the pinned lenses and one more; a group larger than the rest of the slab is scored in parts.
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

from steerscope.lenses.bank import activate, calibrate, gather, normed_flags
from steerscope.lenses.expand import Expansion, Groups, LensScores, check, expand, joined
from steerscope.lenses.hierarchy import as_slice
from steerscope.lenses.pack import Calibration, Pack
from steerscope.lenses.slab import MOST_ROWS, Slab
from steerscope.lenses.slots import LensSlots
from steerscope.lenses.stack import WORKSPACE, SlotRange, Stack, Weights, columns_of, slot_ranges
from steerscope.specs.errors import InvalidRequest, Problem

Unit = tuple[int, int]  # a concept, and the first of its children that belong to the unit
_PER_LENS = ("low", "high", "confidence", "floor", "threshold")
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
        self._units: OrderedDict[tuple[int, ...], dict[str, Tensor]] = OrderedDict()

    def get(self, lenses: tuple[int, ...]) -> dict[str, Tensor]:
        """Return encoded lenses, read from the pack if they are not cached."""
        if lenses in self._units:
            self._units.move_to_end(lenses)
            return self._units[lenses]
        cold = gather(self.pack, as_slice(lenses))
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

    slots: list[int]
    lenses: Tensor
    runs: list[SlotRange]
    width: int  # lenses of the runs
    columns: Tensor | None  # of the lenses among those of the runs, if these bridge gaps
    floor: Tensor
    threshold: Tensor
    curve: Calibration | None


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
        self.pack, self.device = pack, torch.device(device)
        self.groups = Groups(pack, base_levels, self.device)
        self._flags = normed_flags(pack)
        self.pinned = [pack.index(each) if isinstance(each, str) else range(len(pack))[each] for each in pinned]
        always = sorted(self.groups.base, key=self._flags.__getitem__)
        always += [lens for lens in dict.fromkeys(self.pinned) if lens not in self.groups.base]
        count = self._slots_for(budget, budget_bytes, len(always), weights)
        self._stack = Stack(pack.info, count, self.device, weights, workspace)
        self.slots = LensSlots(count, always)
        # Unneeded slots between needed ones are evaluated too if that costs less than another launch.
        self._bridge = (1 << 20 if self.device.type == "cpu" else 64 << 20) // self._stack.lens_bytes
        self.stats = Stats()
        self._warm = WarmCache(pack, self._stack, warm_bytes, self.stats)
        self._loading: dict[int, Future[torch.cuda.Event | None]] = {}
        self._read_at: list[torch.cuda.Event | None] = [None] * count  # last evaluation of each slot, on a GPU
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(1, "steerscope-lenses")
        self._lock = RLock()
        step = max(1, workspace // self._stack.lens_bytes // 2)
        for start in range(0, len(always), step):
            part = always[start : start + step]
            self._stack.write(slice(start, start + len(part)), self._stack.encode(gather(pack, part)))
        self._base, self._named = self._plan(self.groups.base), self._plan(self.pinned)  # pinned: slots never change
        place = {lens: i for i, lens in enumerate(self._named.lenses.tolist())}
        self._as_named = torch.tensor([place[lens] for lens in self.pinned], dtype=torch.long, device=self.device)
        self._plans: dict[tuple[Unit, ...], _Plan] = {}
        self._plans_of = self.slots.changes
        one_input = len(set(self._flags)) == 1  # otherwise the input of a slot depends on the lens in it
        if at_once is None:
            at_once = self.device.type == "cuda"
        self._slab = Slab(self._stack, self.groups, self._flags[0]) if at_once and one_input else None
        if self._stream is not None:  # the slab is filled with zeros first
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _slots_for(self, budget: int | None, budget_bytes: int | None, always: int, weights: Weights) -> int:
        if (budget is None) == (budget_bytes is None):
            raise InvalidRequest([Problem("budget", "is given twice or not at all", "give budget or budget_bytes")])
        one = Stack(self.pack.info, 1, torch.device("meta"), weights).lens_bytes
        count = budget if budget is not None else (budget_bytes or 0) // one
        least = min(always + 1, len(self.pack))
        if count < least:
            what = f"holds {count} lenses; the base levels and pinned concepts are {always}"
            remedy = f"give at least {least} lenses ({least * one} bytes), or fewer base levels"
            raise InvalidRequest([Problem("budget", what, remedy)])
        return min(count, len(self.pack))

    # --- LensScorer

    def base(self, rows: Tensor) -> LensScores:
        with self.stats.timed("base detection"):
            return self._score(rows, self._base)

    def children(self, rows: Tensor, parents: Sequence[int]) -> Iterable[LensScores]:
        """Yield scores of hot groups first, while the thread loads the others."""
        with self.stats.timed("cache management"):
            self._forget_failed()
            units = [unit for parent in parents for unit in self._units(parent)]
            ready = [unit for unit in units if unit in self.slots]
            missing = [unit for unit in units if unit not in self.slots]
            for unit in ready:
                self.slots.touch(unit)
            self.stats.hits += sum(len(self.slots.lenses(unit)) for unit in ready)
        while ready or missing:
            with self.stats.timed("cache management"):
                coming = self._place(missing, locked=ready)
                missing = missing[len(coming) :]
            if ready:
                if self._loading:
                    with self.stats.timed("child loading"):
                        self._wait_for([lens for unit in ready for lens in self.slots.lenses(unit)])
                with self.stats.timed("child detection"):
                    scored = self._score(rows, self._plan_of(ready))
                yield scored
            ready = coming

    def expand(self, rows: Tensor, top_k: int = 10, depth: int = 5, keep_scores: bool = False) -> Expansion:
        """Return the top concepts of rows [n, hidden]."""
        with self._lock:
            before, start = sum(self.stats.seconds.values()), time.perf_counter()
            result = self._all_hot(rows, top_k, depth, keep_scores) or expand(self, rows, top_k, depth, keep_scores)
            inside = sum(self.stats.seconds.values()) - before
            self.stats.seconds["python"] += time.perf_counter() - start - inside
            return result

    @torch.no_grad()
    def _all_hot(self, rows: Tensor, top_k: int, depth: int, keep_scores: bool) -> Expansion | None:
        """Expand in one pass over the slab; return None if it lacks a group that the expansion needed."""
        if self._slab is None or not 1 <= len(rows) <= MOST_ROWS:
            return None
        check(top_k, depth)
        with self.stats.timed("base detection"):
            found = self._slab(rows, top_k, depth, self.slots)
            if self._stream is not None:
                self._read_at = [_event(torch.cuda.current_stream(self.device))] * len(self._read_at)
        with self.stats.timed("cache management"):
            units = [unit for parent in found.parents for unit in self._units(parent)]
            if not all(unit in self.slots for unit in units):
                return None
            lenses = [lens for unit in units for lens in self.slots.lenses(unit)]
            if self._loading and not self._loading.keys().isdisjoint(lenses):
                return None
            for unit in units:
                self.slots.touch(unit)
            self.stats.hits += len(lenses)
        return joined(self.groups, [found[:3]], keep_scores)

    def prewarm(self, rows: Tensor, top_k: int = 10, depth: int = 5) -> None:
        """Make hot what these rows need, such as the rows of a prompt."""
        self.expand(rows, top_k, depth)

    def prefetch(self, parents: Sequence[int]) -> None:
        """Start loading the children of these concepts, as far as they fit, and return."""
        with self._lock:
            asked = [unit for parent in parents for unit in self._units(parent)]
            for unit in asked:
                if unit in self.slots:
                    self.slots.touch(unit)
            self._place([unit for unit in asked if unit not in self.slots], locked=asked, count=False)

    def pinned_scores(self, rows: Tensor) -> Tensor:
        """Return scores [n, pinned] of the pinned concepts, in the given order, without loading anything."""
        with torch.no_grad():
            return self._score(rows, self._named).scores[:, self._as_named]

    # --- inside

    def _units(self, parent: int) -> list[Unit]:
        return [(parent, start) for start in range(0, len(self.groups.of(parent)), max(1, self.slots.room))]

    def _place(self, units: Sequence[Unit], locked: Sequence[Unit], count: bool = True) -> list[Unit]:
        """Find slots for as many of these units as fit beside the locked ones, and start loading them."""
        placed: list[Unit] = []
        for unit in units:
            parent, start = unit
            members = self.groups.of(parent)[start : start + self.slots.room]
            found = self.slots.place(unit, members, {*locked, *placed})
            if found is None:
                break
            placed.append(unit)
            if count:
                self.stats.hits += len(members) - len(found)
                self.stats.misses += len(found)
            if found:
                ordered = sorted(found, key=lambda lens: (self._flags[lens], lens))
                slots = sorted(found.values())
                self.slots.of.update(zip(ordered, slots, strict=True))
                job = self._worker.submit(self._load, tuple(ordered), slots, [self._read_at[slot] for slot in slots])
                self._loading.update(dict.fromkeys(ordered, job))
        return placed

    def _load(
        self, lenses: tuple[int, ...], slots: Sequence[int], after: Sequence[torch.cuda.Event | None]
    ) -> torch.cuda.Event | None:
        """Load lenses into slots, in the loading thread, after the last evaluations that read these slots."""
        encoded = self._warm.get(lenses)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext(), torch.no_grad():
            for event in {id(event): event for event in after if event is not None}.values():
                assert self._stream is not None
                self._stream.wait_event(event)
            done = 0
            for run in slot_ranges(slots, [False] * len(slots)):
                size = run.stop - run.start
                part = {name: tensor[done : done + size] for name, tensor in encoded.items()}
                self._stack.write(slice(run.start, run.stop), part, non_blocking=True)
                done += size
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
        """Evict units of loads that failed, so that they are loaded again when they are needed."""
        failed = [lens for lens, job in self._loading.items() if job.done() and job.exception() is not None]
        for unit in self.slots.holders(failed):
            self.slots.evict(unit)
        for lens in failed:
            del self._loading[lens]

    def _plan(self, lenses: Iterable[int]) -> _Plan:
        """Return the plan of hot lenses, in the order of their slots. Valid while they keep their slots."""
        inside = sorted({self.slots.of[lens]: lens for lens in lenses}.items())
        slots, members = [slot for slot, _ in inside], [lens for _, lens in inside]
        runs = slot_ranges(slots, [self._flags[lens] for lens in members], self._bridge)
        width = sum(run.stop - run.start for run in runs)
        columns = torch.tensor(columns_of(slots, runs), device=self.device) if width > len(slots) else None
        at = torch.tensor(slots, dtype=torch.long, device=self.device)
        low, high, confidence, floor, threshold = (self._stack.tensors[name][at] for name in _PER_LENS)
        curve = Calibration(low, high, confidence) if self.pack.calibration else None
        return _Plan(slots, torch.tensor(members, device=self.device), runs, width, columns, floor, threshold, curve)

    def _plan_of(self, units: Sequence[Unit]) -> _Plan:
        """Return the plan of hot units, cached: a text needs the same ones again and again."""
        if self._plans_of != self.slots.changes:
            self._plans.clear()
            self._plans_of = self.slots.changes
        key = tuple(units)
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(lens for unit in units for lens in self.slots.lenses(unit))
        return self._plans[key]

    def _score(self, rows: Tensor, plan: _Plan) -> LensScores:
        """Evaluate the lenses of a plan."""
        logits = torch.empty(len(rows), plan.width, device=self.device)
        self._stack.logits(rows, plan.runs, logits)
        if plan.columns is not None:
            logits = logits[:, plan.columns]
        architecture = self.pack.info.architecture
        found = activate(logits, architecture.output, architecture.k, plan.threshold)
        if self._stream is not None:
            event = _event(torch.cuda.current_stream(self.device))
            for slot in plan.slots:
                self._read_at[slot] = event
        return LensScores(plan.lenses, calibrate(found, plan.floor, plan.curve))

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
