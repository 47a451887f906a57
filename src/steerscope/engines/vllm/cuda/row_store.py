"""Store captured rows from a tap on CUDA.

Looking up the cell of a token's row costs a tap more than writing the row. So in decoding steps without steering a tap
leaves the rows of all tokens on a stage, at the token's own number, and one kernel moves them to their cells after the
last tap of the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.worker.index_layout import CELL, GROUP, STRIDE, WATCHED

_MAX_STAGE_BYTES = 64 << 20


@triton.jit
def cell_of(mine, group, order, before, CELL: tl.constexpr):
    """Return (place in the group, whether before steering, cell) of a token; loaded early, because loads are slow."""
    return tl.load(order + group), tl.load(before + group).to(tl.int32), tl.load(mine + CELL)


@triton.jit
def store_row(early, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED: tl.constexpr):
    """Store the row of a token, before or after its ops, if its group captures at this tap; and once more, after its
    ops, if lenses read the group at this tap."""
    if place >= WATCHED - 1:
        place -= WATCHED
        tl.store(pool + (token + first_watched) * hidden + at, late, mask=inside)
    if place >= 0:
        row = tl.where(was != 0, early, late)
        tl.store(pool + (cell + place).to(tl.int64) * hidden + at, row, mask=inside)


@triton.jit
def advance(mine, CELL: tl.constexpr, STRIDE: tl.constexpr):
    """Move the token's cell to that of its next row, in the last tap of a step."""
    stride = tl.load(mine + STRIDE)
    if stride != 0:
        tl.store(mine + CELL, tl.load(mine + CELL) + stride)


@triton.jit
def end_kernel(index, index_width, CELL: tl.constexpr, STRIDE: tl.constexpr):
    advance(index + tl.program_id(0).to(tl.int64) * index_width, CELL, STRIDE)


@triton.jit
def gather_kernel(
    stage, pool, index, orders, rows, index_width, hidden, groups, first_watched,
    BLOCK: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """Move one row of one tap to its cell, after the last tap has moved the token's cell on."""
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    mine = index + token * index_width
    group, cell = tl.load(mine + GROUP), tl.load(mine + CELL) - tl.load(mine + STRIDE)
    row = tl.load(stage + (tap * rows + token) * hidden + at, mask=inside, other=0.0)
    place = tl.load(orders + tap * groups + group)
    store_row(row, row, token, place, 0, cell, pool, at, inside, hidden, first_watched, WATCHED)


def make_stage(taps: int, max_requests: int, cells: Tensor) -> Tensor:
    """Return [taps, rows, hidden] for one row of each decoding request, or for as many as there is memory."""
    hidden, size = cells.shape[1], cells.dtype.itemsize
    rows = min(max_requests, _MAX_STAGE_BYTES // max(1, taps * hidden * size))
    return torch.zeros(taps, rows, hidden, dtype=cells.dtype, device=cells.device)


def gather(stage: Tensor, pool: Tensor, index: Tensor, orders: Tensor, tokens: int) -> None:
    """Move the rows that all taps have left of the first tokens to their cells."""
    taps, rows, hidden = stage.shape
    block = triton.next_power_of_2(hidden)
    gather_kernel[(tokens, taps)](  # type: ignore[index]
        stage, pool, index, orders, rows, index.shape[1], hidden, orders.shape[1], pool.shape[0] - index.shape[0],
        BLOCK=block, CELL=CELL, GROUP=GROUP, STRIDE=STRIDE, WATCHED=WATCHED, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
