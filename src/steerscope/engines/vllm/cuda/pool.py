"""The row pool on a GPU: rows leave on a side stream, paced.

Copying all rows of a large prompt at once would keep the engine's own small copies (sampled tokens out) waiting behind
gigabytes, step after step. So each step sends a part that takes less time than the step (`pacing.py`), behind the
tokens of the step before, and the backlog stays in the pool.
"""

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.cuda import kernel
from steerscope.engines.vllm.cuda.pacing import Pace
from steerscope.engines.vllm.cuda.prefill_sums import FEW
from steerscope.engines.vllm.cuda.streams import Here
from steerscope.engines.vllm.worker.pool import Cells, watched_rows
from steerscope.engines.vllm.worker.requests import Asker, Slice
from steerscope.engines.vllm.worker.step_index import ASKER, LAID
from steerscope.specs.errors import CapacityExceeded

if TYPE_CHECKING:
    from steerscope.engines.vllm.cuda.precomputed_ops import Laying

_RING = 8  # steps that may be prepared while earlier ones run
_DRAIN = 64 << 20  # bytes at once, where everything has to leave
_CRUMB = 1 << 20  # bytes that are not left for a copy of their own
_AHEAD = 2  # parts that may be under way: the host prepares a step while the one before it runs
_PATIENT = 8  # steps behind a prompt in which rows may have to wait
_LOOK = 4  # steps between two looks at the fault flags
_TO_HOST = 2  # cudaMemcpyDeviceToHost
_MAPPED = 2  # cudaHostRegisterMapped


class Part(NamedTuple):
    """What was sent beside one step, and when its last byte left; if it was timed, also when its first one did, and
    when the step before began (with its size, if that was timed) and ended."""

    end: torch.cuda.Event
    bytes: int
    begin: torch.cuda.Event | None = None
    before: tuple[torch.cuda.Event, int] | None = None
    mark: torch.cuda.Event | None = None


@dataclass(slots=True)
class Move:
    """Bytes on their way from the pool to an arena. When they have arrived, the cells of their room are free, and it is
    noted. Without bytes it only marks a place in the queue."""

    asker: Asker
    note: Callable[[], None]
    room: tuple[int, int] = (0, 0)
    source: int = 0
    target: int = 0
    left: int = 0  # bytes that were not sent yet: these begin at source and target
    sent: torch.cuda.Event | None = None  # behind the last of them


def _memcpy() -> Callable[[int, int, int, int], None] | None:
    """The runtime's own way to queue a copy to the host: (to, from, bytes, stream). A tenth of what torch takes to make
    two tensors and look at them, and no other thread runs meanwhile (PyDLL): a dozen of them may come in a row. None
    where the runtime is not to be had by its name."""
    try:
        call = ctypes.PyDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def copy(target: int, source: int, size: int, stream: int) -> None:
        if code := call(target, source, size, _TO_HOST, stream):
            raise RuntimeError(f"copying rows to the host failed with CUDA error {code}")

    return copy


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class CudaPool:
    def __init__(
        self,
        device: torch.device,
        cells: int,
        askers: int,
        hidden: int,
        dtype: torch.dtype,
        index: np.ndarray,
        runner: Any,
    ) -> None:
        kernel.register()
        self._runner, self._here = runner, Here(device)
        try:
            self.cells = torch.zeros(cells + watched_rows(cells, index), hidden, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityExceeded(
                f"no device memory for {cells * hidden * dtype.itemsize >> 20} MiB of rows: tap fewer layers, or "
                "lower max_num_batched_tokens"
            ) from error
        self._address, self._cell = self.cells.data_ptr(), hidden * dtype.itemsize
        self._copy = _memcpy() or self._copy_by_torch
        free = Cells(cells)
        self.take, self.give = free.take, free.give
        self.index = torch.zeros(index.shape, dtype=torch.int32, device=device)
        self._books = index
        self._stages = [torch.zeros(index.shape, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._stage_events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn, self._sent_tokens = 0, 0
        self._laying: Laying | None = None
        self.faults = torch.zeros(askers, dtype=torch.int32, device=device)
        self._flags = torch.zeros(askers, dtype=torch.int32, pin_memory=True)
        self._flags_there = torch.cuda.Event()
        self._asked, self._looks = False, 0
        self._side = torch.cuda.Stream(device)
        self._ready, self._tokens_out = torch.cuda.Event(), torch.cuda.Event()
        self._answers: torch.cuda.Stream | None = None
        self._spare, self._behind = list[torch.cuda.Event](), _PATIENT  # steps since one that read prompts
        self._moves: deque[Move] = deque()  # sent ones first
        self._unsent: deque[Move] = deque()
        self._backlog = 0  # bytes of the unsent
        self._whole = 0  # how many of these are of forwards that the side stream waits for already
        self._pace = Pace()
        self._parts: deque[Part] = deque()  # of the last few steps
        self._mark: tuple[torch.cuda.Event, int] | None = None  # the last step's begin and size, if it was timed

    # --- before the forward

    def lay_out(self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, requests: int) -> Tensor:
        from steerscope.engines.vllm.cuda.precomputed_ops import Laying  # needs Triton

        self._laying = Laying(vectors, coefficients, orders, before, self.index, requests)
        return self._laying.laid

    def make_stage(self, taps: int, requests: int) -> Tensor:
        from steerscope.engines.vllm.cuda.row_store import make_stage

        return make_stage(taps, requests, self.cells)

    def send_index(self, tokens: int, lay: bool = False) -> None:
        if self._laying is not None:
            lay = lay and tokens <= self._laying.rows
            if lay:
                self._books[:tokens, ASKER] |= LAID
        self._copy_index(tokens)
        if self._laying is not None:
            self._laying.lay(tokens if lay else 0)

    def _copy_index(self, tokens: int) -> None:
        count, self._sent_tokens = max(tokens, self._sent_tokens), tokens
        if not count:
            return
        turn, self._turn = self._turn, (self._turn + 1) % _RING
        self._stage_events[turn].synchronize()  # long since done, unless the ring was run round
        stage = self._stages[turn][:count]
        stage.numpy()[:] = self._books[:count]
        self.index[:count].copy_(stage, non_blocking=True)
        self._stage_events[turn].record(self._here())

    def take_late(self, count: int) -> int | None:
        while True:
            while self._moves and (sent := self._moves[0].sent) is not None:
                sent.synchronize()
                self._arrived()
                if (first := self.take(count)) is not None:
                    return first
            if not self._whole:
                return None
            self._send(_DRAIN, torch.cuda.Event())

    def advance(self, tokens: int) -> None:
        del tokens  # the last tap of the step before has done it

    # --- after the forward

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        return self.cells[cell : cell + count * width].view(count, width, -1)

    def move(self, part: Slice, used: int, offset: int, note: Callable[[], None]) -> None:
        asker, total = part.asker, used * self._cell
        assert asker.arena is not None
        source, target = self._address + part.cell * self._cell, asker.arena.address + offset
        move = Move(asker, note, part.room, source, target, total)
        self._moves.append(move)
        self._unsent.append(move)
        self._backlog += total

    def afterwards(self, asker: Asker, note: Callable[[], None], event: torch.cuda.Event | None = None) -> None:
        self._moves.append(Move(asker, note, sent=event))
        self._arrived()

    def pump(self, tokens: int) -> None:
        """A part of what waits; none while more than _AHEAD are under way, nor while the device waits for the host just
        behind a prompt."""
        there: torch.cuda.Event | None = None
        while self._parts and self._parts[0].end.query():
            there = self._learn(self._parts.popleft())
        if self._moves and (there is not None or not self._parts):
            self._arrived(there=there)
        before, self._mark = self._mark, None
        self._behind = 0 if tokens > FEW else self._behind + 1
        if not self._unsent or self._hurried(before):
            return
        timed, free = self._pace.timed(tokens), len(self._parts) <= _AHEAD
        mark = _timed() if timed else self._ready
        if timed or free:
            mark.record(self._here())
        if timed:
            self._mark = mark, tokens
        if not free:
            return
        self._side.wait_event(mark)
        if self._tokens_leave():
            self._side.wait_event(self._tokens_out)
        self._whole = len(self._unsent)
        begin, end = (_timed(), _timed()) if timed else (None, self._spare.pop() if self._spare else torch.cuda.Event())
        if begin is not None:
            begin.record(self._side)
        allowed = self._pace.beside(tokens)
        size = self._send(allowed, end)
        self._pace.sent(size, allowed)
        if size:
            self._parts.append(Part(end, size, begin, before, mark) if timed else Part(end, size))

    def _hurried(self, before: tuple[torch.cuda.Event, int] | None) -> bool:
        """For some steps behind a prompt the device waits for the host, and to send rows takes the host a while; it is
        slower, too, while they arrive. So they wait until the tokens of the step before are not there yet when a step
        is prepared; of the first such step nobody knows. They are sent all the same if somebody needs their room."""
        if not 0 < self._behind <= _PATIENT:
            return False
        if self._behind == 1:
            mark = _timed() if before is not None else self._ready
            mark.record(self._here())
            self._side.wait_event(mark)
            self._whole = len(self._unsent)
            if before is not None:  # how long the step with the prompts took is learnt all the same
                self._parts.append(Part(mark, 0, mark, before, mark))
        elif not self._tokens_leave() or not self._tokens_out.query():
            self._behind = _PATIENT
            return False
        return True

    def _tokens_leave(self) -> bool:
        """Whether somebody says when those of the step before have left: `_tokens_out`, from now on."""
        if self._answers is None:
            self._answers = self._answering()
        if self._answers is not None:
            self._tokens_out.record(self._answers)
        return self._answers is not None

    def _learn(self, part: Part) -> torch.cuda.Event:
        """It has arrived. Its event may be used again: whoever still looks at it hears of something later."""
        if part.begin is None or part.mark is None:
            self._spare.append(part.end)
            return part.end
        self._pace.rows_took(part.bytes, part.begin.elapsed_time(part.end))
        if part.before is not None:
            self._pace.step_took(part.before[1], part.before[0].elapsed_time(part.mark))
        return part.end

    def _answering(self) -> torch.cuda.Stream | None:
        """vLLM's, on which the tokens of a step leave: one engine of the device copies to the host, in order, and the
        next step but one is prepared when they are there."""
        names = "output_copy_stream", "async_output_copy_stream"  # of the V2 and the V1 runner
        return next((stream for name in names if (stream := getattr(self._runner, name, None)) is not None), None)

    def hasten(self) -> None:
        if 0 < self._backlog <= _DRAIN:
            self._send_now(self._backlog, len(self._unsent))

    def drain(self, names: set[str] | None = None) -> None:
        """What comes behind theirs is not waited for: it may be of a forward that has just begun."""
        self._mark = None
        while count := self._first_moves(names):
            waiting = [move.left for move in itertools.islice(self._moves, count) if move.left]
            if waiting:
                self._send_now(min(sum(waiting), _DRAIN), len(waiting))
            self._arrived(wait=count)

    def _first_moves(self, names: set[str] | None) -> int:
        """How many there are up to the last one of these."""
        mine = (i for i, move in enumerate(self._moves, 1) if names is None or move.asker.wire.name in names)
        return max(mine, default=0)

    def _send_now(self, size: int, moves: int) -> None:
        """Of the first of those that wait, behind their forwards."""
        if moves > self._whole:
            self._ready.record(self._here())
            self._side.wait_event(self._ready)
            self._whole = len(self._unsent)
        self._send(size, torch.cuda.Event())

    def faulty(self, wait: bool = False) -> list[int]:
        found: list[int] = []
        if self._asked and (wait or self._flags_there.query()):
            self._flags_there.synchronize()
            found, self._asked = self._read(), False
        self._looks += 1
        if not self._asked and (wait or self._looks % _LOOK == 0):
            self._flags.copy_(self.faults, non_blocking=True)
            self._flags_there.record(self._here())
            self._asked = True
            if wait:
                self._flags_there.synchronize()
                found, self._asked = found + self._read(), False
        return found

    def _read(self) -> list[int]:
        found = self._flags.nonzero().flatten().tolist() if self._flags.any() else []
        for number in found:
            self.faults[number] = 0
        return found

    def _send(self, size: int, event: torch.cuda.Event) -> int:
        """Queue copies until so many bytes are on their way, and the event behind them; how many they are."""
        stream, sent = self._side.cuda_stream, 0
        while self._whole and sent < size:
            move = self._unsent[0]
            count = move.left if move.left <= size - sent + _CRUMB else size - sent
            self._copy(move.target, move.source, count, stream)
            sent += count
            if count == move.left:
                self._unsent.popleft()
                self._whole -= 1
                move.sent = event
            move.left -= count
            move.source += count
            move.target += count
        self._backlog -= sent
        event.record(self._side)
        return sent

    def _copy_by_torch(self, target: int, source: int, size: int, _stream: int) -> None:
        memory = (ctypes.c_uint8 * size).from_address(target)
        start = source - self._address
        flat = self.cells.view(torch.uint8).view(-1)[start : start + size]
        with torch.cuda.stream(self._side):
            torch.frombuffer(memory, dtype=torch.uint8).copy_(flat, non_blocking=True)

    def _arrived(self, wait: int = 0, there: torch.cuda.Event | None = None) -> None:
        """So many of the first are waited for. Many share an event; `there` is one that has come to pass."""
        while self._moves:
            move = self._moves[0]
            if move.sent is None:
                if move.left:
                    return
            elif move.sent is not there:
                if wait > 0:
                    move.sent.synchronize()
                elif not move.sent.query():
                    return
                there = move.sent
            wait -= 1
            self._moves.popleft()
            if move.room[1]:
                self.give(*move.room)
            move.note()

    def pin(self, arena: Arena) -> None:
        """Let the GPU write to the shared memory itself."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        code = runtime.cudaHostRegister(arena.address, arena.size, _MAPPED)
        if int(code) != 0:
            raise CapacityExceeded(f"the driver cannot pin {arena.size >> 20} MiB for captured rows (code {code})")

    def unpin(self, arena: Arena) -> None:
        """Before the memory is unmapped: the driver would go on believing that the address is pinned."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        runtime.cudaHostUnregister(arena.address)

    def stats(self) -> dict[str, float]:
        return {"backlog_bytes": float(self._backlog), "bus_gb_per_s": self._pace.rate / 1e6}
