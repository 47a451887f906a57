"""Monitor: the lenses of all watched requests on an engine's device, and their rules.

An engine gives every watched request a seat, and after each forward the rows of a layer that were computed, with the
request and position each belongs to. It gets tensors back: the top concepts of every row, and which rules changed.
Gates are switched by then, in `monitor.rules.gates`. What the tensors mean to each request is noted on the host.
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
from steerscope.lenses.rules import Rules, Sizes
from steerscope.specs.tokens import Positions
from steerscope.specs.watch import Watch

_IDLE = 2  # packs nobody registered that stay on the device when nobody uses them


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)  # the same one serves all that ask alike
class WatchPlan:
    """A watch that was found good for one request: where it reads, which rows, and its rules as numbers."""

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
    """A watched request's place: its reader, its slot among the rules (0: it has none) and its view."""

    reader: Reader
    slot: int
    view: int
    top_k: int

    @property
    def group(self) -> tuple[int, int]:
        """Rows of seats of one group can be read together. What tiers find depends on how many are looked for."""
        return id(self.reader), self.top_k if self.reader.tiers is not None else 0


class StepReadings(NamedTuple):
    """What was found in n rows: see `Read`, and which rules went on and off [n, rules] (None: nobody has any)."""

    values: Tensor
    indices: Tensor
    scores: Tensor | None
    on: Tensor | None
    off: Tensor | None

    def to_host(self) -> "HostStepReadings":
        return HostStepReadings(*(None if part is None else part.cpu().numpy() for part in self))  # type: ignore[arg-type]


class HostStepReadings(NamedTuple):
    values: np.ndarray
    indices: np.ndarray
    scores: np.ndarray | None
    on: np.ndarray | None
    off: np.ndarray | None

    def note(self, notes: Notes, start: int, positions: Sequence[int] | np.ndarray) -> None:
        """Rows from `start` on are these positions of one request."""
        stop = start + len(positions)
        notes.add(positions, self.values[start:stop], self.indices[start:stop])
        if self.on is None or self.off is None or self.scores is None:
            return
        changed = np.flatnonzero((self.on[start:stop] | self.off[start:stop]).any(axis=1))
        for i in changed.tolist():
            at = start + i
            on, off = np.flatnonzero(self.on[at]).tolist(), np.flatnonzero(self.off[at]).tolist()
            notes.fire(int(positions[i]), on, off, self.scores[at])


class Monitor:
    """Belongs to the thread, or on a GPU the stream, that runs the model."""

    def __init__(self, device: str | torch.device = "cpu", slots: int = 64) -> None:
        self.device = torch.device(device)
        self.rules = Rules(self.device, Sizes(slots=slots))
        self._readers: OrderedDict[object, Reader] = OrderedDict()
        self._kept: set[object] = set()  # packs that stay until they are dropped
        self._dropped: set[object] = set()  # since then, while requests are being watched
        self._seats: dict[object, int] = {}
        self.closing: Callable[[Reader], None] | None = None  # told before a pack leaves the device

    # --- packs

    def keep(self, reader: Reader) -> None:
        """Take over a pack, which stays until it is dropped."""
        key = reader.registered.key
        if key in self._readers:
            reader.close()
        else:
            self._readers[key] = reader
        self._kept.add(key)
        self._dropped.discard(key)

    def drop(self, registered: Registered) -> None:
        """Requests that are being watched keep it until they end."""
        self._kept.discard(registered.key)
        if self._seats.get(registered.key):
            self._dropped.add(registered.key)
        elif registered.key in self._readers:
            self._close(registered.key)

    def _reader(self, registered: Registered) -> Reader:
        reader = self._readers.get(registered.key)
        if reader is None:
            self._make_room()
            reader = self._readers[registered.key] = Reader(registered, self.device)
        self._readers.move_to_end(registered.key)
        return reader

    def _make_room(self) -> None:
        idle = [key for key in self._readers if key not in self._kept and not self._seats.get(key)]
        for key in idle[: max(0, len(idle) - _IDLE + 1)]:
            self._close(key)

    def _close(self, key: object) -> None:
        reader = self._readers.pop(key)
        self._dropped.discard(key)
        if self.device.type == "cuda":  # its memory may belong to another stream than those that read it
            torch.cuda.synchronize(self.device)
        if self.closing is not None:
            self.closing(reader)
        reader.close()

    def __len__(self) -> int:
        """How many packs are on the device."""
        return len(self._readers)

    # --- requests

    def admit(self, plan: WatchPlan) -> Seat:
        reader, compiled = self._reader(plan.registered), plan.compiled
        slot = 0
        if compiled.rules:
            slot = self.rules.admit(compiled, [plan.registered.column(term.lens) for term in compiled.terms])
        self._seats[plan.registered.key] = self._seats.get(plan.registered.key, 0) + 1
        return Seat(reader, slot, reader.view(plan.levels), plan.spec.top_k)

    def release(self, seat: Seat) -> None:
        if seat.slot:
            self.rules.release(seat.slot)
        key = seat.reader.registered.key
        self._seats[key] -= 1
        if not self._seats[key] and key in self._dropped:
            self._close(key)

    def gate(self, seat: Seat, number: int) -> int:
        """The gate id of a planned column's gate: 0 is always open, n belongs to rule n − 1."""
        return self.rules.gate(seat.slot, number - 1) if number else 0

    # --- the rows of a step

    def look(
        self, reader: Reader, rows: Tensor, top_k: int, slot: Tensor | None, position: Tensor, view: Tensor | None
    ) -> StepReadings:
        """Rows [n, hidden], those of a request together and ascending; per row the request's slot, the position and
        the view, all on the device. `slot` None: no request has rules; `view` None: all want all levels."""
        return self.judge(self.read(reader, rows, top_k, slot, view), slot, position)

    def read(self, reader: Reader, rows: Tensor, top_k: int, slot: Tensor | None, view: Tensor | None) -> Read:
        """The first half of `look`: scores, which change nothing and may be worked out again."""
        columns = None if slot is None else self.rules.column[slot]
        return reader.read(rows, top_k, columns, view)

    def judge(self, read: Read, slot: Tensor | None, position: Tensor) -> StepReadings:
        """The second half: the rules of these rows, whose states and gates move on."""
        if slot is None:
            return StepReadings(*read, None, None)
        assert read.scores is not None
        return StepReadings(*read, *self.rules.advance(read.scores, slot, position))

    def close(self) -> None:
        for key in list(self._readers):
            self._close(key)
