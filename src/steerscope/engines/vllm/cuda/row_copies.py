"""Copies of rows from the pool to the clients' memory, on a side stream, paced.

Copying all rows of a large prompt at once would keep the engine's own small copies (sampled tokens) waiting behind
gigabytes, step after step. So beside each step a batch is copied that takes less time than the step (`Pace`), after
the sampled tokens of the step before, and the backlog stays in the pool.
"""

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from steerscope.engines.vllm.cuda.streams import CurrentStream
from steerscope.engines.vllm.worker.device import RowPool
from steerscope.engines.vllm.worker.index_layout import FEW
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest

_MAX_COPY_BYTES = 64 << 20  # of one batch that is not paced
_MIN_COPY_BYTES = 1 << 20  # a smaller rest is added to the copy before it
_MAX_BATCHES = 2  # under way: the host prepares a step while the one before it runs
_PROMPT_STEPS = 8  # after a prompt, in which rows may have to wait
_FIRST_BYTES = 64 << 20  # while nothing was measured
_MIN_TIMED_BYTES = 1 << 20  # smaller copies measure latency, not the rate of the bus
_SHARE = 0.7  # of a step; the rest is for the step's own copies
_TIMED_EVERY = 7  # of this number of copies beside steps of a known size, two in a row are timed
_TO_HOST = 2  # cudaMemcpyDeviceToHost
_TOKEN_STREAMS = "output_copy_stream", "async_output_copy_stream"  # of vLLM's V2 and V1 runners


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
        self._turn = 0
        self._new = False

    def timed(self, tokens: int) -> bool:
        """Return whether the copies beside the next step are timed. A step lasts from one mark to the next, so the step
        after one of unknown size is timed too."""
        before = self._new
        self._new = not self.rate or tokens.bit_length() not in self._steps
        self._turn += 1
        return before or self._new or self._turn % _TIMED_EVERY < 2

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
    """Copies launched beside one step, and the event after them. If they were timed, also the event before them, the
    begin of the step before (with its number of tokens, if it was timed) and its end."""

    end: torch.cuda.Event
    bytes: int
    begin: torch.cuda.Event | None = None
    before: tuple[torch.cuda.Event, int] | None = None
    mark: torch.cuda.Event | None = None


CopyBytes = Callable[[int, int, int, int], None]  # target, source, bytes, stream


class RowCopies(RowPool):
    """The part of a pool on a GPU that brings rows to the clients."""

    def __init__(
        self, device: torch.device, cells: int, max_flags: int, hidden: int, dtype: torch.dtype, index: np.ndarray,
        runner: Any,
    ) -> None:  # fmt: skip
        """`runner` is vLLM's model runner."""
        super().__init__(device, cells, max_flags, hidden, dtype, index)
        self._address = self.cells.data_ptr()
        self._cell_bytes = hidden * dtype.itemsize
        self._runner = runner
        self._current = CurrentStream(device)
        self._copy_bytes = runtime_copy() or self._copy_by_torch
        self._side = torch.cuda.Stream(device)
        self._forward_done = torch.cuda.Event()
        self._tokens_copied = torch.cuda.Event()
        self._token_stream: torch.cuda.Stream | None = None  # on which vLLM copies the sampled tokens
        self._spare_events: list[torch.cuda.Event] = []
        self._steps_since_prompt = _PROMPT_STEPS
        self._copies: deque[RowCopy] = deque()  # launched ones first
        self._waiting: deque[RowCopy] = deque()  # not launched, or not whole
        self.backlog = 0  # bytes of the waiting ones
        self._ready = 0  # number of waiting copies whose forwards the side stream waits for already
        self.pace = Pace()
        self._batches: deque[CopyBatch] = deque()  # of the last few steps
        self._mark: tuple[torch.cuda.Event, int] | None = None  # begin and tokens of the last step, if it was timed

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
        """Launch a batch beside a step, unless more than _MAX_BATCHES are under way or the device waits for the host
        after a prompt."""
        self._collect_batches()
        step_before = self._mark
        self._mark = None
        self._steps_since_prompt = 0 if tokens > FEW else self._steps_since_prompt + 1
        if not self._waiting or self._must_wait(step_before):
            return
        timed = self.pace.timed(tokens)
        free = len(self._batches) <= _MAX_BATCHES
        mark = _timed_event() if timed else self._forward_done
        if timed or free:
            mark.record(self._current())
        if timed:
            self._mark = mark, tokens
        if not free:
            return
        self._side.wait_event(mark)
        if self._record_tokens_copied():
            self._side.wait_event(self._tokens_copied)
        self._ready = len(self._waiting)
        allowed = self.pace.beside(tokens)
        if timed:
            begin = _timed_event()
            end = _timed_event()
            begin.record(self._side)
            size = self._launch(allowed, end)
            batch = CopyBatch(end, size, begin, step_before, mark)
        else:
            end = self._spare_events.pop() if self._spare_events else torch.cuda.Event()
            size = self._launch(allowed, end)
            batch = CopyBatch(end, size)
        self.pace.copied(size, allowed)
        if size:
            self._batches.append(batch)

    def copy_waiting_now(self) -> None:
        """Launch all waiting copies behind the last forward, if they are few."""
        if 0 < self.backlog <= _MAX_COPY_BYTES:
            self._launch_now(self.backlog, len(self._waiting))

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
        """Measure a batch that has arrived. An event without timing is recorded again; a stale waiter on it only waits
        longer."""
        if batch.begin is None or batch.mark is None:
            self._spare_events.append(batch.end)
            return
        self.pace.rows_took(batch.bytes, batch.begin.elapsed_time(batch.end))
        if batch.before is not None:
            begin, tokens = batch.before
            self.pace.step_took(tokens, begin.elapsed_time(batch.mark))

    def _must_wait(self, step_before: tuple[torch.cuda.Event, int] | None) -> bool:
        """Return whether rows wait in this step. For some steps after a prompt the device waits for the host, and
        launching copies would delay the host. Rows wait until a step is prepared before the tokens of the step before
        have arrived; about the first step after a prompt nothing is known. `take_late` copies rows all the same."""
        if not 0 < self._steps_since_prompt <= _PROMPT_STEPS:
            return False
        if self._steps_since_prompt == 1:
            mark = _timed_event() if step_before is not None else self._forward_done
            mark.record(self._current())
            self._side.wait_event(mark)
            self._ready = len(self._waiting)
            if step_before is not None:  # still measure the step with the prompts
                self._batches.append(CopyBatch(mark, 0, mark, step_before, mark))
        elif not self._record_tokens_copied() or not self._tokens_copied.query():
            self._steps_since_prompt = _PROMPT_STEPS
            return False
        return True

    def _record_tokens_copied(self) -> bool:
        """Record an event behind the sampled tokens of the step before on vLLM's copy stream; return False without such
        a stream. The device copies to the host in order, and vLLM waits for these tokens to prepare the next step but
        one."""
        if self._token_stream is None:
            found = (getattr(self._runner, name, None) for name in _TOKEN_STREAMS)
            self._token_stream = next((stream for stream in found if stream is not None), None)
        if self._token_stream is None:
            return False
        self._tokens_copied.record(self._token_stream)
        return True

    # --- launching and finishing

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
