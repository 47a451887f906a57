"""Copies of rows from the pool to the clients' memory, on a side stream, paced.

Copying all rows of a large prompt at once would keep the engine's own small copies (sampled tokens) waiting behind
gigabytes, step after step. So beside each step a batch is copied that takes less time than the step (`Pace`), and the
backlog stays in the pool.
"""

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from steerscope.engines.vllm.worker.device import RowPool
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest

_MAX_COPY_BYTES = 64 << 20  # of one batch that is not paced
_MIN_COPY_BYTES = 1 << 20  # a smaller rest is added to the copy before it
_MAX_BATCHES = 2  # under way: the host prepares a step while the one before it runs
_FIRST_BYTES = 64 << 20  # while nothing was measured
_MIN_TIMED_BYTES = 1 << 20  # smaller copies measure latency, not the rate of the bus
_SHARE = 0.7  # of a step; the rest is for the step's own copies
_TO_HOST = 2  # cudaMemcpyDeviceToHost


class Pace:
    """Decides how many bytes of rows are copied beside a step: what the bus carries in a part of the step's time.

    The small copies of a step (sampled tokens) wait behind copies of rows. With too many rows the step lasts as long as
    their copy, and the rows seem to fit beside it; so the device times steps and rows separately, and steps by their
    number of tokens: a step with prompts takes as long as fifty others.
    """

    def __init__(self) -> None:
        self.rate = 0.0  # bytes per millisecond, of the last rows that arrived
        self._steps: dict[int, tuple[float, float]] = {}  # milliseconds of the last two steps of a size
        self._excess = 0  # bytes copied beyond what was allowed

    def step_took(self, tokens: int, ms: float) -> None:
        size = tokens.bit_length()
        self._steps[size] = self._steps.get(size, (ms, ms))[1], ms

    def rows_took(self, n_bytes: int, ms: float) -> None:
        if ms > 0 and n_bytes >= _MIN_TIMED_BYTES:
            self.rate = n_bytes / ms

    def beside(self, tokens: int) -> int:
        """Return the bytes to copy beside a step with this number of tokens."""
        known = self._steps.get(tokens.bit_length())
        if known is None or not self.rate:
            return _FIRST_BYTES - self._excess
        fits = int(_SHARE * min(known) * self.rate)  # one of the two steps may have waited for requests
        return max(_MIN_TIMED_BYTES, fits) - self._excess  # never zero, or longer steps would go unnoticed

    def copied(self, n_bytes: int, allowed: int) -> None:
        """Charge bytes above the allowance to the next step: copies are not cut to size."""
        self._excess = max(0, n_bytes - allowed)


@dataclass(slots=True)
class RowCopy:
    """Bytes to be copied to an arena. When they have arrived, cells are freed and `call` is called. Without bytes it
    only marks a place in the queue."""

    request: TrackedRequest
    call: Callable[[], None]
    freed: tuple[int, int] = (0, 0)
    source: int = 0
    target: int = 0
    left: int = 0  # bytes that were not launched yet; they begin at source and target
    done: torch.cuda.Event | None = None  # after the last of them


class CopyBatch(NamedTuple):
    """Copies launched beside one step, between two events; and the begin and the end of the step before, with its
    number of tokens if rows were copied beside it too."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    bytes: int
    before: tuple[torch.cuda.Event, int] | None
    mark: torch.cuda.Event


CopyBytes = Callable[[int, int, int, int], None]  # target, source, bytes, stream


class RowCopies(RowPool):
    """The part of a pool on a GPU that brings rows to the clients."""

    def __init__(
        self, device: torch.device, cells: int, max_flags: int, hidden: int, dtype: torch.dtype, index: np.ndarray
    ) -> None:
        super().__init__(device, cells, max_flags, hidden, dtype, index)
        self._address = self.cells.data_ptr()
        self._cell_bytes = hidden * dtype.itemsize
        self._copy_bytes = runtime_copy() or self._copy_by_torch
        self._side = torch.cuda.Stream(device)
        self._forward_done = torch.cuda.Event()
        self._copies: deque[RowCopy] = deque()  # launched ones first
        self._waiting: deque[RowCopy] = deque()  # not launched, or not whole
        self.backlog = 0  # bytes of the waiting ones
        self._ready = 0  # number of waiting copies whose forwards the side stream waits for already
        self.pace = Pace()
        self._batches: deque[CopyBatch] = deque()  # of the last few steps
        self._mark: tuple[torch.cuda.Event, int] | None = None  # begin and tokens of the last step

    # --- the queue

    def copy_rows(self, part: RowSlice, n_cells: int, offset: int, publish: Callable[[], None]) -> None:
        assert part.request.arena is not None
        source = self._address + part.cell * self._cell_bytes
        target = part.request.arena.address + offset
        copy = RowCopy(part.request, publish, part.freed, source, target, n_cells * self._cell_bytes)
        self._copies.append(copy)
        self._waiting.append(copy)
        self.backlog += copy.left

    def after_copies(
        self, request: TrackedRequest, call: Callable[[], None], event: torch.cuda.Event | None = None
    ) -> None:
        self._copies.append(RowCopy(request, call, done=event))
        self._finish()

    def take_late(self, count: int) -> int | None:
        """Return the first of `count` adjacent cells once enough copies have arrived; None if no copy is left whose
        forward has ended."""
        while self._wait_for_first():
            if (first := self.take(count)) is not None:
                return first
        return None

    def _wait_for_first(self) -> bool:
        """Wait for the first copy, or launch the waiting ones that are ready; return False if there is none."""
        if self._copies and (done := self._copies[0].done) is not None:
            done.synchronize()
            self._finish()
            return True
        if not self._ready:
            return False
        self._launch(_MAX_COPY_BYTES, torch.cuda.Event())
        return True

    def wait_for_copies(self, names: set[str] | None = None) -> None:
        """Wait for the copies of the named requests, or for all. Copies behind them are not waited for: they may belong
        to a forward that has just begun."""
        self._mark = None
        while count := self._position_of_last(names):
            waiting = [copy.left for copy in itertools.islice(self._copies, count) if copy.left]
            if waiting:
                self._launch_now(min(sum(waiting), _MAX_COPY_BYTES), len(waiting))
            self._finish(wait=count)

    def _position_of_last(self, names: set[str] | None) -> int:
        """Return the number of copies up to the last one of the named requests."""
        found = (i for i, copy in enumerate(self._copies, 1) if names is None or copy.request.wire.name in names)
        return max(found, default=0)

    # --- copies beside steps

    def copy_some(self, tokens: int) -> None:
        """Launch a batch beside a step with this number of tokens, unless more than _MAX_BATCHES are under way."""
        self._collect_batches()
        step_before = self._mark
        self._mark = None
        if not self._waiting:
            return
        mark = _timed_event()
        mark.record(self._current())
        self._mark = mark, tokens
        if len(self._batches) > _MAX_BATCHES:
            return
        self._side.wait_event(mark)
        self._ready = len(self._waiting)
        allowed = self.pace.beside(tokens)
        begin = _timed_event()
        end = _timed_event()
        begin.record(self._side)
        size = self._launch(allowed, end)
        self.pace.copied(size, allowed)
        if size:
            self._batches.append(CopyBatch(begin, end, size, step_before, mark))

    def _collect_batches(self) -> None:
        """Learn from the batches that have arrived, and finish their copies."""
        reached: torch.cuda.Event | None = None
        while self._batches and self._batches[0].end.query():
            batch = self._batches.popleft()
            reached = batch.end
            self._learn(batch)
        if self._copies and (reached is not None or not self._batches):
            self._finish(reached=reached)

    def _learn(self, batch: CopyBatch) -> None:
        """Measure a batch that has arrived."""
        self.pace.rows_took(batch.bytes, batch.begin.elapsed_time(batch.end))
        if batch.before is not None:
            begin, tokens = batch.before
            self.pace.step_took(tokens, begin.elapsed_time(batch.mark))

    # --- launching and finishing

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.cells.device)

    def _launch_now(self, n_bytes: int, n_copies: int) -> None:
        """Launch the first waiting copies behind the forwards queued so far."""
        if n_copies > self._ready:
            self._forward_done.record(self._current())
            self._side.wait_event(self._forward_done)
            self._ready = len(self._waiting)
        self._launch(n_bytes, torch.cuda.Event())

    def _launch(self, n_bytes: int, done: torch.cuda.Event) -> int:
        """Launch copies of up to about `n_bytes`, and record the event behind them; return the bytes launched."""
        stream = self._side.cuda_stream
        launched = 0
        while self._ready and launched < n_bytes:
            copy = self._waiting[0]
            allowed = n_bytes - launched
            count = copy.left if copy.left <= allowed + _MIN_COPY_BYTES else allowed
            self._copy_bytes(copy.target, copy.source, count, stream)
            launched += count
            if count == copy.left:
                self._waiting.popleft()
                self._ready -= 1
                copy.done = done
            copy.left -= count
            copy.source += count
            copy.target += count
        self.backlog -= launched
        done.record(self._side)
        return launched

    def _copy_by_torch(self, target: int, source: int, size: int, _stream: int) -> None:
        memory = (ctypes.c_uint8 * size).from_address(target)
        start = source - self._address
        flat = self.cells.view(torch.uint8).view(-1)[start : start + size]
        with torch.cuda.stream(self._side):
            torch.frombuffer(memory, dtype=torch.uint8).copy_(flat, non_blocking=True)

    def _finish(self, wait: int = 0, reached: torch.cuda.Event | None = None) -> None:
        """Finish the copies that have arrived, in order, and wait for the first `wait` of them. Many share an event;
        `reached` is one that is known to be reached."""
        while self._copies:
            copy = self._copies[0]
            if copy.done is None:
                if copy.left:
                    return
            elif copy.done is not reached:
                if wait > 0:
                    copy.done.synchronize()
                elif not copy.done.query():
                    return
                reached = copy.done
            wait -= 1
            self._copies.popleft()
            self.give(*copy.freed)
            copy.call()


def runtime_copy() -> CopyBytes | None:
    """Return the CUDA runtime's function that launches a copy to the host, or None if the runtime is not found by its
    name. It takes a tenth of the time of torch, which makes two tensors, and PyDLL keeps the interpreter lock, so that
    no other thread runs between a dozen copies."""
    try:
        call = ctypes.PyDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def copy(target: int, source: int, size: int, stream: int) -> None:
        if code := call(target, source, size, _TO_HOST, stream):
            raise RuntimeError(f"copying rows to the host failed with CUDA error {code}")

    return copy


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
