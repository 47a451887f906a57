"""The row pool on a GPU: cells in a ring, rows leave on a side stream, paced.

Copying all rows of a large prompt at once would keep the engine's own small copies (sampled tokens out, indices in)
waiting behind gigabytes, step after step. So each step sends a bounded part, and the backlog is carried in the ring. A
step whose cells are still on their way out waits for them; that is counted as `stall_s`.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.transport import Arena
from steerscope.engines.vllm import kernel
from steerscope.engines.vllm.step import Asker, Filled
from steerscope.specs.errors import CapacityExceeded

_RING = 8  # steps that may be prepared while earlier ones run
_PACE = 64 << 20  # bytes per step, at least
_BACKLOG = 1.25  # cells, in steps of the largest kind


@dataclass(slots=True)
class Move:
    """Rows on their way: cells [first, last), and what to do when they have arrived. Without rows it only marks a place
    in the queue."""

    first: int
    last: int
    rows: Tensor | None
    target: Tensor | None
    note: Callable[[], None]
    sent: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        return 0 if self.rows is None else self.rows.numel() * self.rows.element_size()


class CudaPool:
    def __init__(self, device: torch.device, cells: int, hidden: int, dtype: torch.dtype, index: np.ndarray) -> None:
        kernel.register()
        self.device, self.size = device, int(cells * _BACKLOG)
        try:
            self.cells = torch.zeros(self.size, hidden, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityExceeded(
                f"no device memory for {self.size * hidden * dtype.itemsize >> 20} MiB of rows: tap fewer layers, or "
                "lower max_num_batched_tokens"
            ) from error
        self.index = torch.zeros(index.shape, dtype=torch.int32, device=device)
        self._books = torch.from_numpy(index)
        self._stages = [torch.zeros(index.shape, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._stage_events = [torch.cuda.Event() for _ in range(_RING)]
        self.faults = torch.zeros(len(index), dtype=torch.int32, device=device)
        self._flags: deque[tuple[Filled, Tensor, torch.cuda.Event]] = deque()  # on their way
        self._turn, self._sent_tokens = 0, 0
        self._side = torch.cuda.Stream(device)
        self._ready = torch.cuda.Event()
        self._head = 0
        self._moves: deque[Move] = deque()  # unsent and sent, in order of their cells
        self._unsent = 0  # bytes
        self.stall_s = 0.0

    # --- before the forward

    def send_index(self, tokens: int) -> None:
        count, self._sent_tokens = max(tokens, self._sent_tokens), tokens
        if not count:
            return
        turn, self._turn = self._turn, (self._turn + 1) % _RING
        self._stage_events[turn].synchronize()  # long since done, unless the ring was run round
        stage = self._stages[turn][:count]
        stage.copy_(self._books[:count])
        self.index[:count].copy_(stage, non_blocking=True)
        self._stage_events[turn].record()

    def reserve(self, cells: int) -> int:
        """The first of so many cells in a row, none of which is still on its way out."""
        if self._head + cells > self.size:
            self._head = 0
        first, last = self._head, self._head + cells
        if any(move.first < last and first < move.last for move in self._moves):
            began = time.perf_counter()
            while any(move.first < last and first < move.last for move in self._moves):
                self._send(self._unsent)
                self._arrived(wait=True)
            self.stall_s += time.perf_counter() - began
        self._head = last
        return first

    # --- after the forward

    def rows(self, cell: int, count: int, width: int) -> Tensor:
        return self.cells[cell : cell + count * width].view(count, width, -1)

    def move(self, rows: Tensor, target: Tensor, note: Callable[[], None]) -> None:
        first = int(rows.storage_offset()) // rows.shape[-1]
        last = first + rows.shape[0] * rows.shape[1]
        self._moves.append(Move(first, last, rows, target, note))
        self._unsent += self._moves[-1].size

    def afterwards(self, note: Callable[[], None]) -> None:
        self._moves.append(Move(0, 0, None, None, note))
        self._arrived()

    def end_step(self) -> None:
        self._arrived()
        self._ready.record()
        self._side.wait_event(self._ready)
        self._send(max(_PACE, self._unsent // 8))

    def drain(self) -> None:
        self._ready.record()
        self._side.wait_event(self._ready)
        self._send(self._unsent)
        self._arrived(wait=True)

    def faulty(self, filled: Filled | None) -> list[Asker]:
        if filled is not None and filled.steered:
            flags = torch.empty(filled.tokens, dtype=torch.int32, pin_memory=True)
            flags.copy_(self.faults[: filled.tokens], non_blocking=True)
            self.faults[: filled.tokens].zero_()
            event = torch.cuda.Event()
            event.record()
            self._flags.append((filled, flags, event))
        found: list[Asker] = []
        while self._flags and (filled is None or self._flags[0][2].query()):
            earlier, flags, event = self._flags.popleft()
            event.synchronize()
            if flags.any():
                found += [asker for asker, first, last in earlier.steered if flags[first:last].any()]
        return found

    def _send(self, size: int) -> None:
        """Queue moves until so many bytes are on their way. Their rows are complete: a step waits for its forward."""
        with torch.cuda.stream(self._side):
            for move in self._moves:
                if size <= 0:
                    break
                if move.sent is None and move.rows is not None and move.target is not None:
                    move.target.copy_(move.rows, non_blocking=True)
                    move.sent = torch.cuda.Event()
                    move.sent.record()
                    size -= move.size
                    self._unsent -= move.size

    def _arrived(self, wait: bool = False) -> None:
        while self._moves:
            move = self._moves[0]
            if move.rows is not None:
                if move.sent is None or not (wait or move.sent.query()):
                    return
                move.sent.synchronize()
            self._moves.popleft()
            move.note()

    def pin(self, arena: Arena) -> None:
        """Let the GPU write to the shared memory itself."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        code = runtime.cudaHostRegister(arena.address, arena.size, 0)
        if int(code) != 0:
            raise CapacityExceeded(f"the driver cannot pin {arena.size >> 20} MiB for captured rows (code {code})")

    def unpin(self, arena: Arena) -> None:
        """Before the memory is unmapped: the driver would go on believing that the address is pinned."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        runtime.cudaHostUnregister(arena.address)

    def stats(self) -> dict[str, float]:
        return {"stall_s": self.stall_s, "backlog_bytes": float(self._unsent)}
