"""Reductions on a GPU.

A request has a sum in float32 and a ring of its newest rows. One launch adds the rows of all requests of a step, and
one writes the results of all requests that have ended into the clients' memory. Both run on a side stream, beside the
sampling of the step's tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.wire import WireCapture
from steerscope.engines.vllm.worker.device import Reductions
from steerscope.engines.vllm.worker.requests import RowSlice
from steerscope.specs.errors import RequestFailed

# Columns of a work list: addresses of the sum and the ring, the rows, and the place of a result.
TOTAL, RING, WIDTH, HOLD, LAST, CELL, FIRST, COUNT = range(8)
# of requests that end
TARGET = CELL
SURE = FIRST
COUNTED = COUNT
_LINE = 8
_BLOCK = 1024
_MAX_SPARE_BYTES = 64 << 20


@triton.jit
def _add_row(total, row, last):
    """Return the sum with one more row, or that row."""
    return tl.where(last != 0, row.to(tl.float32), total + row.to(tl.float32))


@triton.jit
def _add_kernel(
    cells, work, hidden, BLOCK: tl.constexpr, LINE: tl.constexpr, TOTAL: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, HOLD: tl.constexpr, LAST: tl.constexpr, CELL: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Add rows [first, first + count) of a request. Rows that are no longer among the newest are added to the sum: from
    the ring, then from the cells; the newest rows replace others in the ring."""
    mine = work + tl.program_id(0) * LINE
    tap = tl.program_id(1)
    width = tl.load(mine + WIDTH)
    if tap < width:
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < hidden
        hold, last = tl.load(mine + HOLD), tl.load(mine + LAST)
        first, count = tl.load(mine + FIRST), tl.load(mine + COUNT)
        sums = tl.load(mine + TOTAL).to(tl.pointer_type(tl.float32)) + tap * hidden + at
        ring = tl.load(mine + RING).to(cells.dtype) + tap * hidden + at
        rows = cells + (tl.load(mine + CELL) + tap) * hidden + at
        total = tl.load(sums, mask=inside & (first > 0), other=0.0)
        for i in range(tl.maximum(first - hold, 0), tl.minimum(first, first + count - hold)):
            total = _add_row(total, tl.load(ring + i % hold * width * hidden, mask=inside, other=0.0), last)
        for i in range(0, count - hold):
            total = _add_row(total, tl.load(rows + i * width * hidden, mask=inside, other=0.0), last)
        tl.store(sums, total, mask=inside)
        for i in range(tl.maximum(count - hold, 0), count):
            row = tl.load(rows + i * width * hidden, mask=inside, other=0.0)
            tl.store(ring + (first + i) % hold * width * hidden, row, mask=inside)


@triton.jit
def _end_kernel(
    cells, work, hidden, BLOCK: tl.constexpr, LINE: tl.constexpr, TOTAL: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, HOLD: tl.constexpr, LAST: tl.constexpr, TARGET: tl.constexpr, SURE: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Write a result. The sum holds `sure` rows; rows from there to `counted` are in the ring."""
    mine = work + tl.program_id(0) * LINE
    tap = tl.program_id(1)
    width = tl.load(mine + WIDTH)
    if tap < width:
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < hidden
        hold, last, counted = tl.load(mine + HOLD), tl.load(mine + LAST), tl.load(mine + COUNTED)
        ring = tl.load(mine + RING).to(cells.dtype) + tap * hidden + at
        total = tl.load(
            tl.load(mine + TOTAL).to(tl.pointer_type(tl.float32)) + tap * hidden + at, mask=inside, other=0.0
        )
        for i in range(tl.load(mine + SURE), counted):
            total = _add_row(total, tl.load(ring + i % hold * width * hidden, mask=inside, other=0.0), last)
        if last == 0:
            total /= counted
        target = tl.load(mine + TARGET).to(tl.pointer_type(tl.float32))
        tl.store(target + tap * hidden + at, total, mask=inside)


@dataclass(slots=True)
class PartialResult:
    """The partial result of one request."""

    total: torch.Tensor
    ring: torch.Tensor
    hold: int
    last: bool
    next: int = 0  # rows at positions below this were added
    count: int = 0  # rows added

    def line(self, cell: int, first: int, count: int) -> list[int]:
        """Return a line of the work list; of requests that end, `cell` is the target, and so on."""
        where = self.total.data_ptr(), self.ring.data_ptr()
        return [*where, self.total.shape[0], self.hold, int(self.last), cell, first, count]

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + self.ring.nbytes


class CudaReductions(Reductions):
    def __init__(self, cells: torch.Tensor) -> None:
        super().__init__(cells)
        self._ending: list[list[int]] = []
        self._finished: list[PartialResult] = []  # until the device has written them
        self._spare: dict[tuple[int, int], list[PartialResult]] = {}  # memory to be used again, by width and hold
        self._spare_bytes = 0
        self._side = torch.cuda.Stream(cells.device) if cells.is_cuda else None
        self._pushed: torch.cuda.Event | None = None  # after added rows, whose cells the next forward may write to

    def start(self, capture: WireCapture, width: int) -> PartialResult:
        hidden = self._cells.shape[1]
        device = self._cells.device
        last = capture.reduce == "last"
        if spare := self._spare.get((width, capture.hold)):
            used = spare.pop()
            self._spare_bytes -= used.nbytes
            return PartialResult(used.total, used.ring, capture.hold, last)
        with self._on_side_stream():  # which owns the memory
            # The kernel ignores what is there before the first rows.
            total = torch.empty(width, hidden, dtype=torch.float32, device=device)
            ring = torch.empty(max(1, capture.hold), width, hidden, dtype=self._cells.dtype, device=device)
        return PartialResult(total, ring, capture.hold, last)

    def push(self, parts: Sequence[tuple[PartialResult, RowSlice]]) -> None:
        lines = []
        for partial, part in parts:
            known = max(0, partial.next - part.start)  # added before
            count = part.stop - part.start - known
            if count > 0:
                lines.append(partial.line(part.cell + known * part.request.width, partial.count, count))
                partial.next = part.stop
                partial.count = partial.count + count
        if lines:
            self._pushed = self._launch(_add_kernel, lines, CELL=CELL, FIRST=FIRST, COUNT=COUNT)

    def join(self) -> None:
        if self._pushed is not None:
            torch.cuda.current_stream(self._cells.device).wait_event(self._pushed)
            self._pushed = None

    def finish(self, partial: PartialResult, rows: int, counted: int, arena: Arena, place: int) -> int:
        del rows
        sure = max(0, partial.count - partial.hold)
        if sure > counted:
            raise RequestFailed(f"the engine computed {sure - counted} rows too many before it heard of the end")
        counted = min(counted, partial.count)
        if counted:
            self._finished.append(partial)
            self._ending.append(partial.line(arena.at(place, partial.total.nbytes), sure, counted))
        return counted

    def flush(self) -> None:
        """Return when all results are written."""
        if self._ending:
            self._launch(_end_kernel, self._ending, TARGET=TARGET, SURE=SURE, COUNTED=COUNTED)
        if self._finished and self._side is not None:
            self._side.synchronize()
        for partial in self._finished:
            self.release(partial)
        self._ending = []
        self._finished = []

    def release(self, partial: PartialResult) -> None:
        """Keep the memory for another request, whose kernels run later on the same stream."""
        if self._spare_bytes + partial.nbytes > _MAX_SPARE_BYTES:
            # of requests that ended earlier
            self._spare = {}
            self._spare_bytes = 0
        if partial.nbytes <= _MAX_SPARE_BYTES:
            self._spare.setdefault((partial.total.shape[0], partial.hold), []).append(partial)
            self._spare_bytes += partial.nbytes

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Launch kernels and allocate memory on the side stream."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def _launch(self, kernel: triton.JITFunction, lines: list[list[int]], **known: int) -> torch.cuda.Event | None:
        """Launch a kernel on the side stream behind all forwards so far; return an event after it."""
        hidden = self._cells.shape[1]
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        grid = (len(lines), max(line[WIDTH] for line in lines), triton.cdiv(hidden, block))
        done: torch.cuda.Event | None = None
        if self._side is not None:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._cells.device))
            self._side.wait_event(done)
        with self._on_side_stream():
            work = torch.from_numpy(np.array(lines, dtype=np.int64)).to(self._cells.device, non_blocking=True)
            kernel[grid](  # type: ignore[index]
                self._cells, work, hidden, BLOCK=block, LINE=_LINE, TOTAL=TOTAL, RING=RING, WIDTH=WIDTH, HOLD=HOLD,
                LAST=LAST, **known, num_warps=4,
            )  # fmt: skip
            if done is not None:
                done = torch.cuda.Event()
                done.record()
        return done
