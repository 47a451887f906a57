"""Reductions on a GPU. A request has its sum in float32 and a ring of its newest rows; one launch takes in the rows of
every request of a step, and one writes the results of all that have ended, straight into the clients' memory. All this
on a stream of its own, beside what samples the step's tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.cuda.prefill_sums import ROWS
from steerscope.engines.vllm.cuda.streams import Here, aside
from steerscope.engines.vllm.wire import WireCapture
from steerscope.engines.vllm.worker.requests import Slice
from steerscope.specs.errors import RequestFailed

# Columns of a sheet: where the sum and the ring are, which rows, and where a result goes.
TOTAL, RING, WIDTH, HOLD, LAST, CELL, FIRST, COUNT = range(8)
SUMMED = 8  # of the rows that come in: so many, the first ones, are in sums before the others' cells
TARGET, SURE, COUNTED, COUNTER = CELL, FIRST, COUNT, SUMMED  # of those that end; no counter: 0
_LINE = 9
_BLOCK = 1024
_SPARE = 64 << 20  # bytes, at most


@triton.jit
def _joined(total, row, last):
    """The sum with one more row, or that row."""
    return tl.where(last != 0, row.to(tl.float32), total + row.to(tl.float32))


@triton.jit
def _take(
    cells, sheet, hidden, BLOCK: tl.constexpr, LINE: tl.constexpr, TOTAL: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, HOLD: tl.constexpr, LAST: tl.constexpr, CELL: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + count) of a request come in. Those that are no longer among the newest are summed: from the
    ring, then what the taps have summed, then from the rows themselves; the others take their places in the ring."""
    mine = sheet + tl.program_id(0) * LINE
    tap = tl.program_id(1)
    width = tl.load(mine + WIDTH)
    if tap < width:
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < hidden
        hold, last = tl.load(mine + HOLD), tl.load(mine + LAST)
        first, count, summed = tl.load(mine + FIRST), tl.load(mine + COUNT), tl.load(mine + SUMMED)
        sums = tl.load(mine + TOTAL).to(tl.pointer_type(tl.float32)) + tap * hidden + at
        ring = tl.load(mine + RING).to(cells.dtype) + tap * hidden + at
        runs, cell = tl.cdiv(summed, ROWS), tl.load(mine + CELL)
        ready = (cells + (cell - (runs * width - tap) * SPAN) * hidden).to(tl.pointer_type(tl.float32)) + at
        rows = cells + (cell + tap - summed * width) * hidden + at
        total = tl.load(sums, mask=inside & (first > 0), other=0.0)
        for i in range(tl.maximum(first - hold, 0), tl.minimum(first, first + count - hold)):
            total = _joined(total, tl.load(ring + i % hold * width * hidden, mask=inside, other=0.0), last)
        for i in range(0, runs):  # a run is a row of float32 for each tap
            total += tl.load(ready + i * width * hidden, mask=inside, other=0.0)
        for i in range(summed, count - hold):
            total = _joined(total, tl.load(rows + i * width * hidden, mask=inside, other=0.0), last)
        tl.store(sums, total, mask=inside)
        for i in range(tl.maximum(count - hold, 0), count):
            row = tl.load(rows + i * width * hidden, mask=inside, other=0.0)
            tl.store(ring + (first + i) % hold * width * hidden, row, mask=inside)


@triton.jit
def _end(
    cells, sheet, hidden, BLOCK: tl.constexpr, LINE: tl.constexpr, TOTAL: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, HOLD: tl.constexpr, LAST: tl.constexpr, TARGET: tl.constexpr, SURE: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The sum holds `sure` rows; those up to `counted` are in the ring."""
    mine = sheet + tl.program_id(0) * LINE
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
            total = _joined(total, tl.load(ring + i % hold * width * hidden, mask=inside, other=0.0), last)
        if last == 0:
            total /= counted
        target = tl.load(mine + TARGET).to(tl.pointer_type(tl.float32))
        tl.store(target + tap * hidden + at, total, mask=inside)


@triton.jit
def _tell(sheet, LINE: tl.constexpr, COUNTED: tl.constexpr, COUNTER: tl.constexpr):
    """How many rows a result stands for; behind it, since the order of kernels is that of their writes."""
    mine = sheet + tl.program_id(0) * LINE
    tl.store(tl.load(mine + COUNTER).to(tl.pointer_type(tl.int64)), tl.load(mine + COUNTED))


@dataclass(slots=True)
class Held:
    """Of one request."""

    total: torch.Tensor
    ring: torch.Tensor
    hold: int
    last: bool
    next: int = 0  # positions below this were taken in
    count: int = 0  # so many of them
    foretold: int = 0  # the result of so many is where it belongs, or on its way

    def line(self, cell: int, first: int, count: int, summed: int = 0) -> list[int]:
        """Of a sheet; of those that end, `cell` is the target, and so on."""
        where = self.total.data_ptr(), self.ring.data_ptr()
        return [*where, self.total.shape[0], self.hold, int(self.last), cell, first, count, summed]

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + self.ring.nbytes


class DeviceReductions:
    def __init__(self, cells: torch.Tensor) -> None:
        self._cells = cells
        self._ending: list[list[int]] = []
        self._kept: list[Held] = []  # until the device has done with them
        self._fence: torch.cuda.Event | None = None  # behind results that nobody has asked for
        self._spare: dict[tuple[int, int], list[Held]] = {}  # by width and hold: whose memory may be used again
        self._spared = 0  # bytes of it
        self._side = torch.cuda.Stream(cells.device) if cells.is_cuda else None
        self._here = Here(cells.device) if cells.is_cuda else None
        self._pushed: torch.cuda.Event | None = None  # behind rows whose cells the next forward may write to

    def start(self, capture: WireCapture, width: int) -> Held:
        hidden, device, last = self._cells.shape[1], self._cells.device, capture.reduce == "last"
        if spare := self._spare.get((width, capture.hold)):
            used = spare.pop()
            self._spared -= used.nbytes
            return Held(used.total, used.ring, capture.hold, last)
        with self._beside():  # whose memory it is
            total = torch.empty(width, hidden, dtype=torch.float32, device=device)  # its first rows find nothing there
            ring = torch.empty(max(1, capture.hold), width, hidden, dtype=self._cells.dtype, device=device)
        return Held(total, ring, capture.hold, last)

    def push(self, parts: Sequence[tuple[Held, Slice]]) -> None:
        lines = []
        for held, part in parts:
            known = max(0, held.next - part.start)  # came before
            count = part.stop - part.start - known
            if known and part.summed:
                raise RequestFailed("rows that came before came again in sums")
            if count > 0:
                lines.append(held.line(part.cell + known * part.asker.width, held.count, count, part.summed))
                held.next, held.count = part.stop, held.count + count
        if lines:
            self._pushed = self._launch(
                _take, lines, CELL=CELL, FIRST=FIRST, COUNT=COUNT, SUMMED=SUMMED, ROWS=ROWS,
                SPAN=4 // self._cells.itemsize,
            )  # fmt: skip

    def join(self) -> None:
        if self._pushed is not None and self._here is not None:
            self._here().wait_event(self._pushed)
            self._pushed = None

    def foretell(self, ends: Sequence[tuple[Held, int, Arena, int, int]]) -> None:
        """Behind the last forward, while the last token is sampled."""
        lines = []
        for held, counted, arena, place, counter in ends:
            if held.count == counted:
                where = arena.at(place, held.total.nbytes)
                lines.append(held.line(where, max(0, counted - held.hold), counted, arena.at(counter, 8)))
                held.foretold = counted
        if lines:
            self._fence = self._launch(_end, lines, tell=True, TARGET=TARGET, SURE=SURE, COUNTED=COUNTED)

    def fence(self) -> torch.cuda.Event | None:
        if self._fence is not None and self._fence.query():
            self._fence = None
        return self._fence

    def finish(self, held: Held, rows: int, counted: int, arena: Arena, place: int) -> int:
        del rows
        sure = max(0, held.count - held.hold)
        if sure > counted:
            raise RequestFailed(f"the engine ran {sure - counted} rows too far before it heard of the end")
        counted = min(counted, held.count)
        if counted:
            self._kept.append(held)
            if held.foretold != counted:
                self._ending.append(held.line(arena.at(place, held.total.nbytes), sure, counted))
        return counted

    def flush(self) -> None:
        """The results are where they belong, and those that were foretold, wanted or not."""
        if self._ending:
            self._launch(_end, self._ending, TARGET=TARGET, SURE=SURE, COUNTED=COUNTED)
        if (self._kept or self._fence) and self._side is not None:
            self._side.synchronize()
        self._fence = None
        for held in self._kept:
            self.release(held)
        self._ending, self._kept = [], []

    def release(self, held: Held) -> None:
        """Whoever has its memory next comes behind it, on the same stream."""
        if self._spared + held.nbytes > _SPARE:
            self._spare, self._spared = {}, 0  # of requests that ended longer ago
        if held.nbytes <= _SPARE:
            self._spare.setdefault((held.total.shape[0], held.hold), []).append(held)
            self._spared += held.nbytes

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched or made belongs to the side stream."""
        if self._side is None or self._here is None:
            yield
            return
        with aside(self._here(), self._side):
            yield

    def _launch(
        self, kernel: triton.JITFunction, lines: list[list[int]], tell: bool = False, **known: int
    ) -> torch.cuda.Event | None:
        """On the side stream, behind every forward so far; an event behind it."""
        hidden = self._cells.shape[1]
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        grid = (len(lines), max(line[WIDTH] for line in lines), triton.cdiv(hidden, block))
        done: torch.cuda.Event | None = None
        if self._side is not None and self._here is not None:
            done = torch.cuda.Event()
            done.record(self._here())
            self._side.wait_event(done)
        with self._beside():
            sheet = torch.from_numpy(np.array(lines, dtype=np.int64)).to(self._cells.device, non_blocking=True)
            kernel[grid](  # type: ignore[index]
                self._cells, sheet, hidden, BLOCK=block, LINE=_LINE, TOTAL=TOTAL, RING=RING, WIDTH=WIDTH, HOLD=HOLD,
                LAST=LAST, **known, num_warps=4,
            )  # fmt: skip
            if tell:
                _tell[(len(lines),)](sheet, LINE=_LINE, COUNTED=COUNTED, COUNTER=COUNTER)  # type: ignore[index]
            if done is not None:
                done = torch.cuda.Event()
                done.record()
        return done
