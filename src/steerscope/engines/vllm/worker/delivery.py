"""Publish captured rows, readings, results and failures of a worker's requests in the shared memory of their clients.

A region of shared memory belongs to one request. Its counters name the owner; nothing is written where they name
another request, and nothing after this worker has left the region.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from steerscope.capture.transport import ALIGN, HEADER, LEFT, MET, OWNER, READ, ROWS, Arena
from steerscope.engines.vllm.wire import Wire
from steerscope.engines.vllm.worker.device import Reductions, RowPool
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest
from steerscope.lenses.reader import HostStepReadings

log = logging.getLogger("steerscope")


class Delivery:
    def __init__(self, pool: RowPool, reductions: Reductions, stage: int, writes: bool) -> None:
        """`stage` is the pipeline stage; `writes` says whether this rank writes to shared memory."""
        self.pool = pool
        self.reductions = reductions
        self._hidden = pool.cells.shape[1]
        self._row_bytes = self._hidden * pool.cells.itemsize
        self.stage = stage
        self.writes = writes
        self.arena: Arena | None = None  # of the client that attached one
        self.arenas: dict[str, Arena] = {}  # named by requests
        self.reducing: dict[str, tuple[TrackedRequest, Any]] = {}  # with their partial results
        self.counts = {"rows": 0, "row_bytes": 0}
        self.when_read: Callable[[], torch.cuda.Event] | None = None  # on a GPU: event after all readings so far
        self._finishing: set[str] = set()  # requests whose regions the client keeps until `complete`

    # --- regions

    def attach_arena(self, path: str, size: int) -> None:
        self.arena = Arena(Path(path), size, create=False)
        self.pool.pin(self.arena)

    def detach_arena(self) -> None:
        if self.arena is not None:
            self.pool.unpin(self.arena)
            self.arena = None

    def find_region(self, request: TrackedRequest) -> None:
        """Find the request's region and mark it as met.

        The mark is written before the owner is checked again; a client that withdraws a request does the two in the
        other order, so that one side sees the other. A withdrawn request that runs is still steered, since its keys are
        cached as steered ones, and captures nothing."""
        request.arena = self._arena_of(request.wire)
        if request.arena is not None and self._owned(request):
            self._set(request, MET + self.stage, 1)
            if self._owned(request):
                return
        request.arena = None
        request.left = True
        request.wire = msgspec.structs.replace(request.wire, capture=None, watch=None)

    def reserve_rows(self, request: TrackedRequest) -> None:
        """Find the place of a capture's rows of this stage, behind those of earlier stages; start its reduction."""
        capture = request.capture
        request.max_rows = capture.positions.count(capture.most)
        before = 0 if capture.reduce else request.max_rows * request.taps_before
        request.offset = request.wire.offset + HEADER + before * self._row_bytes
        if capture.reduce is None or not self.writes:
            return
        self._release_abandoned()
        self.reducing[request.wire.name] = request, self.reductions.start(capture, request.width)

    def _arena_of(self, wire: Wire) -> Arena | None:
        if wire.arena is None:
            return self.arena
        path, size = wire.arena
        if path not in self.arenas:
            self.arenas[path] = Arena(Path(path), size, create=False)
            self.pool.pin(self.arenas[path])
        return self.arenas[path]

    def _owned(self, request: TrackedRequest) -> bool:
        return self._counter(request, OWNER) == request.wire.owner

    def _counter(self, request: TrackedRequest, counter: int) -> int:
        assert request.arena is not None
        return request.arena.ints[_word(request.wire.offset, counter)]

    def _set(self, request: TrackedRequest, counter: int, value: int) -> None:
        """Publish a counter, unless the region was left."""
        if self._reachable(request):
            assert request.arena is not None
            request.left = counter == LEFT + self.stage
            request.arena.ints[_word(request.wire.offset, counter)] = value

    def _reachable(self, request: TrackedRequest) -> bool:
        """Return whether this rank may write to the request's region."""
        return self.writes and request.arena is not None and not request.left

    # --- rows

    def flush(self, slices: list[RowSlice]) -> None:
        """Queue rows to be copied to their clients, or pass them to their reductions."""
        reduced: list[tuple[Any, RowSlice]] = []
        for part in slices:
            capture = part.request.capture
            entry = self.reducing.get(part.request.wire.name)
            result_written = capture.reduce and entry is None
            if part.request.failed is not None or part.start == part.stop or result_written:
                self.drop(part)
            elif entry is not None:
                reduced.append((entry[1], part))
            else:
                try:
                    self._copy(part)
                except Exception as error:  # only this request's rows are void
                    self.drop(part)
                    self.fail(part.request, f"{type(error).__name__}: {error}")
        if reduced:
            self._reduce(reduced)

    def drop(self, *slices: RowSlice) -> None:
        """Free the cells of slices without copying them."""
        for part in slices:
            self.pool.give(*part.freed)

    def _copy(self, part: RowSlice) -> None:
        request = part.request
        count = part.stop - part.start
        if not self._reachable(request):
            self.drop(part)
            return
        n_cells = count * request.width
        offset = request.offset + request.capture.positions.count(part.start) * request.width * self._row_bytes
        publish = functools.partial(self._set, request, ROWS + self.stage, part.n_rows)
        self.counts["rows"] += count
        self.counts["row_bytes"] += n_cells * self._row_bytes
        self.pool.copy_rows(part, n_cells, offset, publish)

    # --- failures and the end of requests

    def fail(self, request: TrackedRequest, reason: str) -> None:
        request.failed = reason
        reachable = request.arena is not None and (not request.left or request.wire.name in self._finishing)
        if reachable and self._owned(request):
            assert request.arena is not None
            request.arena.fail(request.wire.offset, reason)
        else:
            log.error("%s: %s", request.wire.name, reason)

    def leave(self, request: TrackedRequest) -> None:
        """Leave the request's region to its client once everything under way has arrived."""
        if not self.writes:
            request.left = True
            return
        event = self.when_read() if self.when_read is not None and request.wire.watch else None
        self.pool.after_copies(request, functools.partial(self._set, request, LEFT + self.stage, 1), event)

    def _release_abandoned(self) -> None:
        """Release the reductions of requests that have ended and whose clients took their regions back."""
        for name, (request, partial) in list(self.reducing.items()):
            if request.left and not self._owned(request):
                del self.reducing[name]
                self.reductions.release(partial)

    def hold_regions(self, names: set[str]) -> None:
        """Note that the client keeps the regions of these requests until `complete`."""
        self._finishing = names

    def complete(self, ended: list, requests: Sequence[TrackedRequest] = ()) -> None:
        """Copy the rows, write the reductions and leave the regions of ended requests: [name, rows, offset, …] each.
        `requests` are those of them that are still tracked."""
        self.pool.wait_for_copies(self._finishing)
        counted: list[tuple[TrackedRequest, int]] = []
        for name, rows, *_ in ended:
            entry = self.reducing.pop(name, None)
            if entry is not None and rows and (count := self._write_result(*entry, rows)) is not None:
                counted.append((entry[0], count))
        self.reductions.flush()
        for request, count in counted:
            assert request.arena is not None
            request.arena.ints[_word(request.wire.offset, ROWS + self.stage)] = count
        if self.writes and self.arena is not None:
            for _, _, offset, *_ in ended:  # also of requests that never ran here
                self.arena.ints[_word(offset, LEFT + self.stage)] = 1
        for request in requests:
            request.left = True
        self._finishing = set()

    # --- reductions

    def _reduce(self, parts: list[tuple[Any, RowSlice]]) -> None:
        try:
            self.reductions.push(parts)
        except Exception as error:
            for _, part in parts:
                self.fail(part.request, f"{type(error).__name__}: {error}")
        for _, part in parts:
            self.pool.give(*part.freed)

    def _writes_result(self, request: TrackedRequest) -> bool:
        return request.failed is None and request.arena is not None and self.writes

    def _result_place(self, request: TrackedRequest) -> tuple[Arena, int]:
        assert request.arena is not None
        return request.arena, request.wire.offset + HEADER + request.taps_before * self._hidden * 4

    def _write_result(self, request: TrackedRequest, partial: Any, rows: int) -> int | None:
        """Queue a result to be written by the next `flush` of the reductions; return its number of rows."""
        if not self._writes_result(request):
            return None
        try:
            counted = request.capture.positions.count(rows)
            return self.reductions.finish(partial, rows, counted, *self._result_place(request))
        except Exception as error:
            self.fail(request, f"{type(error).__name__}: {error}")
            return None

    # --- readings

    def publish_readings(
        self, request: TrackedRequest, readings: HostStepReadings, start: int, first: int, count: int
    ) -> None:
        """Publish `count` readings of a request from position `first` on; they begin at row `start` of the step's.
        Readings of recomputed rows are there already, and rows beyond the longest text have none."""
        watched = request.watched
        assert watched is not None
        watch = watched.asked
        number = watched.number_of(first)
        skip = max(0, watched.published - number)
        stop = min(number + count, watched.max_readings)
        if number + skip >= stop:
            return
        rows = slice(start + skip, start + stop - number)
        watched.published = stop
        watched.until = first + count
        if not self._reachable(request):
            return
        assert request.arena is not None
        size = 4 * watch.words
        at = request.wire.offset + HEADER + watch.place + (number + skip) * size
        out = request.arena.bytes[at : at + (stop - number - skip) * size].view(np.int32).reshape(-1, watch.words)
        k = watch.kept
        found = min(watch.kept, readings.values.shape[1])
        if found < k:
            out[:, found:k], out[:, k + found : 2 * k] = 0, -1
        out[:, :found].view(np.float32)[:] = readings.values[rows, :found]
        out[:, k : k + found] = readings.indices[rows, :found]
        if watch.compiled.rules:
            _write_rules(out[:, 2 * k :], readings, rows, len(watch.compiled.terms))
        self._set(request, READ, stop)


def _write_rules(out: np.ndarray, readings: HostStepReadings, rows: slice, n_terms: int) -> None:
    """Write which rules went on and off (a bit each) and the scores of their terms."""
    assert readings.on is not None
    assert readings.off is not None
    assert readings.scores is not None
    bits = 1 << np.arange(readings.on.shape[1])
    out[:, 0], out[:, 1] = readings.on[rows] @ bits, readings.off[rows] @ bits
    out[:, 2:].view(np.float32)[:] = readings.scores[rows, :n_terms]


def _word(offset: int, counter: int) -> int:
    """Return the place of a region's counter among the integers of its arena."""
    return (offset + ALIGN * counter) // 8
