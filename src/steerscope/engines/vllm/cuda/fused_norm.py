"""The tap and the model's next RMS norm as one kernel on CUDA: in a decoding step of a few µs per kernel, one that is
not there is the only one that costs nothing.

With few tokens the device is mostly idle, and time is what reads wait for each other: the answers a tap waits for
(which vector, which cell) are asked for first, what may be wanted is read before it is known whether anybody wants it,
and rows are kept last, so that the norm does not wait for them. What a tap does to decoding tokens may lie ready
(`laying`): then there is nothing to look up. With many tokens time is what memory can carry, and rows of which only the
mean is wanted are summed where they are (`summing`): to keep them would cost a quarter of what the norm does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.cuda.kernel import asked, checked, is_lost, steered, warps
from steerscope.engines.vllm.cuda.precomputed_ops import BEFORE, PLACE, TAIL
from steerscope.engines.vllm.cuda.prefill_sums import FEW, LINE, ROWS
from steerscope.engines.vllm.cuda.row_store import advance, gather, kept, where
from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.step_index import ASKER, CELL, ENTRIES, GROUP, LAID, STRIDE

_TILE = 2  # tokens that are summed at once


@triton.jit
def _steered_by_one(d, h, v, five):
    """What the ops do, by one that lies ready."""
    c, s, m, lo, hi = tl.load(five), tl.load(five + 1), tl.load(five + 2), tl.load(five + 3), tl.load(five + 4)
    p = tl.sum(h.to(tl.float32) * v)
    low = tl.maximum(s * p, lo, propagate_nan=tl.PropagateNan.ALL)
    clipped = tl.minimum(low, hi, propagate_nan=tl.PropagateNan.ALL)
    return (d.to(tl.float32) + (c + clipped - m * p) * v).to(d.dtype)


@triton.jit
def _ready(
    d, h, a, what, five, mine, vectors, coefficients, gates, at, inside, hidden,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The same by what lies ready, as far as it does."""
    if what == 1.0:
        d = (d.to(tl.float32) + a).to(d.dtype)
    elif what == 2.0:
        d = _steered_by_one(d, h, a, five)
    elif what != 0.0:
        d = steered(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
    return d


@triton.jit
def _normed(x, squares, w, hidden, epsilon, BESIDE_ONE: tl.constexpr):
    """vLLM's norm of a stream that is not rounded."""
    y = x * tl.math.rsqrt(squares / hidden + epsilon)
    if BESIDE_ONE:
        y = y * (w.to(tl.float32) + 1.0)
    else:
        y = y.to(w.dtype).to(tl.float32) * w.to(tl.float32)
        y = y.to(w.dtype)
    return y


@triton.jit
def few_kernel(
    delta, residual, weight, normed, stream, laid, staged, pool, index, vectors, coefficients, gates, order, before,
    faults, laid_rows, delta_stride, residual_stride, index_width, hidden, first_watched, epsilon,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BESIDE_ONE: tl.constexpr, STEER: tl.constexpr, CAPTURE: tl.constexpr,
    LAST: tl.constexpr, LARGE: tl.constexpr, ASKER: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, ENTRIES: tl.constexpr, WATCHED: tl.constexpr, LAID: tl.constexpr, TAIL: tl.constexpr,
    PLACE: tl.constexpr, BEFORE: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """The tap, then vLLM's norm: the stream is summed in float32, handed on rounded, and normed unrounded."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    kind = delta.dtype.element_ty
    mine = index + token * index_width
    group, busy, place, was, cell = 0, 0, -1, 0, 0
    ready, a, what, near, lies = laid, 0.0, -1.0, False, False
    if STEER or CAPTURE:
        group, busy = asked(mine, STEER, COLUMNS, GROUP, ENTRIES)
    d = tl.load(delta + token * delta_stride + at, mask=inside, other=0.0)
    r = tl.load(residual + token * residual_stride + at, mask=inside, other=0.0)
    if STEER or CAPTURE:
        ready = laid + token * (hidden + TAIL)
        near = token < laid_rows
        lies = near & (tl.load(mine + ASKER) >= LAID)
        if STEER:
            a = tl.load(ready + at, mask=inside & near, other=0.0)
            what = tl.where(lies, tl.load(ready + hidden, mask=near, other=0.0), -1.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    if CAPTURE:
        cell = tl.load(mine + CELL)
        place = tl.load(ready + hidden + PLACE, mask=near, other=0.0).to(tl.int32)
        was = tl.load(ready + hidden + BEFORE, mask=near, other=0.0).to(tl.int32)
    h = d
    if STEER:
        h = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
        if busy != 0:
            d = _ready(
                d, h, a, what, ready + hidden + 1, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS,
                BLOCK, ENTRIES,
            )  # fmt: skip
    x = d.to(tl.float32) + r.to(tl.float32)
    tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
    if STAGED:
        tl.store(staged + token * hidden + at, x.to(kind), mask=inside)
    if STEER and CAPTURE:  # noqa: SIM102 # what is known when it is compiled stands alone
        if lies:  # while the sum is waited for
            kept(h, x.to(kind), token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    squares = tl.sum(x * x)
    if STEER:
        large = (busy != 0) & ~(squares < LARGE)  # it may hold what is not finite: this is at hand, the rest is rare
        if large:
            lost = is_lost(x, kind)
            if lost:  # as in `tap._silence`
                tl.store(faults + (tl.load(mine + ASKER) & (LAID - 1)), 1)
                x = tl.zeros([BLOCK], dtype=tl.float32)
                squares = tl.sum(x * x)
                tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
                if CAPTURE:  # noqa: SIM102
                    if lies:
                        kept(h, x.to(kind), token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    y = _normed(x, squares, w, hidden, epsilon, BESIDE_ONE)
    tl.store(normed + token * hidden + at, y.to(kind), mask=inside)
    if CAPTURE:
        late = x.to(kind)
        if not STEER:
            h = late
            if lies:
                kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
        if (group != 0) & ~lies:
            place, was, cell = where(mine, group, order, before, CELL)
            kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    if LAST and (CAPTURE or STAGED):
        advance(mine, CELL, STRIDE)


@triton.jit
def many_kernel(
    delta, residual, weight, normed, stream, pool, index, vectors, coefficients, gates, order, before, faults,
    delta_stride, residual_stride, index_width, hidden, first_watched, epsilon,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BESIDE_ONE: tl.constexpr, STEER: tl.constexpr, CAPTURE: tl.constexpr,
    LAST: tl.constexpr, LARGE: tl.constexpr, ASKER: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, ENTRIES: tl.constexpr, WATCHED: tl.constexpr, LAID: tl.constexpr,
):  # fmt: skip
    """The same where there is nothing to wait for: others run meanwhile."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    kind = delta.dtype.element_ty
    mine = index + token * index_width
    group, busy, place, was, cell = 0, 0, -1, 0, 0
    if STEER or CAPTURE:
        group, busy = asked(mine, STEER, COLUMNS, GROUP, ENTRIES)
    d = tl.load(delta + token * delta_stride + at, mask=inside, other=0.0)
    r = tl.load(residual + token * residual_stride + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    if CAPTURE:
        place, was, cell = where(mine, group, order, before, CELL)
    h = d
    if STEER:
        h = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
        if busy != 0:
            d = steered(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
    x = d.to(tl.float32) + r.to(tl.float32)
    tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
    squares = tl.sum(x * x)
    if STEER:
        large = (busy != 0) & ~(squares < LARGE)
        if large:
            lost = is_lost(x, kind)
            if lost:
                tl.store(faults + (tl.load(mine + ASKER) & (LAID - 1)), 1)
                x = tl.zeros([BLOCK], dtype=tl.float32)
                squares = tl.sum(x * x)
                tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
    y = _normed(x, squares, w, hidden, epsilon, BESIDE_ONE)
    tl.store(normed + token * hidden + at, y.to(kind), mask=inside)
    if CAPTURE:
        late = x.to(kind)
        if not STEER:
            h = late
        kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
        if LAST:
            advance(mine, CELL, STRIDE)


@triton.jit(do_not_specialize=["tokens", "listed", "covered"])
def sum_kernel(
    delta, residual, weight, normed, stream, runs, pool, index, order,
    tokens, listed, covered, delta_stride, residual_stride, index_width, hidden, first_watched, epsilon,
    BLOCK: tl.constexpr, BESIDE_ONE: tl.constexpr, LAST: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, WATCHED: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The same for the tokens of a run, where nobody steers: those of a list, then such as it does not cover."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)[None, :]
    inside = at < hidden
    kind = delta.dtype.element_ty
    first, count, step, group, cell = covered + (program - listed) * ROWS, ROWS, 1, 0, 0
    if program < listed:
        mine = runs + program * LINE
        first, count, step = tl.load(mine).to(tl.int64), tl.load(mine + 1), tl.load(mine + 2)
        group, cell = tl.load(mine + 3), tl.load(mine + 4)
    w = tl.load(weight + at, mask=inside, other=0.0)
    total = tl.zeros([1, BLOCK], dtype=tl.float32)
    for start in range(0, count, TILE):
        number = (start + tl.arange(0, TILE))[:, None]
        token = first + number * step
        there = (number < count) & (token < tokens)
        whole = there & inside
        d = tl.load(delta + token * delta_stride + at, mask=whole, other=0.0)
        r = tl.load(residual + token * residual_stride + at, mask=whole, other=0.0)
        x = d.to(tl.float32) + r.to(tl.float32)
        row = x.to(kind)
        tl.store(stream + token * hidden + at, row, mask=whole)
        squares = tl.sum(x * x, axis=1, keep_dims=True)
        y = _normed(x, squares, w, hidden, epsilon, BESIDE_ONE)
        tl.store(normed + token * hidden + at, y.to(kind), mask=whole)
        total += tl.sum(row.to(tl.float32), axis=0, keep_dims=True)
        if group == 0:
            mine = index + token * index_width
            place = tl.load(order + tl.load(mine + GROUP, mask=there, other=0))
            at_cell = tl.load(mine + CELL, mask=there, other=0)
            read = place >= WATCHED - 1
            tl.store(pool + (token + first_watched) * hidden + at, row, mask=whole & read)
            place = tl.where(read, place - WATCHED, place)
            tl.store(pool + (at_cell + place).to(tl.int64) * hidden + at, row, mask=whole & (place >= 0))
            if LAST:
                stride = tl.load(mine + STRIDE, mask=there, other=0)
                tl.store(mine + CELL, at_cell + stride, mask=there & (stride != 0))
    if group != 0:
        place = tl.load(order + group)
        if place >= 0:
            out = (pool + (cell + place * SPAN).to(tl.int64) * hidden).to(tl.pointer_type(tl.float32))
            tl.store(out + at, total, mask=inside)


def cuda_tap_norm(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    beside_one: bool,
    laid: Tensor,
    staged: Tensor,
    stage: Tensor,
    orders: Tensor,
    pool: Tensor,
    index: Tensor,
    vectors: Tensor,
    coefficients: Tensor,
    gates: Tensor,
    order: Tensor,
    before: Tensor,
    faults: Tensor,
    steer: bool,
    capture: bool,
    last: bool,
) -> tuple[Tensor, Tensor]:
    doing = tap.come(index)
    steer, capture = steer and doing.steer, capture and doing.capture
    tokens, hidden = checked(delta, residual, index)
    runs = doing.runs
    if runs is not None and (tokens <= FEW or steer or not capture):
        raise ValueError(f"a tap was to sum rows of {tokens} tokens, which it does not where it steers, or has few")
    normed, stream = (torch.empty(tokens, hidden, dtype=delta.dtype, device=delta.device) for _ in range(2))
    block = triton.next_power_of_2(hidden)
    tables = pool, index, vectors, coefficients, gates, order, before, faults
    sizes = delta.stride(0), residual.stride(0), index.shape[1], hidden, pool.shape[0] - index.shape[0], epsilon
    known = {
        "COLUMNS": (index.shape[1] - ENTRIES) // 3, "BLOCK": block, "BESIDE_ONE": beside_one, "STEER": steer,
        "LAST": last, "LARGE": min(torch.finfo(delta.dtype).max ** 2, torch.finfo(torch.float32).max), "ASKER": ASKER,
        "CELL": CELL, "GROUP": GROUP, "STRIDE": STRIDE, "ENTRIES": ENTRIES, "WATCHED": tap.WATCHED, "LAID": LAID,
    }  # fmt: skip
    if tokens <= FEW:
        on_stage = capture and not steer and tokens <= len(staged)
        few_kernel[(tokens,)](  # type: ignore[index]
            delta, residual, weight, normed, stream, laid, staged, *tables, laid.shape[0], *sizes, **known,
            CAPTURE=capture and not on_stage, TAIL=TAIL, PLACE=PLACE, BEFORE=BEFORE, STAGED=on_stage,
            num_warps=warps(block),
        )  # fmt: skip
        if on_stage and last:
            gather(stage, pool, index, orders, tokens)
        return normed, stream
    if runs is None:
        # Mostly nobody has more than one column. Code for several needs so many registers that fewer rows are worked on
        # at a time.
        one = steer and doing.columns == 1
        many_kernel[(tokens,)](  # type: ignore[index]
            delta, residual, weight, normed, stream, *tables, *sizes, **known | ({"COLUMNS": 1} if one else {}),
            CAPTURE=capture, num_warps=warps(block if one else block // 2),
        )  # fmt: skip
        return normed, stream
    programs = len(runs) + max(0, triton.cdiv(tokens - doing.covered, ROWS))
    some = {name: known[name] for name in ("BLOCK", "BESIDE_ONE", "LAST", "CELL", "GROUP", "STRIDE", "WATCHED")}
    sum_kernel[(programs,)](  # type: ignore[index]
        delta, residual, weight, normed, stream, runs, pool, index, order, tokens, len(runs), doing.covered, *sizes,
        **some, LINE=LINE, ROWS=ROWS, SPAN=4 // delta.element_size(), TILE=_TILE, num_warps=warps(block // 2),
    )  # fmt: skip
    return normed, stream
