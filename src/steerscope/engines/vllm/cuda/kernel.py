"""The tap on CUDA: one Triton program per token. A token without work costs one load; any other is read once, steered
in registers, and written once. Its arithmetic is `core.equation.change`.

This is the kernel of a tap alone; `fused_norm` also computes the model's next norm.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, FLAG, GROUP, PRECOMPUTED, STRIDE, WATCHED


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
def group_and_ops(mine, STEER: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr):
    """Return the group of a token, and non-zero if the token has ops."""
    busy = 0
    if STEER:
        for k in tl.static_range(COLUMNS):
            busy |= tl.load(mine + ENTRIES + 1 + 3 * k)
    return tl.load(mine + GROUP), busy


@triton.jit
def steer_row(
    d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Return `d` plus the change that the ops make to the stream `h`."""
    start = h.to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(COLUMNS):
        number = tl.load(mine + ENTRIES + 1 + 3 * k)
        slot = tl.load(mine + ENTRIES + 3 * k).to(tl.int64)
        if number != 0:
            v = tl.load(vectors + slot * hidden + at, mask=inside, other=0.0)
            five = coefficients + number * 5
            c, s, m = tl.load(five), tl.load(five + 1), tl.load(five + 2)
            lo, hi = tl.load(five + 3), tl.load(five + 4)
            gate = tl.load(gates + tl.load(mine + ENTRIES + 2 + 3 * k))
            if (gate != 0) & ((c != 0) | (s != 0) | (m != 0)):
                p = 0.0
                if (s != 0) | (m != 0):  # a sum over all threads, which Add does not need
                    p = tl.sum((start + total) * v)
                low = tl.maximum(s * p, lo, propagate_nan=tl.PropagateNan.ALL)
                clipped = tl.minimum(low, hi, propagate_nan=tl.PropagateNan.ALL)
                total += gate * (c + clipped - m * p) * v
    return (d.to(tl.float32) + total).to(d.dtype)


@triton.jit
def overflows(x, kind):
    """Return whether a row, rounded, holds an infinity or NaN."""
    return tl.sum(tl.where(tl.abs(x.to(kind).to(tl.float32)) < float("inf"), 0, 1)) > 0


@triton.jit
def _kernel(
    delta, residual, pool, index, vectors, coefficients, gates, order, before, overflow_flags,
    delta_stride, residual_stride, index_width, hidden, first_watched,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, STEER: tl.constexpr, CAPTURE: tl.constexpr,
    FLAG: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr, WATCHED: tl.constexpr,
    PRECOMPUTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    mine = index + token * index_width
    group, busy = group_and_ops(mine, STEER, COLUMNS, GROUP, ENTRIES)
    if (group != 0) | (busy != 0):
        at = tl.arange(0, BLOCK)
        inside = at < hidden
        kind = delta.dtype.element_ty
        d = tl.load(delta + token * delta_stride + at, mask=inside, other=0.0)
        h = d
        r = d
        if RESIDUAL:
            r = tl.load(residual + token * residual_stride + at, mask=inside, other=0.0)
            h = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
        if busy != 0:
            d = steer_row(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
            x = d.to(tl.float32)
            if RESIDUAL:
                x += r.to(tl.float32)
            if overflows(x, kind):  # as `tap._clear_overflow`
                tl.store(overflow_flags + (tl.load(mine + FLAG) & (PRECOMPUTED - 1)), 1)
                d = tl.zeros([BLOCK], dtype=kind)
                if RESIDUAL:
                    r = d
                    tl.store(residual + token * residual_stride + at, r, mask=inside)
            tl.store(delta + token * delta_stride + at, d, mask=inside)
        if CAPTURE:
            late = d
            if RESIDUAL:
                late = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
            place, was, cell = cell_of(mine, group, order, before, CELL)
            store_row(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)


def cuda_tap(delta: Tensor, residual: Tensor | None, *arguments: Any) -> None:
    tables, (steer, capture) = tap.TapTables(*arguments[:-2]), arguments[-2:]
    pool = tables.pool
    index = tables.step_index
    mode = tap.mode_now()
    steer = steer and mode.steer
    capture = capture and mode.capture
    if not (steer or capture):
        return
    tokens, hidden = check_shapes(delta, residual, index)
    block = triton.next_power_of_2(hidden)
    residual_stride = residual.stride(0) if residual is not None else 0
    sizes = delta.stride(0), residual_stride, index.shape[1], hidden, pool.shape[0] - index.shape[0]
    _kernel[(tokens,)](  # type: ignore[index]
        delta, residual if residual is not None else delta, *tables, *sizes,
        COLUMNS=(index.shape[1] - ENTRIES) // 3, BLOCK=block, RESIDUAL=residual is not None, STEER=steer,
        CAPTURE=capture, FLAG=FLAG, CELL=CELL, GROUP=GROUP, ENTRIES=ENTRIES, WATCHED=WATCHED, PRECOMPUTED=PRECOMPUTED,
        num_warps=n_warps(block),
    )  # fmt: skip


def check_shapes(delta: Tensor, residual: Tensor | None, index: Tensor) -> tuple[int, int]:
    """Return the numbers of tokens and of hidden dimensions."""
    tokens, hidden = delta.shape
    if tokens > index.shape[0]:
        raise ValueError(f"a step has {tokens} tokens, and the tap was made for {index.shape[0]}")
    if delta.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the layer's output is not contiguous in its last dimension")
    return tokens, hidden


def n_warps(block: int) -> int:
    return max(1, min(16, block // 256))


def cuda_end(delta: Tensor, index: Tensor, overflow_flags: Tensor) -> None:
    del overflow_flags
    if tap.mode_now().capture:
        end_kernel[(delta.shape[0],)](index, index.shape[1], CELL=CELL, STRIDE=STRIDE, num_warps=1)  # type: ignore[index]
