"""Slots: places of running requests' vectors and coefficients in device tables.

A request's ops are packed into columns. A column has one set of positions and holds at most one op per (layer, site),
so a token needs one entry (vector slot, coefficient slot, gate) per column whatever the number of layers. Contents are
interned by hash: equal columns share a slot, and the same vectors at another strength cost one coefficient row.
A slot in use is never evicted. Unused slots keep their content until it is evicted, oldest first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from steerscope.core.equation import NOTHING
from steerscope.specs.errors import CapacityExceeded
from steerscope.specs.steering import Coefficients, Site
from steerscope.specs.tokens import Positions

Key = tuple[int, Site]


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """One op at one layer and site, ready for the equation."""

    key: Key
    positions: Positions
    vector: np.ndarray  # float32 [hidden], unit length where the op needs it
    coefficients: Coefficients
    gate: int = 0
    content: bytes = b""  # identity of the vector's numbers, if it is known


@dataclass
class Column:
    """Ops with the same positions and gate, at most one per (layer, site). Its keys are computed once, when it is
    complete; code that received them may set them."""

    positions: Positions
    gate: int
    vectors: dict[Key, np.ndarray] = field(default_factory=dict)
    coefficients: dict[Key, Coefficients] = field(default_factory=dict)
    contents: dict[Key, bytes] = field(default_factory=dict)

    @cached_property
    def vector_key(self) -> bytes:
        return digest({key: self.contents.get(key) or vector.tobytes() for key, vector in self.vectors.items()})

    @cached_property
    def coefficient_key(self) -> bytes:
        return digest({key: np.array(c, np.float64).tobytes() for key, c in self.coefficients.items()})


def pack(ops: Sequence[PlacedOp]) -> list[Column]:
    """Pack ops into columns. At every (layer, site) the order of the columns is the order of the ops."""
    columns: list[Column] = []
    last: dict[Key, int] = {}
    for op in ops:
        at = last.get(op.key, -1) + 1
        while at < len(columns) and (columns[at].positions, columns[at].gate) != (op.positions, op.gate):
            at += 1
        if at == len(columns):
            columns.append(Column(op.positions, op.gate))
        columns[at].vectors[op.key] = op.vector
        columns[at].coefficients[op.key] = op.coefficients
        columns[at].contents[op.key] = op.content
        last[op.key] = at
    return columns


def digest(content: Mapping[Key, bytes]) -> bytes:
    """Return the identity of a column's contents at each (layer, site)."""
    found = hashlib.blake2b(digest_size=16)
    for (layer, site), data in sorted(content.items()):
        found.update(f"{layer}.{site}.{len(data)}:".encode())
        found.update(data)
    return found.digest()


@dataclass(slots=True)
class Slot:
    number: int
    key: Hashable
    users: int = 0


class SlotPool:
    """Slot numbers 1 … capacity−1 by content key, with reference counts; slot 0 means "do nothing". Keys may be long
    tuples without a cached hash, so `hold` looks a key up once and returns its `Slot` for `drop`."""

    def __init__(self, capacity: int, what: str) -> None:
        self.capacity = capacity
        self.what = what
        self._free = list(range(capacity - 1, 0, -1))
        self._slots: dict[Hashable, Slot] = {}
        self._idle: OrderedDict[int, Hashable] = OrderedDict()  # by number

    def acquire(self, key: Hashable) -> tuple[int, bool]:
        """Return the slot number of a content, and whether it must be written first."""
        slot, fresh = self.hold(key)
        return slot.number, fresh

    def hold(self, key: Hashable) -> tuple[Slot, bool]:
        """Return the slot of a content, to be released by `drop`, and whether it must be written first."""
        slot = self._slots.get(key)
        fresh = False
        if slot is None:
            if not self._free:
                self._evict()
            slot = Slot(self._free.pop(), key)
            fresh = True
            self._slots[key] = slot
        slot.users += 1
        self._idle.pop(slot.number, None)
        return slot, fresh

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots

    def release(self, key: Hashable) -> None:
        self.drop(self._slots[key])

    def drop(self, slot: Slot) -> None:
        slot.users -= 1
        if slot.users == 0:
            self._idle[slot.number] = slot.key

    def _evict(self) -> None:
        if not self._idle:
            raise CapacityExceeded(
                f"all {self.capacity - 1} {self.what} slots are in use by running requests: "
                f"wait for some to finish, or start the engine with more slots"
            )
        number, key = self._idle.popitem(last=False)
        del self._slots[key]
        self._free.append(number)

    @property
    def in_use(self) -> int:
        return len(self._slots) - len(self._idle)


@dataclass(frozen=True, slots=True)
class Lease:
    """The slots of one column in the table."""

    vector_slot: int
    coefficient_slot: int
    vector_key: bytes
    coefficient_key: bytes


class SlotTable:
    """Per (layer, site): vectors [slots, hidden] and coefficients [slots, 5]; slot numbers are shared over layers."""

    def __init__(self, hidden: int, capacity: int, device: torch.device) -> None:
        self.hidden = hidden
        self.capacity = capacity
        self.device = device
        self._vector_slots = SlotPool(capacity, "vector")
        self._coefficient_slots = SlotPool(4 * capacity, "coefficient")
        self._tensors: dict[Key, tuple[Tensor, Tensor]] = {}
        self._block: tuple[Tensor, Tensor] | None = None  # all keys in one piece, after `reserve`
        self.version = 0  # of the contents; operands looked up under an older version may be stale

    def tensors(self, key: Key) -> tuple[Tensor, Tensor]:
        if key not in self._tensors:
            vectors = torch.zeros(self.capacity, self.hidden, dtype=torch.float32, device=self.device)
            nothing = torch.tensor(NOTHING, dtype=torch.float32, device=self.device)
            self._tensors[key] = (vectors, nothing.repeat(4 * self.capacity, 1))
        return self._tensors[key]

    def reserve(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Allocate the tensors of exactly these keys in one piece of memory, [keys, slots, …]."""
        vectors = torch.zeros(len(keys), self.capacity, self.hidden, dtype=torch.float32, device=self.device)
        nothing = torch.tensor(NOTHING, dtype=torch.float32, device=self.device)
        coefficients = nothing.repeat(len(keys), 4 * self.capacity, 1)
        self._block = vectors, coefficients
        self._tensors = {key: (vectors[i], coefficients[i]) for i, key in enumerate(keys)}
        return self._block

    def acquire(self, column: Column) -> Lease:
        vector_key = column.vector_key
        coefficient_key = column.coefficient_key
        for key in column.vectors:
            self.tensors(key)  # may run out of memory, so before any slot is taken
        vector_slot, new_vectors = self._vector_slots.acquire(vector_key)
        if new_vectors:  # at once: a known slot must be written, even if the request is refused below
            self._write(0, vector_slot, {k: torch.from_numpy(v.copy()) for k, v in column.vectors.items()})
        try:
            coefficient_slot, new_coefficients = self._coefficient_slots.acquire(coefficient_key)
        except CapacityExceeded:
            self._vector_slots.release(vector_key)
            raise
        if new_coefficients:
            values = {key: torch.tensor(c, dtype=torch.float32) for key, c in column.coefficients.items()}
            self._write(1, coefficient_slot, values)
        return Lease(vector_slot, coefficient_slot, vector_key, coefficient_key)

    def lease(self, vector_key: bytes, coefficient_key: bytes) -> Lease | None:
        """Return the slots of contents that are in the table already; None when one is not."""
        if vector_key not in self._vector_slots or coefficient_key not in self._coefficient_slots:
            return None
        vectors, _ = self._vector_slots.acquire(vector_key)
        coefficients, _ = self._coefficient_slots.acquire(coefficient_key)
        return Lease(vectors, coefficients, vector_key, coefficient_key)

    def release(self, lease: Lease) -> None:
        self._vector_slots.release(lease.vector_key)
        self._coefficient_slots.release(lease.coefficient_key)

    @property
    def in_use(self) -> int:
        return self._vector_slots.in_use

    def _write(self, which: int, slot: int, values: Mapping[Key, Tensor]) -> None:
        """Fill a slot at every layer, which also clears its old content at layers without a value."""
        self.version += 1
        nothing = torch.zeros(self.hidden) if which == 0 else torch.tensor(NOTHING, dtype=torch.float32)
        rows = [values.get(key, nothing) for key in self._tensors]
        if self._block is not None:  # one copy for all keys
            self._block[which][:, slot].copy_(torch.stack(rows))
            return
        for tensors, row in zip(self._tensors.values(), rows, strict=True):
            tensors[which][slot].copy_(row)
