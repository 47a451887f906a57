"""The tap and the model's next RMS norm as one kernel on CUDA, because a further kernel costs a decoding step a few µs.

With few tokens the device is mostly idle, and the time goes to loads that wait for each other. So loads that others
depend on (which vector, which cell) come first, values are loaded before it is known whether they are used, and rows
are stored last, so that the norm does not wait for them. Ops of decoding tokens may be precomputed
(`precomputed_ops`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.cuda.kernel import (
    advance,
    cell_of,
    check_shapes,
    cuda_end,
    cuda_tap,
    group_and_ops,
    n_warps,
    overflows,
    steer_row,
    store_row,
)
from steerscope.engines.vllm.cuda.precomputed_ops import BEFORE, PLACE, TAIL
from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.index_layout import (
    CELL,
    ENTRIES,
    FLAG,
    GROUP,
    PRECOMPUTED,
    STRIDE,
    WATCHED,
)


@triton.jit
def _steer_with(d, h, v, five):
    """Return `d` steered by one op with vector `v` and the coefficients at `five`."""
    c, s, m, lo, hi = tl.load(five), tl.load(five + 1), tl.load(five + 2), tl.load(five + 3), tl.load(five + 4)
    p = tl.sum(h.to(tl.float32) * v)
    low = tl.maximum(s * p, lo, propagate_nan=tl.PropagateNan.ALL)
    clipped = tl.minimum(low, hi, propagate_nan=tl.PropagateNan.ALL)
    return (d.to(tl.float32) + (c + clipped - m * p) * v).to(d.dtype)


@triton.jit
def _steer_precomputed(
    d, h, a, row_kind, five, mine, vectors, coefficients, gates, at, inside, hidden,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Return `d` steered by the precomputed ops of the given kind, or by ops that are looked up."""
    if row_kind == 1.0:
        d = (d.to(tl.float32) + a).to(d.dtype)
    elif row_kind == 2.0:
        d = _steer_with(d, h, a, five)
    elif row_kind != 0.0:
        d = steer_row(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
    return d


@triton.jit
def _normed(x, squares, w, hidden, epsilon, ADDS_ONE: tl.constexpr):
    """Return vLLM's norm of a stream that is not rounded."""
    y = x * tl.math.rsqrt(squares / hidden + epsilon)
    if ADDS_ONE:
        y = y * (w.to(tl.float32) + 1.0)
    else:
        y = y.to(w.dtype).to(tl.float32) * w.to(tl.float32)
        y = y.to(w.dtype)
    return y


@triton.jit
def fused_kernel(
    delta, residual, weight, normed, stream, precomputed, pool, index, vectors, coefficients, gates, order,
    before, overflow_flags, precomputed_rows, delta_stride, residual_stride, index_width, hidden, first_watched,
    epsilon,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ADDS_ONE: tl.constexpr, STEER: tl.constexpr, CAPTURE: tl.constexpr,
    LAST: tl.constexpr, LARGE: tl.constexpr, FLAG: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, ENTRIES: tl.constexpr, WATCHED: tl.constexpr, PRECOMPUTED: tl.constexpr, TAIL: tl.constexpr,
    PLACE: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Run the tap and vLLM's norm: the stream is summed in float32, stored rounded, and normed unrounded."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    kind = delta.dtype.element_ty
    mine = index + token * index_width
    group, busy, place, was, cell = 0, 0, -1, 0, 0
    ready, a, row_kind, near, is_ready = precomputed, 0.0, -1.0, False, False
    if STEER or CAPTURE:
        group, busy = group_and_ops(mine, STEER, COLUMNS, GROUP, ENTRIES)
    d = tl.load(delta + token * delta_stride + at, mask=inside, other=0.0)
    r = tl.load(residual + token * residual_stride + at, mask=inside, other=0.0)
    if STEER or CAPTURE:
        ready = precomputed + token * (hidden + TAIL)
        near = token < precomputed_rows
        is_ready = near & (tl.load(mine + FLAG) >= PRECOMPUTED)
        if STEER:
            a = tl.load(ready + at, mask=inside & near, other=0.0)
            row_kind = tl.where(is_ready, tl.load(ready + hidden, mask=near, other=0.0), -1.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    if CAPTURE:
        cell = tl.load(mine + CELL)
        place = tl.load(ready + hidden + PLACE, mask=near, other=0.0).to(tl.int32)
        was = tl.load(ready + hidden + BEFORE, mask=near, other=0.0).to(tl.int32)
    h = d
    if STEER:
        h = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
        if busy != 0:
            d = _steer_precomputed(
                d, h, a, row_kind, ready + hidden + 1, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS,
                BLOCK, ENTRIES,
            )  # fmt: skip
    x = d.to(tl.float32) + r.to(tl.float32)
    tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
    if STEER and CAPTURE:  # noqa: SIM102 # a constant of the compiler stands alone
        if is_ready:  # while the sum is computed
            store_row(h, x.to(kind), token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    squares = tl.sum(x * x)
    if STEER:
        large = (busy != 0) & ~(squares < LARGE)  # a cheap test: only such rows can hold inf or NaN
        if large:
            lost = overflows(x, kind)
            if lost:  # as `tap._clear_overflow`
                tl.store(overflow_flags + (tl.load(mine + FLAG) & (PRECOMPUTED - 1)), 1)
                x = tl.zeros([BLOCK], dtype=tl.float32)
                squares = tl.sum(x * x)
                tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
                if CAPTURE:  # noqa: SIM102
                    if is_ready:
                        store_row(
                            h, x.to(kind), token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED
                        )
    y = _normed(x, squares, w, hidden, epsilon, ADDS_ONE)
    tl.store(normed + token * hidden + at, y.to(kind), mask=inside)
    if CAPTURE:
        late = x.to(kind)
        if not STEER:
            h = late
            if is_ready:
                store_row(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
        if (group != 0) & ~is_ready:
            place, was, cell = cell_of(mine, group, order, before, CELL)
            store_row(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    if LAST and CAPTURE:
        advance(mine, CELL, STRIDE)


def _large(dtype: torch.dtype) -> float:
    """Return a sum of squares below which no value of a row can be an infinity in this dtype."""
    return min(torch.finfo(dtype).max ** 2, torch.finfo(torch.float32).max)


def cuda_tap_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, epsilon: float, adds_one: bool, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Run a tap and the norm. The further arguments are precomputed ops, `TapTables`, and whether to steer, to capture,
    and to end the step."""
    precomputed = arguments[0]
    tables, (steer, capture, last) = tap.TapTables(*arguments[1:-3]), arguments[-3:]
    pool = tables.pool
    index = tables.step_index
    mode = tap.mode_now()
    tokens, hidden = check_shapes(delta, residual, index)
    normed, stream = (torch.empty(tokens, hidden, dtype=delta.dtype, device=delta.device) for _ in range(2))
    block = triton.next_power_of_2(hidden)
    sizes = delta.stride(0), residual.stride(0), index.shape[1], hidden, pool.shape[0] - index.shape[0], epsilon
    fused_kernel[(tokens,)](  # type: ignore[index]
        delta, residual, weight, normed, stream, precomputed, *tables, precomputed.shape[0], *sizes,
        COLUMNS=(index.shape[1] - ENTRIES) // 3, BLOCK=block, ADDS_ONE=adds_one, STEER=steer and mode.steer,
        CAPTURE=capture and mode.capture, LAST=last, LARGE=_large(delta.dtype), FLAG=FLAG, CELL=CELL, GROUP=GROUP,
        STRIDE=STRIDE, ENTRIES=ENTRIES, WATCHED=WATCHED, PRECOMPUTED=PRECOMPUTED, TAIL=TAIL, PLACE=PLACE,
        BEFORE=BEFORE, num_warps=n_warps(block),
    )  # fmt: skip
    return normed, stream


def register() -> None:
    """Register the kernels as the CUDA implementations of the operators, once."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("steerscope::tap", "CUDA"):
        tap.library.impl("tap", cuda_tap, "CUDA")
        tap.library.impl("end", cuda_end, "CUDA")
        tap.library.impl("tap_norm", cuda_tap_norm, "CUDA")
