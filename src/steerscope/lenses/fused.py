"""Triton kernels for the few rows of a decoding step: one evaluates the lenses of a stack, one finds the top scores.

Time goes into reading the weights once. In `_evaluate` one program evaluates one lens for all rows and keeps hidden
states in registers; weights are converted after they are loaded, so that int8 weights are half the bytes of bfloat16.
In `_choose` one program turns the logits of one row into scores and finds the largest, which in torch would be many
launches beside a running model.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from steerscope.lenses.spec import Output

ROWS = (16, 32, 64)  # largest numbers of rows; one kernel is compiled for each
CHOSEN = (16, 32, 64)  # likewise for k
MOST_LENSES = 8192  # that one program of `_choose` holds
_LEAST = 16  # smallest side of a matrix product
# widths of the two hidden layers, which stay in registers
_MAX_WIDE = 256
_MAX_NARROW = 128
_LINE = 128  # bytes of a row of weights that are loaded together
_MAX_INPUTS = 4096  # input values loaded with them, up to which three pipeline stages fit
_OUTPUTS = {"sigmoid": 0, "relu": 1, "jumprelu": 2}
_TINY = float(torch.finfo(torch.float32).tiny)


# Arguments that change from call to call are not specialised: each special value would compile the kernel again.
@triton.jit(do_not_specialize=["out", "first", "rows", "out_row", "out_column"])
def _evaluate(
    x, w0, s0, b0, w1, s1, b1, w2, b2, out, first, rows, hidden, wide, narrow, out_row, out_column,
    DEEP: tl.constexpr, SCALED: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the logits of one lens to out[:, program].

    `x` is [rows, hidden]. A lens has `wide` hidden units, and `narrow` units in a second hidden layer if DEEP.
    """
    lens = (first + tl.program_id(0)).to(tl.int64)
    row, unit, column = tl.arange(0, N), tl.arange(0, WIDE), tl.arange(0, K)
    there = row < rows
    weights = w0 + lens * wide * hidden + unit[:, None] * hidden + column[None, :]
    inputs = x + row[None, :] * hidden + column[:, None]
    state = tl.zeros([WIDE, N], dtype=tl.float32)
    for at in range(0, hidden, K):
        inside = column < hidden - at
        weight = tl.load(weights + at, mask=(unit < wide)[:, None] & inside[None, :], other=0)
        value = tl.load(inputs + at, mask=there[None, :] & inside[:, None], other=0.0)
        state = tl.dot(weight.to(value.dtype), value, state, input_precision=PRECISION)
    known = unit < wide
    if SCALED:
        state *= tl.load(s0 + lens * wide + unit, mask=known, other=0.0).to(tl.float32)[:, None]
    state += tl.load(b0 + lens * wide + unit, mask=known, other=0.0).to(tl.float32)[:, None]
    state = tl.where(state < 0, 0.0, state)  # keeps NaN, unlike tl.maximum
    if DEEP:
        second = tl.arange(0, NARROW)
        known = second < narrow
        weight = tl.load(
            w1 + (lens * narrow + second[:, None]) * wide + unit[None, :],
            mask=known[:, None] & (unit < wide)[None, :], other=0,
        )  # fmt: skip
        kind = x.dtype.element_ty
        state = tl.dot(weight.to(kind), state.to(kind), input_precision=PRECISION)
        if SCALED:
            state *= tl.load(s1 + lens * narrow + second, mask=known, other=0.0).to(tl.float32)[:, None]
        state += tl.load(b1 + lens * narrow + second, mask=known, other=0.0).to(tl.float32)[:, None]
        state = tl.where(state < 0, 0.0, state)
        last = tl.load(w2 + lens * narrow + second, mask=known, other=0.0)
    else:
        last = tl.load(w2 + lens * wide + unit, mask=known, other=0.0)
    logits = tl.sum(state * last[:, None], 0) + tl.load(b2 + lens)
    tl.store(out + row * out_row + tl.program_id(0) * out_column, logits, mask=there)


@triton.jit(do_not_specialize=["lenses", "view", "view_stride", "k"])
def _choose(
    scores, views, view, threshold, floor, low, high, confidence, values, indices, lenses, view_stride, k, tiny,
    L: tl.constexpr, K: tl.constexpr, OUTPUT: tl.constexpr, FLOORED: tl.constexpr, CALIBRATED: tl.constexpr,
    VIEWED: tl.constexpr,
):  # fmt: skip
    """Turn the logits of one row into scores in place, and write the k largest, the earlier lens first if equal.

    A key holds the bits of a score, which order positive floats, above the lens's distance from the end.
    """
    row, at = tl.program_id(0), tl.arange(0, L)
    there = at < lenses
    mine = scores + row.to(tl.int64) * lenses + at
    said = tl.load(mine, mask=there, other=0.0)
    if OUTPUT == 0:
        said = 1 / (1 + tl.exp(-said))
    else:
        if OUTPUT == 2:
            said = tl.where(said <= tl.load(threshold + at, mask=there, other=0.0), 0.0, said)
        said = tl.where(said < 0, 0.0, said)
    score = said
    if CALIBRATED:
        middle, top = tl.load(low + at, mask=there, other=1.0), tl.load(high + at, mask=there, other=2.0)
        above = 1 + tl.minimum((said - middle) / (top - middle), 1.0)
        score = tl.where(said < middle, said / tl.maximum(middle, tiny), above)
        score *= tl.load(confidence + at, mask=there, other=0.0) / 2
    if FLOORED:
        score = tl.where(said > tl.load(floor + at, mask=there, other=0.0), score, 0.0)
    tl.store(mine, score, mask=there)
    counts = there & (score > 0)
    if VIEWED:
        seen = views + tl.load(view + row * view_stride) * lenses + at
        counts &= tl.load(seen, mask=there, other=0) != 0
    bits = tl.where(counts, score, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(there, (bits << 32) + (L - 1 - at), -1)
    place = tl.arange(0, K)
    best, lens = tl.zeros([K], dtype=tl.int32), tl.full([K], -1, dtype=tl.int32)
    for i in range(k):
        key = tl.max(keys, 0)
        keys = tl.where(keys == key, -1, keys)
        value = (key >> 32).to(tl.int32)
        best = tl.where(place == i, value, best)
        lens = tl.where((place == i) & (value > 0), (L - 1 - (key & 0xFFFFFFFF)).to(tl.int32), lens)
    tl.store(values + row * k + place, best.to(tl.float32, bitcast=True), mask=place < k)
    tl.store(indices + row * k + place, lens.to(tl.int64), mask=place < k)


def _kind(count: int, kinds: tuple[int, ...]) -> int:
    return next(kind for kind in kinds if kind >= count)


class Shape(NamedTuple):
    """How a program loads: weights of a row at a time, its warps, and its pipeline stages."""

    line: int
    warps: int
    stages: int


def shape(itemsize: int, rows: int) -> Shape:
    """Return the shape for weights of that size, with which three programs fit a multiprocessor."""
    line = _LINE // itemsize
    return Shape(line, 4, 2 if line * _kind(rows, ROWS) > _MAX_INPUTS else 3)


def evaluates(rows: int, widths: tuple[int, ...], compute: torch.dtype) -> bool:
    """Return whether `evaluate` takes that many rows and such hidden layers; matrix units have no exact float32."""
    limits = (_MAX_WIDE, _MAX_NARROW)
    fits = 0 < len(widths) <= 2 and all(width <= limit for width, limit in zip(widths, limits, strict=False))
    return 0 < rows <= ROWS[-1] and fits and compute != torch.float32


def evaluate(
    tensors: Mapping[str, Tensor], x: Tensor, start: int, stop: int, out: Tensor, how: Shape | None = None
) -> None:
    """Write logits of the lenses [start, stop) for rows [n, hidden], of the type of the arithmetic, to out."""
    w0 = tensors["w0"]
    deep = "w2" in tensors
    names = ("w1", "s1", "b1", "w2", "b2") if deep else ("w0", "s0", "b0", "w1", "b1")
    later = [tensors.get(name, w0) for name in names]  # absent ones are not read
    wide = w0.shape[1]
    narrow = tensors["w1"].shape[1]
    x, how = x.contiguous(), how or shape(w0.element_size(), len(x))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _evaluate[(stop - start,)](  # type: ignore[index]
            x, w0, tensors.get("s0", w0), tensors["b0"], *later, out, start, len(x), x.shape[1], wide, narrow,
            *out.stride(), DEEP=deep, SCALED="s0" in tensors, N=_kind(len(x), ROWS), K=how.line,
            WIDE=max(_LEAST, triton.next_power_of_2(wide)), NARROW=max(_LEAST, triton.next_power_of_2(narrow)),
            PRECISION="ieee", num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip


def chooses(lenses: int, k: int, output: Output) -> bool:
    """Return whether `choose` takes that many lenses, that k and that output."""
    return lenses <= MOST_LENSES and k <= CHOSEN[-1] and output in _OUTPUTS


def choose(
    logits: Tensor,
    k: int,
    output: Output,
    per_lens: Mapping[str, Tensor],
    floored: bool,
    calibrated: bool,
    views: Tensor,
    view: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Turn logits [n, lenses] into scores in place; return the k largest of each row and their lenses (−1: score 0).

    `view` [n] is the line of `views` that marks the lenses that count for each row (None: all).
    """
    n, lenses = logits.shape
    values = logits.new_empty(n, k)
    indices = torch.empty(n, k, dtype=torch.long, device=logits.device)
    size = triton.next_power_of_2(lenses)
    names = ("threshold", "floor", "low", "high", "confidence")
    with torch.cuda.device_of(logits):
        _choose[(n,)](  # type: ignore[index]
            logits, views.view(torch.uint8), indices if view is None else view, *(per_lens[name] for name in names),
            values, indices, lenses, 0 if view is None else view.stride(0), k, _TINY, L=size,
            K=_kind(k, CHOSEN), OUTPUT=_OUTPUTS[output], FLOORED=floored, CALIBRATED=calibrated,
            VIEWED=view is not None, num_warps=4 if size <= 1024 else 8,
        )  # fmt: skip
    return values, indices
