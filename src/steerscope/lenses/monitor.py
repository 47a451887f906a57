"""Monitor: the lenses of all watched requests on an engine's device, and their rules.

An engine takes a seat for every watched request. After each forward it passes the computed rows of a layer, with the
seat and position of each, and gets tensors: the top concepts of every row, and which rules changed. Gates in
`monitor.rules.gates` are switched by then. `HostStepReadings.note` adds the results to each request's notes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from steerscope.core.slot_table import Key
from steerscope.lenses.compile import Compiled
from steerscope.lenses.reader import Read, Reader, Registered
from steerscope.lenses.readings import Notes
from steerscope.lenses.rules import Rules
from steerscope.specs.tokens import Positions
from steerscope.specs.watch import Watch

_MAX_IDLE = 2  # packs that stay on the device although they are neither registered nor in use


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)  # shared by equal requests
class WatchPlan:
    """A validated watch: the pack, layer and site it reads, which positions, and its compiled rules."""

    registered: Registered
    key: Key
    positions: Positions
    compiled: Compiled
    spec: Watch

    @property
    def levels(self) -> tuple[int, ...] | None:
        return None if self.spec.levels is None else tuple(sorted(set(self.spec.levels)))

    def notes(self, prompt_length: int) -> Notes:
        return Notes(self.registered.pack, self.compiled, self.spec.top_k, prompt_length)


@dataclass(frozen=True, slots=True)
class Seat:
    """A watched request's reader, its slot in the rule tables (0: no rules), and its view."""

    reader: Reader
    slot: int
    view: int
    top_k: int

    @property
    def group(self) -> tuple[int, int]:
        """Return the key of seats whose rows can be read together. Results of tiers depend on `top_k`."""
        return id(self.reader), self.top_k if self.reader.tiers is not None else 0


class StepReadings(NamedTuple):
    """Results of n rows: those of `Read`, and which rules went on and off [n, rules] (None: no rules)."""

    values: Tensor
    indices: Tensor
    scores: Tensor | None
    on: Tensor | None
    off: Tensor | None

    def to_host(self) -> "HostStepReadings":
        return HostStepReadings(*(None if part is None else part.cpu().numpy() for part in self))  # type: ignore[arg-type]


class HostStepReadings(NamedTuple):
    """`StepReadings` as numpy arrays."""

    values: np.ndarray
    indices: np.ndarray
    scores: np.ndarray | None
    on: np.ndarray | None
    off: np.ndarray | None

    def note(self, notes: Notes, start: int, positions: Sequence[int] | np.ndarray) -> None:
        """Add the rows from `start` on, which are these positions of one request, to its notes."""
        stop = start + len(positions)
        notes.add(positions, self.values[start:stop], self.indices[start:stop])
        if self.on is None or self.off is None or self.scores is None:
            return
        changed = np.flatnonzero((self.on[start:stop] | self.off[start:stop]).any(axis=1))
        for i in changed.tolist():
            at = start + i
            on, off = np.flatnonzero(self.on[at]).tolist(), np.flatnonzero(self.off[at]).tolist()
            notes.fire(int(positions[i]), on, off, self.scores[at])


@dataclass(slots=True)
class _LoadedPack:
    """A pack on the device. One that was unregistered while in use (`leaves`) is closed with its last seat."""

    reader: Reader
    registered: bool = False
    leaves: bool = False
    seats: int = 0


class Monitor:
    """Readers of all packs in use, and the rules. Used only by the thread (and stream) that runs the model."""

    def __init__(self, device: str | torch.device = "cpu", slots: int = 64) -> None:
        self.device = torch.device(device)
        self.rules = Rules(self.device, slots)
        self._packs: OrderedDict[object, _LoadedPack] = OrderedDict()  # by key, the last used at the end
        self.closing: Callable[[Reader], None] | None = None  # called before a pack leaves the device

    # --- packs

    def keep(self, reader: Reader) -> None:
        """Register a pack: it stays on the device until it is dropped."""
        key = reader.registered.key
        if key in self._packs:
            reader.close()
        else:
            self._packs[key] = _LoadedPack(reader)
        self._packs[key].registered = True
        self._packs[key].leaves = False

    def drop(self, registered: Registered) -> None:
        """Unregister a pack. Requests that use it keep it until they end."""
        pack = self._packs.get(registered.key)
        if pack is None:
            return
        pack.registered = False
        pack.leaves = True
        if not pack.seats:
            self._close(registered.key)

    def _loaded(self, registered: Registered) -> _LoadedPack:
        if registered.key not in self._packs:
            self._make_room()
            self._packs[registered.key] = _LoadedPack(Reader(registered, self.device))
        self._packs.move_to_end(registered.key)
        return self._packs[registered.key]

    def _make_room(self) -> None:
        idle = [key for key, pack in self._packs.items() if not pack.registered and not pack.seats]
        for key in idle[: max(0, len(idle) - _MAX_IDLE + 1)]:
            self._close(key)

    def _close(self, key: object) -> None:
        reader = self._packs.pop(key).reader
        if self.device.type == "cuda":  # streams other than the memory's own may still read it
            torch.cuda.synchronize(self.device)
        if self.closing is not None:
            self.closing(reader)
        reader.close()

    def __len__(self) -> int:
        """Return the number of packs on the device."""
        return len(self._packs)

    # --- requests

    def admit(self, plan: WatchPlan) -> Seat:
        """Return a seat for a request."""
        pack, compiled = self._loaded(plan.registered), plan.compiled
        slot = 0
        if compiled.rules:
            slot = self.rules.admit(compiled, [plan.registered.column(term.lens) for term in compiled.terms])
        pack.seats += 1
        return Seat(pack.reader, slot, pack.reader.view(plan.levels), plan.spec.top_k)

    def release(self, seat: Seat) -> None:
        if seat.slot:
            self.rules.release(seat.slot)
        key = seat.reader.registered.key
        pack = self._packs.get(key)
        if pack is None:  # the monitor was closed
            return
        pack.seats -= 1
        if pack.leaves and not pack.seats:
            self._close(key)

    def gate(self, seat: Seat, number: int) -> int:
        """Return the gate id of a planned column's gate: 0 is always open, n belongs to rule n − 1."""
        return self.rules.gate(seat.slot, number - 1) if number else 0

    # --- the rows of a step

    def look(
        self, reader: Reader, rows: Tensor, top_k: int, slot: Tensor | None, position: Tensor, view: Tensor | None
    ) -> StepReadings:
        """Read rows [n, hidden] and advance their rules.

        Rows of a request are consecutive and ascending. `slot`, `position` and `view` [n] are on the device; `slot`
        None: no request has rules; `view` None: all levels count.
        """
        return self.judge(self.read(reader, rows, top_k, slot, view), slot, position)

    def read(self, reader: Reader, rows: Tensor, top_k: int, slot: Tensor | None, view: Tensor | None) -> Read:
        """Compute the scores of `look`. Changes no state, so it can be repeated."""
        columns = None if slot is None else self.rules.column[slot]
        return reader.read(rows, top_k, columns, view)

    def judge(self, read: Read, slot: Tensor | None, position: Tensor) -> StepReadings:
        """Advance the rules of these rows, their states and gates."""
        if slot is None:
            return StepReadings(*read, None, None)
        assert read.scores is not None
        return StepReadings(*read, *self.rules.advance(read.scores, slot, position))

    def close(self) -> None:
        for key in list(self._packs):
            self._close(key)
