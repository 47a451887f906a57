"""Lenses in a worker: they read the watched rows of a step after its forward, and rules switch the gates that the taps
of the next one read. Every rank computes the same; one of them reports to the client.

Taps store watched rows behind the pool's cells, at the number of their token. A step that repeats the last one, a token
later, uses the same tensors again. On a GPU readings go to the client without the host (`cuda.lens_readout`). The host
waits only for readings that it needs itself: tiers load the lenses that a row leads to, and recomputed rows must be
steered as they were.
"""

import functools
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steerscope.engines.packs import not_loaded
from steerscope.engines.vllm.wire import WireWatch
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.requests import TrackedRequest, WatchedRows, WatchState
from steerscope.lenses.monitor import Monitor, WatchPlan, slots_and_views
from steerscope.lenses.pack import Pack
from steerscope.lenses.reader import HostStepReadings, PackOptions, Reader, Registered, load_reader
from steerscope.specs.errors import BadFile, InvalidRequest, RequestFailed, SteerscopeError
from steerscope.specs.watch import Watch

if TYPE_CHECKING:
    from steerscope.engines.vllm.cuda.lens_readout import DeviceRead, LensReadout

_JOIN_S = 60.0  # for the threads that load packs
RowsOfRequest = tuple[TrackedRequest, int, int, int]  # request, first token in the batch, positions [start, stop)


@dataclass(slots=True)
class HostRead:
    """Rows that one reader reads while the host waits."""

    reader: Reader
    top_k: int
    parts: list[tuple[TrackedRequest, int, int]]  # request, first position, number of rows
    rows: Tensor  # cells in the pool
    position: Tensor
    slot: Tensor | None
    view: Tensor | None

    @property
    def requests(self) -> list[TrackedRequest]:
        return [request for request, _, _ in self.parts]


class WorkerLenses:
    def __init__(self, device: torch.device, slots: int, cells: Tensor, tokens: int, delivery: Delivery) -> None:
        self.monitor = Monitor(device, slots=slots)
        self.packs = WorkerPacks(self.monitor)
        self.delivery = delivery
        self._cells = cells
        self._first = len(cells) - tokens
        self.counts = {"readings": 0, "lens_seconds": 0.0}  # host seconds: the device may take longer
        self._last: WatchedRows | None = None  # of the last step, which the next may repeat
        self._readout: LensReadout | None = None
        self.monitor.closing = self._drop
        if device.type == "cuda":
            from steerscope.engines.vllm.cuda import lens_readout

            self._readout = lens_readout.LensReadout(self.monitor, cells, self._first, delivery)

    # --- requests

    def admit(self, request: TrackedRequest, watch: WireWatch, read_group: int, both_group: int) -> None:
        """Give a request its seat. Watched tokens have `read_group`, or `both_group` where they are also captured."""
        pack = self.packs.installed.get(watch.pack)
        if pack is None:
            raise RequestFailed("its lens pack is not on this worker")
        spec = Watch(pack=watch.pack, top_k=watch.top_k, levels=None if watch.levels is None else list(watch.levels))
        seat = self.monitor.admit(WatchPlan(pack, watch.key, watch.positions, watch.compiled, spec))
        gates = [self.monitor.gate(seat, column.gate) for column in request.wire.columns]
        request.watched = WatchState(watch, seat, gates, read_group, both_group, watch.positions.count(watch.most))

    def release(self, request: TrackedRequest) -> None:
        if request.watched is not None:
            self.monitor.release(request.watched.seat)
            request.watched = None

    # --- the rows of a step

    def read(self, watched_rows: WatchedRows) -> None:
        """Read the watched rows of a step after its forward and before the next one's taps, on the stream that runs
        them."""
        self._last = watched_rows
        if watched_rows.reads is None:
            watched_rows.reads = self._reads_of(watched_rows)
        began = time.perf_counter()
        for read in watched_rows.reads:
            try:
                if isinstance(read, HostRead):
                    self._read_on_host(read, watched_rows.offset)
                else:
                    assert self._readout is not None
                    self._readout.read(read)
                    self.counts["readings"] += len(read.lines)
            except Exception as error:  # only requests of this read fail
                for request in read.requests:
                    self.delivery.fail(request, f"{type(error).__name__}: {error}")
        self.counts["lens_seconds"] += time.perf_counter() - began

    def _drop(self, reader: Reader) -> None:
        """Release a reader that is about to be closed; the last step may have rows of ended requests for it."""
        if self._last is not None and self._last.reads is not None:
            self._last.reads = [read for read in self._last.reads if read.reader is not reader]
        if self._readout is not None:
            self._readout.drop(reader)

    def _reads_of(self, watched_rows: WatchedRows) -> "list[HostRead | DeviceRead]":
        groups: dict[tuple[object, bool], list[RowsOfRequest]] = defaultdict(list)
        for part in watched_rows.parts:
            assert part[0].watched is not None
            groups[part[0].watched.seat.group, self._needs_host(part[0])].append(part)
        reads: list[HostRead | DeviceRead] = []
        for (_, on_host), parts in groups.items():
            if on_host or self._readout is None:
                reads.append(self._host_read(parts))
            else:
                reads.append(self._readout.prepare(parts))
        return reads

    def _needs_host(self, request: TrackedRequest) -> bool:
        """Return whether the host has to know this request's readings before the next step."""
        assert request.watched is not None
        switches = any(rule.kind == "steer" for rule in request.watched.asked.compiled.rules)
        return self._readout is None or request.watched.seat.reader.tiers is not None or switches

    def _host_read(self, parts: list[RowsOfRequest]) -> HostRead:
        seats = [request.watched.seat for request, *_ in parts if request.watched is not None]
        device = self.monitor.device
        slot, view = slots_and_views(seats, [b - a for _, _, a, b in parts], device)
        rows = [self._first + token + i for _, token, a, b in parts for i in range(b - a)]
        return HostRead(
            reader=seats[0].reader,
            top_k=max(seat.top_k for seat in seats),
            parts=[(request, a, b - a) for request, _, a, b in parts],
            rows=torch.tensor(rows).to(device),
            position=torch.tensor([at for _, _, a, b in parts for at in range(a, b)]).to(device),
            slot=slot,
            view=view,
        )

    def _read_on_host(self, read: HostRead, offset: int) -> None:
        rows = self._cells.index_select(0, read.rows)
        position = read.position + offset
        # The host waits for these few numbers: they must reach the client before the token that comes with them.
        readings = self.monitor.look(read.reader, rows, read.top_k, read.slot, position, read.view).to_host()
        switched = readings.on is not None and readings.off is not None and bool((readings.on | readings.off).any())
        start = 0
        for request, first, count in read.parts:
            if request.watched is not None and request.failed is None:
                if switched:
                    _record_gates(request.watched, readings, start, first + offset, count)
                self.delivery.publish_readings(request, readings, start, first + offset, count)
                self.counts["readings"] += count
            start += count


def _record_gates(watched: WatchState, readings: HostStepReadings, start: int, first: int, count: int) -> None:
    """Record on which rows gates were switched: recomputed rows must be steered as they were."""
    assert readings.on is not None
    assert readings.off is not None
    for r, rule in enumerate(watched.asked.compiled.rules):
        if rule.kind == "steer":
            on = readings.on[start : start + count, r]
            off = readings.off[start : start + count, r]
            for i in (on | off).nonzero()[0].tolist():
                watched.switch(r + 1, first + i, bool(on[i]))


class WorkerPacks:
    """Lens packs: read and prepared in threads beside the steps, then installed under `Registered.digest`."""

    def __init__(self, monitor: Monitor) -> None:
        self.installed: dict[str, Registered] = {}
        self._monitor = monitor
        self._loads: dict[int, Future[Reader]] = {}
        self._threads: list[threading.Thread] = []

    # --- RPCs: none waits for a load

    def load_pack(self, load_id: int, folder: str, digest: str, options: dict[str, Any]) -> None:
        """Start to load the pack of this digest (of the pack alone) from a folder."""
        load: Future[Reader] = Future()
        work = functools.partial(_load, load, folder, digest, options, self._monitor.device)
        thread = threading.Thread(target=work, name="steerscope-pack", daemon=True)
        self._loads[load_id] = load
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def load_state(self, load_id: int) -> dict[str, Any]:
        """Return whether a load is ready, and what its pack's options or its files are refused for."""
        load = self._loads[load_id]
        problems = list[list[str]]()
        reason = ""
        error = load.exception() if load.done() else None
        if isinstance(error, InvalidRequest):
            problems = [[problem.field, problem.what, problem.remedy] for problem in error.problems]
        elif error is not None:
            reason = str(error)
        return {"ready": load.done() and error is None, "problems": problems, "error": reason}

    def drop_load(self, load_id: int) -> None:
        """Give up a load. If it still runs, what it makes is freed when it ends."""
        self._loads.pop(load_id, None)

    def keep_pack(self, load_id: int, digest: str) -> None:
        """Install what a load that is ready has made."""
        reader = self._loads.pop(load_id).result(timeout=0)
        self._monitor.keep(reader)
        self.installed[digest] = reader.registered

    def drop_pack(self, digest: str) -> None:
        if (registered := self.installed.pop(digest, None)) is not None:
            self._monitor.drop(registered)

    def close(self) -> None:
        """End all threads: one inside torch when the interpreter ends would abort it."""
        self.installed.clear()
        self._monitor.close()
        self._loads.clear()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _load(load: Future[Reader], folder: str, digest: str, options: dict[str, Any], device: torch.device) -> None:
    """The load's thread."""
    name = "in " + folder  # until the pack's own is known
    try:
        pack = Pack.load(folder, verify=False)
        name = pack.info.name
        if pack.digest != digest:
            raise BadFile(f"{folder} was changed while its pack was being registered: register it again")
        kept = PackOptions(**{**options, "pinned": tuple(options["pinned"])})
        reader = load_reader(Registered(pack, kept), device)
        if reader.tiers is None:  # tiers read more of the file later
            pack.release_tensors()
        load.set_result(reader)
    except SteerscopeError as error:
        load.set_exception(error)
    except BaseException as error:
        load.set_exception(not_loaded(name, error))
