"""What requests share on their way into vLLM, and the part of it that one of them holds.

Equal requests share a `VLLMTemplate`, made once of their `RequestTemplate`; salts keep steered keys and values apart in
vLLM's prefix cache. The workers' tables have a fixed number of slots, and rows arrive in one piece of shared memory.
Both are counted here, on the client's side, so that a request waits or is refused instead of failing in a worker.
"""

import functools
import hashlib
import secrets
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec
import numpy as np
import torch

from steerscope.capture.transport import ALIGN, LEFT, READ, Arena, Region, Regions, shared_folder
from steerscope.core.slot_table import Key, Slot, SlotPool
from steerscope.engines.plan import Facts, Plan, RequestTemplate
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.engines.vllm.wire import Envelope, Recent, WireBody, WireCapture, WireColumn, WireWatch
from steerscope.lenses.reader import HostStepReadings
from steerscope.lenses.rules import MOST_RULES
from steerscope.specs.errors import CapacityExceeded, RequestFailed
from steerscope.specs.tokens import EVERYWHERE

_COUNTERS = 4 << 20  # bytes


def new_arena(capture_budget: int) -> Arena:
    """Return shared memory for `capture_budget` bytes of rows, and room for counters and gaps."""
    size = capture_budget + (capture_budget >> 3) + _COUNTERS
    return Arena(shared_folder(size) / f"steerscope-{secrets.token_hex(8)}", size, create=True)


class VLLMTemplate:
    def __init__(self, template: RequestTemplate, hidden: int, row_itemsize: int) -> None:
        # No reference to the template, which refers to this: a cycle would keep the pack of a watch in memory.
        self._columns = template.columns
        self._capture = capture = template.capture
        self._most_rows = template.most_rows
        self._bodies: dict[int, bytes] = {}  # by the rows that a reduction keeps back
        self.steers = bool(template.columns)
        self.reads_cached = reads_cached(template)
        self.salt = salt_of(template)
        watched = template.watch and template.watch.key
        captured = capture and (capture.keys, capture.spec.before_steering)
        groups = [(captured, None), (None, watched), (captured, watched)]  # a token is captured, watched, or both
        self.groups = [group for group in dict.fromkeys(groups) if group != (None, None)]
        n_bytes = 0 if capture is None else capture.n_bytes(template.most_rows, hidden, row_itemsize)
        self.watch: WireWatch | None = None
        if template.watch is not None:
            place = -(-n_bytes // ALIGN) * ALIGN  # of the readings, behind the rows
            self.watch = WireWatch.of(template.watch, template.most_rows, place)
            n_bytes = place + self.watch.bytes
        self.n_bytes = n_bytes  # of shared memory

    def body(self, hold: int) -> bytes:
        """Return the packed body."""
        found = self._bodies.get(hold)
        if found is None:
            columns = tuple(WireColumn.of(column) for column in self._columns)
            body = WireBody(columns, self._wire_capture(hold), self.watch)
            found = self._bodies[hold] = msgspec.msgpack.encode(body)
        return found

    def _wire_capture(self, hold: int) -> WireCapture | None:
        if self._capture is None:
            return None
        keys = self._capture.keys
        positions = self._capture.positions
        spec = self._capture.spec
        return WireCapture(keys, positions, spec.before_steering, spec.reduce, hold, self._most_rows)

    def contents(self) -> tuple[bytes, ...]:
        """Return the vectors of each column, for workers that were not given them."""
        return tuple(b"".join(vector.tobytes() for vector in column.vectors.values()) for column in self._columns)


def reads_cached(template: RequestTemplate) -> bool:
    """Return whether a cached prompt may be used: all its positions but the last can be cached, and would have no
    rows."""
    last = template.prompt_length - 1
    asked = (template.capture, template.watch)
    return not any(one is not None and one.positions.count(last) for one in asked)


def salt_of(template: RequestTemplate) -> str | None:
    """Return a hash of what the ops do and where; None where nothing is steered, or rules switch ops.

    Cached blocks are reused by any prompt that begins with the same tokens, so what was done to a position must be a
    function of the salt and of the tokens up to it: where an op does not act everywhere, its resolved positions
    and the length of the prompt they were resolved against belong to it. Names never do.
    """
    if not template.columns or any(column.gate for column in template.columns):
        return None
    found = hashlib.blake2b(digest_size=16)
    for column in template.columns:
        found.update(column.vector_key)
        found.update(column.coefficient_key)
        if column.positions != EVERYWHERE:
            found.update(repr((template.prompt_length, column.positions.intervals)).encode())
        found.update(b";")
    return found.hexdigest()


class Salts:
    """The salts of one engine's requests. Requests share cached blocks if their salts are equal."""

    def __init__(self) -> None:
        self._spoilt = Recent()  # those under which steering overflowed: their cached blocks hold nothing

    def of(self, shared: VLLMTemplate) -> str | None:
        """Return the salt of a request. What a rule switches depends on the text itself: such a request shares with
        none, and neither does one whose steering has overflowed."""
        if shared.steers and (shared.salt is None or shared.salt in self._spoilt):
            return secrets.token_hex(16)
        return shared.salt

    def spoil(self, shared: VLLMTemplate) -> None:
        """Note that these ops made rows that are not finite."""
        if shared.salt is not None:
            self._spoilt.add(shared.salt)


class Capacity:
    def __init__(
        self, facts: Facts, dtype: torch.dtype, settings: VLLMSettings, stage: Mapping[Key, int], regions: Regions
    ) -> None:
        self.facts = facts
        self.dtype = dtype
        self.regions = regions
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

    def stages_of(self, keys: Sequence[Key]) -> list[int]:
        """Return the pipeline stages that hold these taps, in order."""
        return self.stages if len(self.stages) == 1 else sorted({self.stage[key] for key in keys})


class Allocation:
    """The slots and shared memory of one request that steers, captures or is watched."""

    def __init__(self, capacity: Capacity, plan: Plan) -> None:
        self.capacity = capacity
        self.plan = plan
        self.region: Region | None = None
        self.shared = capacity.shared(plan)
        self.held: list[tuple[SlotPool, Slot]] = []

    def take(self) -> None:
        """Raises CapacityExceeded, holding nothing, when there is no room now."""
        capacity = self.capacity
        needs: list[tuple[SlotPool, Hashable]] = [(capacity.groups, group) for group in self.shared.groups]
        for column in self.plan.columns:
            needs += [(capacity.vectors, column.vector_key), (capacity.coefficients, column.coefficient_key)]
        try:
            with capacity.lock:
                for slots, content in needs:
                    self.held.append((slots, slots.hold(content)[0]))
            self.region = capacity.regions.allocate(self.shared.n_bytes, capacity.stages)
            if self.region is None:
                remedy = "drop rows you hold, or raise capture_budget"
                raise CapacityExceeded(f"no free piece of shared memory is large enough: {remedy}")
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
        body = self.shared.body(hold)
        contents = () if arena is None else self.shared.contents()
        return Envelope(name, arena, self.region.offset, self.region.owner, body, contents).entry()

    @property
    def failure(self) -> str | None:
        """Return why the workers gave the request up."""
        return None if self.region is None else self.region.failure

    @property
    def read(self) -> int:
        """Return the number of readings that are there."""
        return 0 if self.region is None else self.region.counters[READ]

    def readings(self, start: int, stop: int) -> HostStepReadings:
        """Return readings [start, stop), in memory of their own."""
        watch = self.shared.watch
        region = self.region
        assert watch is not None
        assert region is not None
        size = 4 * watch.words
        k = watch.kept
        words = region.part(watch.place + start * size, watch.place + stop * size).view(np.int32)
        words = words.reshape(-1, watch.words).copy()
        values = words[:, :k].view(np.float32)
        indices = words[:, k : 2 * k].astype(np.int64)
        if not watch.compiled.rules:
            return HostStepReadings(values, indices)
        on, off = ((words[:, 2 * k + i, None] >> np.arange(MOST_RULES) & 1).astype(bool) for i in range(2))
        return HostStepReadings(values, indices, words[:, 2 * k + 2 :].view(np.float32), on, off)

    def arrived(self) -> int:
        """Return the number of rows that every stage of the capture has written."""
        assert self.region is not None
        assert self.plan.capture is not None
        stages = self.capacity.stages_of(self.plan.capture.keys)
        counters = self.region.counters
        return counters[stages[0]] if len(stages) == 1 else min(counters[stage] for stage in stages)

    def left(self) -> bool:
        """Return whether every stage has said that it writes no more."""
        return self.region is None or all(self.region.counters[LEFT + stage] for stage in self.region.stages)

    def hand_over(self, computed: int) -> tuple[Callable[[], dict[Key, torch.Tensor]], int, int]:
        """Return a function that makes each tap's rows, the number of captured rows, and the bytes they need from now
        on, for a text that has ended after `computed` rows. The function keeps the memory, which this lets go. Raises
        RequestFailed when rows did not arrive."""
        capture = self.plan.capture
        region = self.region
        assert capture is not None
        assert region is not None
        count = capture.positions.count(computed)
        found = self.arrived()
        reduce = capture.spec.reduce
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
        capture = self.plan.capture
        hidden = self.capacity.facts.hidden
        reduce = self.plan.capture.spec.reduce
        if reduce and not count:
            return {key: torch.full((hidden,), torch.nan) for key in capture.keys}
        total = 1 if reduce else capture.positions.count(self.plan.most_rows)
        stages = self.capacity.stages_of(capture.keys)
        if len(stages) == 1 and not reduce:
            total = count  # the rest was given back
        flat = region.tensor((total * len(capture.keys), hidden), torch.float32 if reduce else self.capacity.dtype)
        found = {}
        start = 0
        for stage in stages:
            mine = [key for key in capture.keys if self.capacity.stage[key] == stage]
            block = flat[start : start + total * len(mine)].view(total, len(mine), hidden)
            found |= {key: block[0, j] if reduce else block[:count, j] for j, key in enumerate(mine)}
            start += total * len(mine)
        return found
