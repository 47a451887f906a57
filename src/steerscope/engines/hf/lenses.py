"""The watched rows of one forward: who reads which tokens with which lenses, and what becomes of it. And the packs."""

import threading
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.core.slot_table import Key
from steerscope.engines.hf.sequence import Row, TokenSpan
from steerscope.engines.hf.taps import Gather
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.reader import Read, Reader, Registered, load_reader
from steerscope.specs.errors import RequestFailed

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


def looks_of(slices: list[TokenSpan], width: int) -> list[Look]:
    """What is to be read in a forward that feeds these slices, right-aligned in `width`."""
    groups: dict[object, Look] = defaultdict(lambda: Look((0, "resid_post"), [], []))
    for number, one in enumerate(slices):
        row = one.row
        if row.seat is None or row.plan.watch is None:
            continue
        offset = number * width + width - one.stop  # flat number of position 0
        within = row.plan.watch.positions.within(one.start, one.stop)
        positions = [position for a, b in within for position in range(a, b)]
        if positions:
            look = groups[row.seat.group]
            look.key = row.plan.watch.key
            look.parts.append((row, positions, len(look.index)))
            look.index += [offset + position for position in positions]
    return list(groups.values())


def read(monitor: Monitor, look: Look, gather: Gather) -> int:
    """Lenses, rules and gates; then every request notes its own. Returns how many rows were read. A request whose rows
    cannot be read is marked with the reason; the others have their readings."""
    return _read(monitor, look.parts, gather.stage[:, 0])


def _read(monitor: Monitor, parts: list[Part], rows: Tensor) -> int:
    try:
        found, slot, position = _scores(monitor, parts, rows)
    except Exception as error:
        if len(parts) == 1:
            return _blame(parts, error)
        alone = [([(row, at, 0)], rows[start : start + len(at)]) for row, at, start in parts]
        return sum(_read(monitor, part, own) for part, own in alone)
    try:
        seen = monitor.judge(found, slot, position).to_host()
    except Exception as error:  # the states of their rules may have moved on: this cannot be tried again
        return _blame(parts, error)
    count = 0
    for row, positions, start in parts:
        try:
            assert row.notes is not None
            seen.note(row.notes, start, positions)
            count += len(positions)
        except Exception as error:
            _blame([(row, positions, start)], error)
    return count


def _scores(monitor: Monitor, parts: list[Part], rows: Tensor) -> tuple[Read, Tensor | None, Tensor]:
    """What the lenses say, and the rule slot and the position of each row."""
    device, seats = monitor.device, [row.seat for row, _, _ in parts if row.seat is not None]
    counts = torch.tensor([len(positions) for _, positions, _ in parts])

    def per_row(values: list[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(counts).to(device)

    position = torch.tensor([position for _, positions, _ in parts for position in positions]).to(device)
    slot = per_row([seat.slot for seat in seats]) if any(seat.slot for seat in seats) else None
    view = per_row([seat.view for seat in seats]) if any(seat.view for seat in seats) else None
    most = max(seat.top_k for seat in seats)
    return monitor.read(seats[0].reader, rows, most, slot, view), slot, position


def _blame(parts: list[Part], error: Exception) -> int:
    """Mark these requests. Returns how many of their rows were read: none."""
    for row, _, _ in parts:
        row.fault = RequestFailed(f"{row.name} failed: its rows could not be read by the lenses: {error}")
    return 0


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
