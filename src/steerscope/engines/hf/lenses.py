"""Reading the watched rows of one forward with lenses, and the packs of these."""

import threading

import torch
from torch import Tensor

from steerscope.engines.hf.forward_index import Gather, RowPart
from steerscope.lenses.monitor import Monitor, slots_and_views
from steerscope.lenses.reader import Reader, Registered, StepReadings, load_reader
from steerscope.specs.errors import RequestFailed


def read(monitor: Monitor, watched: Gather) -> None:
    """Run lenses, rules and gates, and note the readings of every request. A request whose rows cannot be read is
    marked with the reason; the others have their readings."""
    _read(monitor, watched.parts, watched.stage[:, 0])


def _read(monitor: Monitor, parts: list[RowPart], rows: Tensor) -> None:
    try:
        found, slot, position = _scores(monitor, parts, rows)
    except Exception as error:
        if len(parts) == 1:
            _blame(parts, error)
            return
        for p in parts:
            _read(monitor, [RowPart(p.row, p.positions, 0)], rows[p.start : p.stop])
        return
    try:
        seen = monitor.judge(found, slot, position).to_host()
    except Exception as error:  # the states of their rules may have moved on: this cannot be tried again
        _blame(parts, error)
        return
    for part in parts:
        try:
            assert part.row.notes is not None
            part.row.notes.note(seen, part.start, part.positions)
        except Exception as error:
            _blame([part], error)


def _scores(monitor: Monitor, parts: list[RowPart], rows: Tensor) -> tuple[StepReadings[Tensor], Tensor | None, Tensor]:
    """Return the scores, and the rule slot and the position of each row."""
    device = monitor.device
    seats = [part.row.seat for part in parts if part.row.seat is not None]
    position = torch.tensor([position for part in parts for position in part.positions]).to(device)
    slot, view = slots_and_views(seats, [len(part.positions) for part in parts], device)
    most = max(seat.top_k for seat in seats)
    return monitor.read(seats[0].reader, rows, most, slot, view), slot, position


def _blame(parts: list[RowPart], error: Exception) -> None:
    for part in parts:
        part.row.fault = RequestFailed(f"{part.row.name} failed: its rows could not be read by the lenses: {error}")


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
        del registered, loaded  # its memory is freed with it

    def remove(self, registered: Registered) -> None:
        self._monitor.drop(registered)
