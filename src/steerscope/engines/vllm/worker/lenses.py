"""Watched requests in a worker: lenses read the rows of a step after its forward, and rules switch the gates that the
taps of the next one read. Every rank computes the same; one of them reports to the client.

Taps write watched rows behind the pool's cells, at the number of their token. A step that repeats the last one, a token
later, uses the same tensors again. On a GPU readings go to the client without the host (`readout`). The host waits for
readings that it needs itself: tiers load the lenses that a row leads to, and rows that are computed again must be
steered as they were.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steerscope.core.slot_table import Key
from steerscope.engines.vllm.wire import WireWatch
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.packs import WorkerPacks
from steerscope.engines.vllm.worker.requests import Asker, Looks, Watched
from steerscope.engines.vllm.worker.tap import WATCHED
from steerscope.lenses.monitor import HostStepReadings, Monitor, WatchPlan
from steerscope.lenses.reader import Reader
from steerscope.specs.errors import RequestFailed
from steerscope.specs.watch import Watch

if TYPE_CHECKING:
    from steerscope.engines.vllm.cuda.lens_readout import Readout, Sheet

Group = tuple[tuple[Key, ...], bool, Key | None]  # captured taps, whether before steering, and the one that is watched


def groups_of(keys: tuple[Key, ...] | None, before: bool, watched: Key | None) -> list[Group]:
    """Return the groups that tokens of one request can belong to: captured, watched, both."""
    found: list[Group] = [] if keys is None else [(keys, before, None)]
    if watched is not None:
        found.append(((), False, watched))
    if keys is not None and watched is not None:
        found.append((keys, before, watched))
    return found


def places_of(group: Group, taps: Sequence[Key]) -> list[int]:
    """Return for each tap the place of its row among those captured (−1: not captured), plus `WATCHED` if lenses read
    it."""
    keys, _, watched = group
    place = {key: i for i, key in enumerate(keys)}
    return [place.get(key, -1) + (WATCHED if key == watched else 0) for key in taps]


@functools.lru_cache(maxsize=64)  # many requests have equal watches
def _spec(pack: str, top_k: int, levels: tuple[int, ...] | None) -> Watch:
    return Watch(pack=pack, top_k=top_k, levels=None if levels is None else list(levels))


@dataclass(slots=True)
class Look:
    """Rows that one reader reads together, request after request, on the host's time."""

    reader: Reader
    top_k: int
    parts: list[tuple[Asker, int, int]]  # request, first position, number of rows
    rows: Tensor  # their cells in the pool
    position: Tensor
    slot: Tensor | None
    view: Tensor | None

    @property
    def askers(self) -> list[Asker]:
        return [asker for asker, _, _ in self.parts]


class Watching:
    def __init__(self, device: torch.device, slots: int, cells: Tensor, tokens: int, delivery: Delivery) -> None:
        self.monitor = Monitor(device, slots=slots)
        self.packs = WorkerPacks(self.monitor)
        self.delivery, self._cells, self._first = delivery, cells, len(cells) - tokens
        self.counts = {"readings": 0, "lens_seconds": 0.0}  # seconds of this thread: a device may take longer
        self._last: Looks | None = None  # of the last step, which the next may repeat
        self._readout: Readout | None = None
        self.monitor.closing = self._drop
        if device.type == "cuda":
            from steerscope.engines.vllm.cuda import lens_readout

            self._readout = lens_readout.Readout(self.monitor, cells, self._first, delivery)

    # --- requests

    def admit(self, asker: Asker, watch: WireWatch, alone: int, both: int) -> None:
        """Give a request its seat. `alone` and `both` are the groups of its tokens that are watched, and that are also
        captured."""
        pack = self.packs.installed.get(watch.pack)
        if pack is None:
            raise RequestFailed("its lens pack is not on this worker")
        spec = _spec(watch.pack, watch.top_k, watch.levels)
        seat = self.monitor.admit(WatchPlan(pack, watch.key, watch.positions, watch.compiled, spec))
        gates = [self.monitor.gate(seat, column.gate) for column in asker.wire.columns]
        asker.watched = Watched(seat, gates, alone, both, watch.positions.count(watch.most))

    def release(self, asker: Asker) -> None:
        if asker.watched is not None:
            self.monitor.release(asker.watched.seat)
            asker.watched = None

    # --- the rows of a step

    def read(self, looks: Looks) -> None:
        """Read the watched rows of a step, after its forward and before the next one's taps, on the stream that runs
        them."""
        self._last = looks
        if looks.kept is None:
            looks.kept = self._looks(looks)
        began = time.perf_counter()
        for look in looks.kept:
            try:
                if isinstance(look, Look):
                    self._read(look, looks.moved)
                else:
                    assert self._readout is not None
                    self._readout.read(look)
                    self.counts["readings"] += len(look.lines)
            except Exception as error:  # only requests of this look fail
                for asker in look.askers:
                    self.delivery.fail(asker, f"{type(error).__name__}: {error}")
        self.counts["lens_seconds"] += time.perf_counter() - began

    def _drop(self, reader: Reader) -> None:
        """Release a reader that is about to be closed; the last step may have rows of ended requests for it."""
        if self._last is not None and self._last.kept is not None:
            self._last.kept = [look for look in self._last.kept if look.reader is not reader]
        if self._readout is not None:
            self._readout.drop(reader)

    def _looks(self, looks: Looks) -> "list[Look | Sheet]":
        groups: dict[object, list[tuple[Asker, int, int, int]]] = defaultdict(list)
        for part in looks.parts:
            assert part[0].watched is not None
            groups[part[0].watched.seat.group, self._needs_host(part[0])].append(part)
        return [self._look(parts) if self._needs_host(parts[0][0]) else self._sheet(parts) for parts in groups.values()]

    def _needs_host(self, asker: Asker) -> bool:
        """Return whether the host has to know this request's readings before the next step."""
        assert asker.watched is not None
        assert asker.wire.watch is not None
        switches = any(rule.kind == "steer" for rule in asker.wire.watch.compiled.rules)
        return self._readout is None or asker.watched.seat.reader.tiers is not None or switches

    def _sheet(self, parts: list[tuple[Asker, int, int, int]]) -> "Sheet":
        assert self._readout is not None
        return self._readout.sheet(parts)

    def _look(self, parts: list[tuple[Asker, int, int, int]]) -> Look:
        seats = [asker.watched.seat for asker, *_ in parts if asker.watched is not None]
        counts = torch.tensor([b - a for _, _, a, b in parts])
        device = self.monitor.device

        def per_row(values: list[int]) -> Tensor:
            return torch.tensor(values).repeat_interleave(counts).to(device)

        rows = [self._first + token + i for _, token, a, b in parts for i in range(b - a)]
        return Look(
            reader=seats[0].reader,
            top_k=max(seat.top_k for seat in seats),
            parts=[(asker, a, b - a) for asker, _, a, b in parts],
            rows=torch.tensor(rows).to(device),
            position=torch.tensor([at for _, _, a, b in parts for at in range(a, b)]).to(device),
            slot=per_row([seat.slot for seat in seats]) if any(seat.slot for seat in seats) else None,
            view=per_row([seat.view for seat in seats]) if any(seat.view for seat in seats) else None,
        )

    def _read(self, look: Look, moved: int) -> None:
        rows, position = self._cells.index_select(0, look.rows), look.position + moved
        # The host waits for these few numbers: they must reach the client before the token that comes with them.
        seen = self.monitor.look(look.reader, rows, look.top_k, look.slot, position, look.view).to_host()
        start, changed = 0, seen.on is not None and seen.off is not None and bool((seen.on | seen.off).any())
        for asker, first, count in look.parts:
            if asker.watched is not None and asker.failed is None:
                if changed:
                    _remember(asker.watched, asker.wire.watch, seen, start, first + moved, count)
                self.delivery.tell(asker, seen, start, first + moved, count)
                self.counts["readings"] += count
            start += count


def _remember(
    watched: Watched, watch: WireWatch | None, seen: HostStepReadings, start: int, first: int, count: int
) -> None:
    """Record on which rows gates were switched: rows that are computed again must be steered as they were."""
    assert watch is not None
    if seen.on is None or seen.off is None:
        return
    for r, rule in enumerate(watch.compiled.rules):
        if rule.kind == "steer":
            on, off = seen.on[start : start + count, r], seen.off[start : start + count, r]
            for i in (on | off).nonzero()[0].tolist():
                watched.switch(r + 1, first + i, bool(on[i]))
