"""Monitor: the lenses of all watched requests on an engine's device, and their rules.

An engine takes a seat for every watched request. After each forward it passes the computed rows of a layer, with the
seat and position of each, and gets tensors: the top concepts of every row, and which rules changed. Gates in
`monitor.rules.gates` are switched by then. `Notes.note` adds the results to each request's notes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.core.slot_table import Key
from steerscope.lenses.reader import Reader, Registered, StepReadings
from steerscope.lenses.readings import Notes
from steerscope.lenses.rules import Compiled, Rules
from steerscope.specs.tokens import Positions
from steerscope.specs.watch import Watch


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


@dataclass(slots=True)
class _KeptPack:
    """A pack on the device. One that was dropped while in use (`leaves`) is closed with its last seat."""

    reader: Reader
    leaves: bool = False
    seats: int = 0


def slots_and_views(
    seats: Sequence[Seat], counts: Sequence[int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the rule slot and the view of every row, None where no row has one. Seat i has `counts[i]` rows."""

    def per_row(values: list[int]) -> Tensor | None:
        if not any(values):
            return None
        return torch.tensor(values).repeat_interleave(torch.tensor(counts)).to(device)

    return per_row([seat.slot for seat in seats]), per_row([seat.view for seat in seats])


class Monitor:
    """Readers of all packs, and the rules. Used only by the thread (and stream) that runs the model."""

    def __init__(self, device: str | torch.device = "cpu", slots: int = 64) -> None:
        self.device = torch.device(device)
        self.rules = Rules(self.device, slots)
        self._packs: dict[str, _KeptPack] = {}  # by `Registered.digest`
        self.closing: Callable[[Reader], None] | None = None  # called before a pack leaves the device

    # --- packs

    def keep(self, reader: Reader) -> None:
        """Keep a pack on the device until it is dropped."""
        self._packs.setdefault(reader.registered.digest, _KeptPack(reader)).leaves = False

    def drop(self, registered: Registered) -> None:
        """Drop a pack. Requests that use it keep it until they end."""
        pack = self._packs.get(registered.digest)
        if pack is not None:
            pack.leaves = True
            self._close_unused(registered.digest)

    def _close_unused(self, digest: str) -> None:
        pack = self._packs[digest]
        if pack.leaves and not pack.seats:
            self._close(digest)

    def _close(self, digest: str) -> None:
        reader = self._packs.pop(digest).reader
        if self.device.type == "cuda":  # streams other than the memory's own may still read it
            torch.cuda.synchronize(self.device)
        if self.closing is not None:
            self.closing(reader)

    def __len__(self) -> int:
        """Return the number of packs on the device."""
        return len(self._packs)

    # --- requests

    def admit(self, plan: WatchPlan) -> Seat:
        """Return a seat for a request, whose pack is kept."""
        pack = self._packs[plan.registered.digest]
        compiled = plan.compiled
        slot = 0
        if compiled.rules:
            slot = self.rules.admit(compiled, [plan.registered.column(term.lens) for term in compiled.terms])
        pack.seats += 1
        return Seat(pack.reader, slot, pack.reader.view(plan.levels), plan.spec.top_k)

    def release(self, seat: Seat) -> None:
        if seat.slot:
            self.rules.release(seat.slot)
        digest = seat.reader.registered.digest
        if digest in self._packs:  # else the monitor was closed
            self._packs[digest].seats -= 1
            self._close_unused(digest)

    def gate(self, seat: Seat, number: int) -> int:
        """Return the gate id of a planned column's gate: 0 is always open, n belongs to rule n − 1."""
        return self.rules.gate(seat.slot, number - 1) if number else 0

    # --- the rows of a step

    def look(
        self, reader: Reader, rows: Tensor, top_k: int, slot: Tensor | None, position: Tensor, view: Tensor | None
    ) -> StepReadings[Tensor]:
        """Read rows [n, hidden] and advance their rules.

        Rows of a request are consecutive and ascending. `slot`, `position` and `view` [n] are on the device; `slot`
        None: no request has rules; `view` None: all levels count.
        """
        return self.judge(self.read(reader, rows, top_k, slot, view), slot, position)

    def read(
        self, reader: Reader, rows: Tensor, top_k: int, slot: Tensor | None, view: Tensor | None
    ) -> StepReadings[Tensor]:
        """Compute the scores of `look`. Changes no state, so it can be repeated."""
        columns = None if slot is None else self.rules.column[slot]
        return reader.read(rows, top_k, columns, view)

    def judge(self, read: StepReadings[Tensor], slot: Tensor | None, position: Tensor) -> StepReadings[Tensor]:
        """Advance the rules of these rows, their states and gates."""
        if slot is None:
            return read
        assert read.scores is not None
        on, off = self.rules.advance(read.scores, slot, position)
        return read._replace(on=on, off=off)

    def close(self) -> None:
        for digest in list(self._packs):
            self._close(digest)
