"""How a tap on CUDA keeps rows. Where a token's row goes is looked up, and in a decoding step every answer from memory
costs a tap more than the row does. So where nobody steers a tap leaves the rows of all tokens on a stage, at a place
that only the token's number leads to, and one kernel brings them to their cells behind the last tap of the step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.worker.step_index import CELL, GROUP, STRIDE
from steerscope.engines.vllm.worker.tap import WATCHED

_MOST = 64 << 20  # bytes of a stage


@triton.jit
def where(mine, group, order, before, CELL: tl.constexpr):
    """Whether and where a token of this group is kept: asked for early, since the answers come one after the other."""
    return tl.load(order + group), tl.load(before + group).to(tl.int32), tl.load(mine + CELL)


@triton.jit
def kept(early, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED: tl.constexpr):
    """Write the row of this token, as it was before its ops or as it is after them, if its group captures here; and
    once more, as it is, if the group is watched here."""
    if place >= WATCHED - 1:
        place -= WATCHED
        tl.store(pool + (token + first_watched) * hidden + at, late, mask=inside)
    if place >= 0:
        row = tl.where(was != 0, early, late)
        tl.store(pool + (cell + place).to(tl.int64) * hidden + at, row, mask=inside)


@triton.jit
def advance(mine, CELL: tl.constexpr, STRIDE: tl.constexpr):
    """The last tap of a step moves the token's cell on, to where its next row goes if nobody says otherwise."""
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
    """One row of one tap, behind the tap that has moved its cell on."""
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    mine = index + token * index_width
    group, cell = tl.load(mine + GROUP), tl.load(mine + CELL) - tl.load(mine + STRIDE)
    row = tl.load(stage + (tap * rows + token) * hidden + at, mask=inside, other=0.0)
    place = tl.load(orders + tap * groups + group)
    kept(row, row, token, place, 0, cell, pool, at, inside, hidden, first_watched, WATCHED)


def make_stage(taps: int, requests: int, cells: Tensor) -> Tensor:
    """For the rows of so many decoding requests, or as many as there is memory for: [taps, rows, hidden]."""
    hidden, size = cells.shape[1], cells.dtype.itemsize
    rows = min(requests, _MOST // max(1, taps * hidden * size))
    return torch.zeros(taps, rows, hidden, dtype=cells.dtype, device=cells.device)


def gather(stage: Tensor, pool: Tensor, index: Tensor, orders: Tensor, tokens: int) -> None:
    """The rows that all taps have left of so many tokens, to their cells."""
    taps, rows, hidden = stage.shape
    block = triton.next_power_of_2(hidden)
    gather_kernel[(tokens, taps)](  # type: ignore[index]
        stage, pool, index, orders, rows, index.shape[1], hidden, orders.shape[1], pool.shape[0] - index.shape[0],
        BLOCK=block, CELL=CELL, GROUP=GROUP, STRIDE=STRIDE, WATCHED=WATCHED, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
