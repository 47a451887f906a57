"""The tap on CUDA: one Triton program per token. A token with nothing to do costs one load; another is read once, put
through its ops in registers, and written once. The definition is `residual.equation.change`.

There is a kernel for the tap alone, and one that is the model's next RMS norm too: in a decoding step of a few µs per
kernel, one that is not there is the only one that costs nothing. Within it the answers a tap waits for (which vector,
which cell) come one after the other from memory: they are asked for first, and rows are kept last, so that the norm
does not wait for them. What a tap does to decoding tokens may lie ready (`laying`): then there is nothing to look up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm import tap
from steerscope.engines.vllm.keeping import advance, end_kernel, gather, kept, where
from steerscope.engines.vllm.laying import BEFORE, PLACE, TAIL
from steerscope.engines.vllm.step import ASKER, CELL, ENTRIES, GROUP, LAID, STRIDE

_FEW = 512  # tokens


@triton.jit
def _asked(mine, STEER: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr):
    """The group that captures this token, and whether it has ops; 0 each: nothing to do."""
    busy = 0
    if STEER:
        for k in tl.static_range(COLUMNS):
            busy |= tl.load(mine + ENTRIES + 1 + 3 * k)
    return tl.load(mine + GROUP), busy


@triton.jit
def _steered(
    d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """`d` with what the ops do to the stream `h` added to it, once."""
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
                if (s != 0) | (m != 0):  # a sum over all threads, which plain additions do without
                    p = tl.sum((start + total) * v)
                low = tl.maximum(s * p, lo, propagate_nan=tl.PropagateNan.ALL)
                clipped = tl.minimum(low, hi, propagate_nan=tl.PropagateNan.ALL)
                total += gate * (c + clipped - m * p) * v
    return (d.to(tl.float32) + total).to(d.dtype)


@triton.jit
def _steered_by_one(d, h, v, five):
    """The same by one op that lies ready."""
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
        d = _steered(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
    return d


@triton.jit
def _lost(x, kind):
    """Whether a row, rounded, holds an infinity or NaN."""
    return tl.sum(tl.where(tl.abs(x.to(kind).to(tl.float32)) < float("inf"), 0, 1)) > 0


@triton.jit
def _kernel(
    delta, residual, pool, index, vectors, coefficients, gates, order, before, faults,
    delta_stride, residual_stride, index_width, hidden, first_watched,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, STEER: tl.constexpr, CAPTURE: tl.constexpr,
    ASKER: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr, WATCHED: tl.constexpr,
    LAID: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    mine = index + token * index_width
    group, busy = _asked(mine, STEER, COLUMNS, GROUP, ENTRIES)
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
            d = _steered(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
            x = d.to(tl.float32)
            if RESIDUAL:
                x += r.to(tl.float32)
            if _lost(x, kind):  # as in `tap._silence`
                tl.store(faults + (tl.load(mine + ASKER) & (LAID - 1)), 1)
                d = tl.zeros([BLOCK], dtype=kind)
                if RESIDUAL:
                    r = d
                    tl.store(residual + token * residual_stride + at, r, mask=inside)
            tl.store(delta + token * delta_stride + at, d, mask=inside)
        if CAPTURE:
            late = d
            if RESIDUAL:
                late = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
            place, was, cell = where(mine, group, order, before, CELL)
            kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)


@triton.jit
def _norm_kernel(
    delta, residual, weight, normed, stream, laid, staged, pool, index, vectors, coefficients, gates, order, before,
    faults, laid_rows, delta_stride, residual_stride, index_width, hidden, first_watched, epsilon,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BESIDE_ONE: tl.constexpr, STEER: tl.constexpr, CAPTURE: tl.constexpr,
    LAST: tl.constexpr, LARGE: tl.constexpr, ASKER: tl.constexpr, CELL: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, ENTRIES: tl.constexpr, WATCHED: tl.constexpr, LAID: tl.constexpr, TAIL: tl.constexpr,
    PLACE: tl.constexpr, BEFORE: tl.constexpr, FEW: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """The tap, then vLLM's norm: the stream is summed in float32, handed on rounded, and normed unrounded.

    With FEW tokens the device is mostly idle, and time is what reads wait for each other: what may be wanted is read
    before it is known whether anybody wants it."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    kind = delta.dtype.element_ty
    mine = index + token * index_width
    group, busy, place, was, cell = 0, 0, -1, 0, 0
    ready, a, what, near, lies = laid, 0.0, -1.0, False, False
    if STEER or CAPTURE:
        group, busy = _asked(mine, STEER, COLUMNS, GROUP, ENTRIES)
    d = tl.load(delta + token * delta_stride + at, mask=inside, other=0.0)
    r = tl.load(residual + token * residual_stride + at, mask=inside, other=0.0)
    if FEW and (STEER or CAPTURE):
        ready = laid + token * (hidden + TAIL)
        near = token < laid_rows
        lies = near & (tl.load(mine + ASKER) >= LAID)
        if STEER:
            a = tl.load(ready + at, mask=inside & near, other=0.0)
            what = tl.where(lies, tl.load(ready + hidden, mask=near, other=0.0), -1.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    if CAPTURE:
        if FEW:
            cell = tl.load(mine + CELL)
            place = tl.load(ready + hidden + PLACE, mask=near, other=0.0).to(tl.int32)
            was = tl.load(ready + hidden + BEFORE, mask=near, other=0.0).to(tl.int32)
        else:
            place, was, cell = where(mine, group, order, before, CELL)
    h = d
    if STEER:
        h = (d.to(tl.float32) + r.to(tl.float32)).to(kind)
        if busy != 0:
            if FEW:
                d = _ready(
                    d, h, a, what, ready + hidden + 1, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS,
                    BLOCK, ENTRIES,
                )  # fmt: skip
            else:
                d = _steered(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
    x = d.to(tl.float32) + r.to(tl.float32)
    tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
    if STAGED:
        tl.store(staged + token * hidden + at, x.to(kind), mask=inside)
    if STEER and CAPTURE and FEW:  # noqa: SIM102 # what is known when it is compiled stands alone
        if lies:  # while the sum is waited for
            kept(h, x.to(kind), token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    squares = tl.sum(x * x)
    if STEER:
        large = (busy != 0) & ~(squares < LARGE)  # it may hold what is not finite: this is at hand, the rest is rare
        if large:
            lost = _lost(x, kind)
            if lost:  # as in `tap._silence`
                tl.store(faults + (tl.load(mine + ASKER) & (LAID - 1)), 1)
                x = tl.zeros([BLOCK], dtype=tl.float32)
                squares = tl.sum(x * x)
                tl.store(stream + token * hidden + at, x.to(kind), mask=inside)
                if CAPTURE and FEW:  # noqa: SIM102
                    if lies:
                        kept(h, x.to(kind), token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    y = x * tl.math.rsqrt(squares / hidden + epsilon)
    if BESIDE_ONE:
        y = y * (w.to(tl.float32) + 1.0)
    else:
        y = y.to(w.dtype).to(tl.float32) * w.to(tl.float32)
        y = y.to(w.dtype)
    tl.store(normed + token * hidden + at, y.to(kind), mask=inside)
    if CAPTURE:
        late = x.to(kind)
        if not STEER:
            h = late
        if FEW:
            if not STEER:  # noqa: SIM102
                if lies:
                    kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
            if (group != 0) & ~lies:
                place, was, cell = where(mine, group, order, before, CELL)
                kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
        else:
            kept(h, late, token, place, was, cell, pool, at, inside, hidden, first_watched, WATCHED)
    if LAST and (CAPTURE or STAGED):
        advance(mine, CELL, STRIDE)


def _cuda_tap(
    delta: Tensor,
    residual: Tensor | None,
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
) -> None:
    tap.come(index)
    steer, capture = tap.working(steer, capture)
    if not (steer or capture):
        return
    tokens, hidden = _checked(delta, residual, index)
    block = triton.next_power_of_2(hidden)
    _kernel[(tokens,)](  # type: ignore[index]
        delta,
        residual if residual is not None else delta,
        pool,
        index,
        vectors,
        coefficients,
        gates,
        order,
        before,
        faults,
        delta.stride(0),
        residual.stride(0) if residual is not None else 0,
        index.shape[1],
        hidden,
        pool.shape[0] - index.shape[0],
        COLUMNS=(index.shape[1] - ENTRIES) // 3,
        BLOCK=block,
        RESIDUAL=residual is not None,
        STEER=steer,
        CAPTURE=capture,
        ASKER=ASKER,
        CELL=CELL,
        GROUP=GROUP,
        ENTRIES=ENTRIES,
        WATCHED=tap.WATCHED,
        LAID=LAID,
        num_warps=_warps(block),
    )


def _checked(delta: Tensor, residual: Tensor | None, index: Tensor) -> tuple[int, int]:
    tokens, hidden = delta.shape
    if tokens > index.shape[0]:
        raise ValueError(f"a tap met {tokens} tokens, it was made for {index.shape[0]}")
    if delta.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("a tap met a hidden state whose numbers do not lie side by side")
    return tokens, hidden


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


def _cuda_tap_norm(
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
    tap.come(index)
    steer, capture = tap.working(steer, capture)
    tokens, hidden = _checked(delta, residual, index)
    on_stage = capture and not steer and tokens <= min(_FEW, len(staged))
    normed, stream = (torch.empty(tokens, hidden, dtype=delta.dtype, device=delta.device) for _ in range(2))
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(tokens,)](  # type: ignore[index]
        delta,
        residual,
        weight,
        normed,
        stream,
        laid,
        staged,
        pool,
        index,
        vectors,
        coefficients,
        gates,
        order,
        before,
        faults,
        laid.shape[0],
        delta.stride(0),
        residual.stride(0),
        index.shape[1],
        hidden,
        pool.shape[0] - index.shape[0],
        epsilon,
        COLUMNS=(index.shape[1] - ENTRIES) // 3,
        BLOCK=block,
        BESIDE_ONE=beside_one,
        STEER=steer,
        CAPTURE=capture and not on_stage,
        LAST=last,
        LARGE=min(torch.finfo(delta.dtype).max ** 2, torch.finfo(torch.float32).max),
        ASKER=ASKER,
        CELL=CELL,
        GROUP=GROUP,
        STRIDE=STRIDE,
        ENTRIES=ENTRIES,
        WATCHED=tap.WATCHED,
        LAID=LAID,
        TAIL=TAIL,
        PLACE=PLACE,
        BEFORE=BEFORE,
        FEW=tokens <= _FEW,
        STAGED=on_stage,
        num_warps=_warps(block) if tokens <= _FEW else _warps(block // 2),
    )
    if on_stage and last:
        gather(stage, pool, index, orders, tokens)
    return normed, stream


def _cuda_end(delta: Tensor, index: Tensor, faults: Tensor) -> None:
    del faults
    if tap.working(False, True)[1]:
        end_kernel[(delta.shape[0],)](index, index.shape[1], CELL=CELL, STRIDE=STRIDE, num_warps=1)  # type: ignore[index]


def register() -> None:
    """Make this the tap of CUDA tensors, once."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("steerscope::tap", "CUDA"):
        tap.library.impl("tap", _cuda_tap, "CUDA")
        tap.library.impl("end", _cuda_end, "CUDA")
        tap.library.impl("tap_norm", _cuda_tap_norm, "CUDA")
