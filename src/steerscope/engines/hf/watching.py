"""The watched rows of one forward: who reads which tokens with which lenses, and what becomes of it. And the packs."""

import threading
from collections import defaultdict
from dataclasses import dataclass

import torch

from steerscope.engines.hf.sequence import Row
from steerscope.engines.hf.taps import Gather
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.reader import Reader, Registered, load_reader
from steerscope.residual.table import Key

Part = tuple[Row, list[int], int]  # a request, its positions in this forward, and where they begin among the rows


@dataclass(slots=True)
class Look:
    """Rows that one reader reads together; requests whose rows they are, one after the other."""

    key: Key
    index: list[int]  # flat token numbers
    parts: list[Part]

    @property
    def gather(self) -> tuple[tuple[Key, ...], bool, list[int]]:
        """What the taps must stage for it."""
        return (self.key,), False, self.index


def looks_of(rows: list[Row], width: int) -> list[Look]:
    """What is to be read in a forward that feeds each row its history from `fed` on, right-aligned in `width`."""
    groups: dict[object, Look] = defaultdict(lambda: Look((0, "resid_post"), [], []))
    for number, row in enumerate(rows):
        if row.seat is None or row.plan.watch is None:
            continue
        start, stop = row.fed, len(row.history)
        offset = number * width + width - stop  # flat number of position 0
        within = row.plan.watch.positions.within(start, stop)
        positions = [position for a, b in within for position in range(a, b)]
        if positions:
            look = groups[row.seat.group]
            look.key = row.plan.watch.key
            look.parts.append((row, positions, len(look.index)))
            look.index += [offset + position for position in positions]
    return list(groups.values())


def read(monitor: Monitor, look: Look, gather: Gather) -> int:
    """Lenses, rules and gates; then every request notes its own. Returns how many rows were read."""
    device, seats = monitor.device, [row.seat for row, _, _ in look.parts if row.seat is not None]
    counts = torch.tensor([len(positions) for _, positions, _ in look.parts])

    def per_row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values).repeat_interleave(counts).to(device)

    position = torch.tensor([position for _, positions, _ in look.parts for position in positions]).to(device)
    slot = per_row([seat.slot for seat in seats]) if any(seat.slot for seat in seats) else None
    view = per_row([seat.view for seat in seats]) if any(seat.view for seat in seats) else None
    most = max(seat.top_k for seat in seats)
    seen = monitor.look(seats[0].reader, gather.stage[:, 0], most, slot, position, view).to_host()
    for row, positions, start in look.parts:
        assert row.notes is not None
        seen.note(row.notes, start, positions)
    return len(position)


class MonitorStore:
    """The packs of a monitor in this process."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def load(self, registered: Registered, stopped: threading.Event) -> Reader:
        del stopped  # nothing of it can be stopped half-way
        return load_reader(registered, self._monitor.device)

    def install(self, registered: Registered, loaded: Reader) -> None:
        del registered
        self._monitor.keep(loaded)

    def discard(self, registered: Registered, loaded: Reader) -> None:
        del registered
        loaded.close()

    def remove(self, registered: Registered) -> None:
        self._monitor.drop(registered)
