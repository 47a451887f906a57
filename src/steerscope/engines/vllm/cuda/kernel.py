"""The tap on CUDA: one Triton program per token. A token with nothing to do costs one load; another is read once, put
through its ops in registers, and written once. The definition is `core.equation.change`.

This is the kernel for a tap alone; `norming` has those that are the model's next norm too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.cuda.row_store import end_kernel, kept, where
from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.step_index import ASKER, CELL, ENTRIES, GROUP, LAID, STRIDE


@triton.jit
def asked(mine, STEER: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr):
    """The group that captures this token, and whether it has ops; 0 each: nothing to do."""
    busy = 0
    if STEER:
        for k in tl.static_range(COLUMNS):
            busy |= tl.load(mine + ENTRIES + 1 + 3 * k)
    return tl.load(mine + GROUP), busy


@triton.jit
def steered(
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
def is_lost(x, kind):
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
    group, busy = asked(mine, STEER, COLUMNS, GROUP, ENTRIES)
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
            d = steered(d, h, mine, vectors, coefficients, gates, at, inside, hidden, COLUMNS, BLOCK, ENTRIES)
            x = d.to(tl.float32)
            if RESIDUAL:
                x += r.to(tl.float32)
            if is_lost(x, kind):  # as in `tap._silence`
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
    doing = tap.come(index)
    steer, capture = steer and doing.steer, capture and doing.capture
    if not (steer or capture):
        return
    tokens, hidden = checked(delta, residual, index)
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
        num_warps=warps(block),
    )


def checked(delta: Tensor, residual: Tensor | None, index: Tensor) -> tuple[int, int]:
    tokens, hidden = delta.shape
    if tokens > index.shape[0]:
        raise ValueError(f"a step has {tokens} tokens, and the tap was made for {index.shape[0]}")
    if delta.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the layer's output is not contiguous in its last dimension")
    return tokens, hidden


def warps(block: int) -> int:
    return max(1, min(16, block // 256))


def _cuda_end(delta: Tensor, index: Tensor, faults: Tensor) -> None:
    del faults
    if tap.come(index).capture:
        end_kernel[(delta.shape[0],)](index, index.shape[1], CELL=CELL, STRIDE=STRIDE, num_warps=1)  # type: ignore[index]


def register() -> None:
    """Make these the taps of CUDA tensors, once."""
    from steerscope.engines.vllm.cuda.fused_norm import cuda_tap_norm  # made of parts of this

    if not torch._C._dispatch_has_kernel_for_dispatch_key("steerscope::tap", "CUDA"):
        tap.library.impl("tap", _cuda_tap, "CUDA")
        tap.library.impl("end", _cuda_end, "CUDA")
        tap.library.impl("tap_norm", cuda_tap_norm, "CUDA")
