"""What requests share on their way into vLLM, and the part of it that one of them holds.

The workers' tables have a fixed number of slots, and rows arrive in one piece of shared memory. Both are counted here,
on the client's side, so that a request waits or is refused instead of failing in a worker.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch

from steerscope.capture.transport import LEFT, READ, TAKEN, Region, Regions
from steerscope.core.slot_table import Key, Slot, SlotPool
from steerscope.engines.plan import Facts, Plan
from steerscope.engines.vllm.client.template import Salts, VLLMTemplate
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.engines.vllm.wire import Envelope
from steerscope.lenses.reader import HostStepReadings
from steerscope.lenses.rules import MOST_RULES
from steerscope.specs.errors import CapacityExceeded, RequestFailed


class Capacity:
    def __init__(
        self, facts: Facts, dtype: torch.dtype, settings: VLLMSettings, stage: Mapping[Key, int], regions: Regions
    ) -> None:
        self.facts, self.dtype, self.regions = facts, dtype, regions
        self.salts = Salts()
        self.stage = stage  # the pipeline stage that holds each tap
        self.stages = sorted(set(stage.values()))
        self.lock = threading.RLock()  # an allocation may be garbage-collected in any thread
        self.vectors = SlotPool(settings.slots, "vector")
        self.coefficients = SlotPool(4 * settings.slots, "coefficient")
        self.groups = SlotPool(settings.groups, "capture group")

    def shared(self, plan: Plan) -> VLLMTemplate:
        """Return what a plan shares with equal ones."""
        template = plan.template
        if template.engine_part is None:
            template.engine_part = VLLMTemplate(template, self.facts.hidden, self.dtype.itemsize)
        return template.engine_part

    def hold(self, plan: Plan) -> list[tuple[SlotPool, Slot]]:
        """Take the slots that a plan needs. Raises CapacityExceeded, holding nothing."""
        needs: list[tuple[SlotPool, Hashable]] = []
        for column in plan.columns:
            needs += [(self.vectors, column.vector_key), (self.coefficients, column.coefficient_key)]
        needs += [(self.groups, group) for group in self.shared(plan).groups]
        found: list[tuple[SlotPool, Slot]] = []
        try:
            for slots, content in needs:
                found.append((slots, slots.hold(content)[0]))
        except CapacityExceeded:
            for slots, slot in found:
                slots.drop(slot)
            raise
        return found

    def row_bytes(self, plan: Plan) -> int:
        """Return the bytes that arrive in shared memory: captured rows, and behind them the readings."""
        return self.shared(plan).n_bytes

    def stages_of(self, keys: Sequence[Key]) -> list[int]:
        """Return the pipeline stages that hold these taps, in order."""
        return self.stages if len(self.stages) == 1 else sorted({self.stage[key] for key in keys})


class Allocation:
    """The slots and shared memory of one request that steers, captures or is watched."""

    def __init__(self, capacity: Capacity, plan: Plan) -> None:
        self.capacity, self.plan = capacity, plan
        self.region: Region | None = None
        self.shared = capacity.shared(plan)
        self.held: list[tuple[SlotPool, Slot]] = []

    def take(self) -> None:
        """Raises CapacityExceeded, holding nothing, when there is no room now."""
        try:
            with self.capacity.lock:
                self.held = self.capacity.hold(self.plan)
            self.region = self.capacity.regions.allocate(self.shared.n_bytes, self.capacity.stages)
            if self.region is None:
                raise CapacityExceeded(
                    "no free piece of shared memory is large enough: drop rows you hold, or raise capture_budget"
                )
        except CapacityExceeded:
            self.release()
            raise

    def release(self) -> None:
        """Give the slots back; may be called more than once."""
        with self.capacity.lock:
            while self.held:
                slots, slot = self.held.pop()
                slots.drop(slot)

    def withdraw(self) -> None:
        """Give everything back, of a request that no worker can know of."""
        self.release()
        if self.region is not None:
            self.region.withdraw()
            self.region = None

    def entry(self, name: str, hold: int = 0, arena: tuple[str, int] | None = None) -> dict[str, object]:
        """Return what the request carries to the workers. With an arena of its own it also carries its vectors, which
        the workers were not given."""
        assert self.region is not None
        body, first = self.shared.body(hold)
        contents = () if arena is None else self.shared.contents()
        return Envelope(name, arena, self.region.offset, self.region.owner, body, contents).entry(first)

    @property
    def read(self) -> int:
        """Return the number of readings that are there."""
        return 0 if self.region is None else self.region.counters[READ]

    def readings(self, start: int, stop: int) -> HostStepReadings:
        """Return readings [start, stop), in memory of their own."""
        watch, region = self.shared.watch, self.region
        assert watch is not None
        assert region is not None
        size, k = 4 * watch.words, watch.kept
        words = region.part(watch.place + start * size, watch.place + stop * size).view(np.int32)
        words = words.reshape(-1, watch.words).copy()
        values, indices = words[:, :k].view(np.float32), words[:, k : 2 * k].astype(np.int64)
        if not watch.compiled.rules:
            return HostStepReadings(values, indices)
        on, off = ((words[:, 2 * k + i, None] >> np.arange(MOST_RULES) & 1).astype(bool) for i in range(2))
        return HostStepReadings(values, indices, words[:, 2 * k + 2 :].view(np.float32), on, off)

    def arrived(self) -> int:
        """Return the number of rows that every stage of the capture has written."""
        assert self.region is not None
        assert self.plan.capture is not None
        stages, counters = self.capacity.stages_of(self.plan.capture.keys), self.region.counters
        return counters[stages[0]] if len(stages) == 1 else min(counters[stage] for stage in stages)

    def left(self) -> bool:
        """Return whether every stage has said that it writes no more."""
        return self.region is None or all(self.region.counters[LEFT + stage] for stage in self.region.stages)

    def hand_over(self, computed: int) -> tuple[Callable[[], dict[Key, torch.Tensor]], int, int]:
        """Return a function that makes each tap's rows, the number of captured rows, and the bytes they need from now
        on, for a text that has ended after `computed` rows. The function keeps the memory, which this lets go. Raises
        RequestFailed when rows did not arrive."""
        capture, region = self.plan.capture, self.region
        assert capture is not None
        assert region is not None
        count = capture.positions.count(computed)
        found, reduce = self.arrived(), capture.spec.reduce
        region.counters[TAKEN] = 1
        if region.failed or (found != count if reduce else found < count):
            raise RequestFailed(f"{count - found} of {count} rows did not arrive")
        size = region.size
        if len(self.capacity.stages_of(capture.keys)) == 1:
            row = len(capture.keys) * self.capacity.facts.hidden
            size = 4 * row if reduce else count * row * self.capacity.dtype.itemsize
            region.shrink(size)
        self.region = None
        return functools.partial(self._columns, region, count), count, size

    def _columns(self, region: Region, count: int) -> dict[Key, torch.Tensor]:
        """A region holds one block [rows, taps, hidden] per pipeline stage, in the order of stages; a reduction is one
        row of float32."""
        assert self.plan.capture is not None
        capture, hidden, reduce = self.plan.capture, self.capacity.facts.hidden, self.plan.capture.spec.reduce
        if reduce and not count:
            return {key: torch.full((hidden,), torch.nan) for key in capture.keys}
        total = 1 if reduce else capture.positions.count(self.plan.most_rows)
        stages = self.capacity.stages_of(capture.keys)
        if len(stages) == 1 and not reduce:
            total = count  # the rest was given back
        flat = region.tensor((total * len(capture.keys), hidden), torch.float32 if reduce else self.capacity.dtype)
        found, start = {}, 0
        for stage in stages:
            mine = [key for key in capture.keys if self.capacity.stage[key] == stage]
            block = flat[start : start + total * len(mine)].view(total, len(mine), hidden)
            found |= {key: block[0, j] if reduce else block[:count, j] for j, key in enumerate(mine)}
            start += total * len(mine)
        return found
