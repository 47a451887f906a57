"""What requests share on their way into vLLM, and the part of it that one of them holds.

The workers' tables have a fixed number of slots, and rows arrive in one piece of shared memory. Both are counted here,
on the client's side, so that a request waits or is refused instead of failing in a worker.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from steerscope.capture.transport import ALIGN, LEFT, READ, TAKEN, Region, Regions
from steerscope.core.slot_table import Column, Key, Slot, SlotPool
from steerscope.engines.plan import CapturePlan, Facts, Plan
from steerscope.engines.vllm.settings import Settings
from steerscope.engines.vllm.wire import Wire, WireCapture, WireColumn, WireWatch
from steerscope.lenses.compile import MOST_RULES
from steerscope.lenses.monitor import HostStepReadings, WatchPlan
from steerscope.specs.errors import CapacityExceeded, RequestFailed

_KEPT = 256
Held = tuple[tuple[SlotPool, Slot], ...]


class Room:
    def __init__(
        self, facts: Facts, dtype: torch.dtype, settings: Settings, stage: Mapping[Key, int], regions: Regions
    ) -> None:
        self.facts, self.dtype, self.regions = facts, dtype, regions
        self.stage = stage  # the pipeline stage that holds each tap
        self.stages = sorted(set(stage.values()))
        self.lock = threading.RLock()  # a claim may be collected anywhere
        self.vectors = SlotPool(settings.slots, "vector")
        self._coefficients = SlotPool(4 * settings.slots, "coefficient")
        self._groups = SlotPool(settings.groups, "capture group")
        # A plan of a capture serves all that ask alike.
        self._capture_bytes = functools.lru_cache(maxsize=_KEPT)(self._bytes_of)
        self.wire_capture = functools.lru_cache(maxsize=_KEPT)(_wire_capture)
        # By what else matters; a plan of a watch keeps its pack, so it must not be kept.
        self._watches: WeakKeyDictionary[WatchPlan, dict[tuple[CapturePlan | None, int], WireWatch]]
        self._watches = WeakKeyDictionary()
        self._last: tuple[tuple[Column, ...], CapturePlan | None, Held] | None = None  # what the last one was given

    def hold(self, plan: Plan) -> "Held":
        """The slots that a plan needs, until each of them is dropped. Raises CapacityExceeded, holding nothing. Plans
        of one call share what they ask for: whoever asks for the very same as the one before is given the same, if that
        is in use, and nothing of it has to be hashed."""
        if self._last is not None and plan.watch is None:
            columns, capture, held = self._last
            if capture is plan.capture and columns is plan.columns and all(slot.users for _, slot in held):
                for _, slot in held:
                    slot.users += 1
                return held
        found: list[tuple[SlotPool, Slot]] = []
        try:
            for slots, content in self._needs(plan):
                found.append((slots, slots.hold(content)[0]))
        except CapacityExceeded:
            for slots, slot in found:
                slots.drop(slot)
            raise
        held = tuple(found)
        self._last = None if plan.watch else (plan.columns, plan.capture, held)
        return held

    def _needs(self, plan: Plan) -> list[tuple[SlotPool, Hashable]]:
        found: list[tuple[SlotPool, Hashable]] = []
        for column in plan.columns:
            found += [(self.vectors, column.vector_key), (self._coefficients, column.coefficient_key)]
        kinds = (plan.capture is not None, plan.watch is not None)
        for kind in [(True, False), (False, True), (True, True)]:  # a token is captured, watched, or both
            if kinds[0] >= kind[0] and kinds[1] >= kind[1]:
                captured = plan.capture and (plan.capture.keys, plan.capture.spec.before_steering)
                found.append((self._groups, (captured if kind[0] else None, plan.watch and kind[1] and plan.watch.key)))
        return found

    def row_bytes(self, plan: Plan) -> int:
        """What arrives in shared memory: captured rows, and behind them the readings."""
        watch = self.watch(plan)
        return self._capture_bytes(plan.capture, plan.most_rows) if watch is None else watch.place + watch.bytes

    def _bytes_of(self, capture: CapturePlan | None, most: int) -> int:
        if capture is None:
            return 0
        size = 4 if capture.spec.reduce else self.dtype.itemsize
        return capture.rows(most) * len(capture.keys) * self.facts.hidden * size

    def watch(self, plan: Plan) -> WireWatch | None:
        if plan.watch is None:
            return None
        with self.lock:
            known = self._watches.setdefault(plan.watch, {})
            found = known.get((plan.capture, plan.most_rows))
            if found is None:
                place = -(-self._capture_bytes(plan.capture, plan.most_rows) // ALIGN) * ALIGN
                found = known[plan.capture, plan.most_rows] = WireWatch.of(plan.watch, plan.most_rows, place)
        return found

    def stages_of(self, keys: Sequence[Key]) -> list[int]:
        """The pipeline stages that hold these taps, in order."""
        return self.stages if len(self.stages) == 1 else sorted({self.stage[key] for key in keys})


def _wire_capture(plan: CapturePlan, hold: int, most: int) -> WireCapture:
    return WireCapture(plan.keys, plan.positions, plan.spec.before_steering, plan.spec.reduce, hold, most)


class Claim:
    """The slots and shared memory of one request that steers, captures or is watched."""

    def __init__(self, room: Room, plan: Plan) -> None:
        self.room, self.plan = room, plan
        self.region: Region | None = None
        self.watch = room.watch(plan)
        self._held: Held = ()

    def take(self) -> None:
        """Raises CapacityExceeded, holding nothing, when there is no room now."""
        try:
            with self.room.lock:
                self._held = self.room.hold(self.plan)
            self.region = self.room.regions.allocate(self.room.row_bytes(self.plan), self.room.stages)
            if self.region is None:
                raise CapacityExceeded(
                    "no free piece of shared memory is large enough: drop rows you hold, or raise capture_budget"
                )
        except CapacityExceeded:
            self.release()
            raise

    def release(self) -> None:
        """Give the slots back; may be called more than once."""
        with self.room.lock:
            held, self._held = self._held, ()
            for slots, slot in held:
                slots.drop(slot)

    def withdraw(self) -> None:
        """The request ends before anybody may have met it."""
        self.release()
        if self.region is not None:
            self.region.withdraw()
            self.region = None

    def wire(self, name: str, hold: int = 0, arena: tuple[str, int] | None = None) -> Wire:
        """For the workers. With an arena of its own it also carries the vectors: nobody gave them before."""
        assert self.region is not None
        plan = self.plan.capture
        capture = None if plan is None else self.room.wire_capture(plan, hold, self.plan.most_rows)
        columns = tuple(WireColumn.of(column, inline=arena is not None) for column in self.plan.columns)
        return Wire(name, arena, self.region.offset, self.region.owner, columns, capture, self.watch)

    @property
    def read(self) -> int:
        """Readings that are there."""
        return 0 if self.region is None else self.region.counters[READ]

    def readings(self, start: int, stop: int) -> HostStepReadings:
        """Those numbers, in memory of their own."""
        watch, region = self.watch, self.region
        assert watch is not None
        assert region is not None
        size, k = 4 * watch.words, watch.kept
        words = region.part(watch.place + start * size, watch.place + stop * size).view(np.int32)
        words = words.reshape(-1, watch.words).copy()
        values, indices = words[:, :k].view(np.float32), words[:, k : 2 * k].astype(np.int64)
        if not watch.compiled.rules:
            return HostStepReadings(values, indices, None, None, None)
        on, off = ((words[:, 2 * k + i, None] >> np.arange(MOST_RULES) & 1).astype(bool) for i in range(2))
        return HostStepReadings(values, indices, words[:, 2 * k + 2 :].view(np.float32), on, off)

    def arrived(self) -> int:
        """Rows that every stage of the capture has written."""
        assert self.region is not None
        assert self.plan.capture is not None
        stages, counters = self.room.stages_of(self.plan.capture.keys), self.region.counters
        return counters[stages[0]] if len(stages) == 1 else min(counters[stage] for stage in stages)

    def left(self) -> bool:
        """Every stage has said that it writes no more."""
        return self.region is None or all(self.region.counters[LEFT + stage] for stage in self.region.stages)

    def hand_over(self, computed: int) -> tuple[Callable[[], dict[Key, torch.Tensor]], int, int]:
        """What makes each tap's rows of a text that has ended with so many, how many of them were captured, and the
        bytes they need from now on. It and they keep the memory; the claim lets it go. Raises RequestFailed when some
        did not arrive."""
        capture, region = self.plan.capture, self.region
        assert capture is not None
        assert region is not None
        count = capture.positions.count(computed)
        found, reduce = self.arrived(), capture.spec.reduce
        region.counters[TAKEN] = 1
        if region.failed or (found != count if reduce else found < count):
            raise RequestFailed(f"{count - found} of {count} rows did not arrive")
        size = region.size
        if len(self.room.stages_of(capture.keys)) == 1:
            row = len(capture.keys) * self.room.facts.hidden
            size = 4 * row if reduce else count * row * self.room.dtype.itemsize
            region.shrink(size)
        self.region = None
        return functools.partial(self._columns, region, count), count, size

    def _columns(self, region: Region, count: int) -> dict[Key, torch.Tensor]:
        """A region holds one block [rows, taps, hidden] per pipeline stage, in the order of stages; a reduction is one
        row of float32."""
        assert self.plan.capture is not None
        capture, hidden, reduce = self.plan.capture, self.room.facts.hidden, self.plan.capture.spec.reduce
        if reduce and not count:
            return {key: torch.full((hidden,), torch.nan) for key in capture.keys}
        total = 1 if reduce else capture.positions.count(self.plan.most_rows)
        stages = self.room.stages_of(capture.keys)
        if len(stages) == 1 and not reduce:
            total = count  # the rest was given back
        flat = region.tensor((total * len(capture.keys), hidden), torch.float32 if reduce else self.room.dtype)
        found, start = {}, 0
        for stage in stages:
            mine = [key for key in capture.keys if self.room.stage[key] == stage]
            block = flat[start : start + total * len(mine)].view(total, len(mine), hidden)
            found |= {key: block[0, j] if reduce else block[:count, j] for j, key in enumerate(mine)}
            start += total * len(mine)
        return found
