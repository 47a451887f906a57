"""The lenses of a stack whose weights are bfloat16 or int8, for a few rows on a CPU: one compiled function a layer
(Numba).

There a row costs what it takes to read all weights once, and these are a half and a quarter of the bytes, as long as
nobody writes wider ones to memory first. A bfloat16 is the upper half of a float32. To widen an int8 costs more than
that saves, so the row is taken apart instead, into two numbers of a byte: both are multiplied with the weights as they
are, sixteen at a time where the processor can, and the sums are exact. Of a row's largest number 14 bits are left,
which is more than weights of 8 bits can tell apart.
"""

import functools
import itertools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

from steerscope.lenses.spec import Output

_MOST_ROWS = {torch.bfloat16: 8, torch.int8: 16}  # more of them are faster as a matrix product in float32
ROWS, CHOSEN = tuple(_MOST_ROWS.values()), ()  # nothing is chosen here
ALONE = False  # what is between the layers is in memory
_WORTH_A_THREAD = 32  # lenses
_HIGH, _LOW = 127, 128  # a number is high · 128 + low, with low from −64 to 63
_MOST, _TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_FREE = {"reassoc", "contract", "nsz"}  # sums in any order; what is no number stays so


# Arrays come whole, with the place in them: a part of one would be counted by whoever holds it, which takes longer than
# to use it.


@numba.njit(nogil=True)
def _dot(weights, lens, unit, parts, row):
    """Of bytes, in 32 bits: exact for rows of up to 133,000 numbers."""
    total = np.int32(0)
    for i in range(parts.shape[1]):
        total = np.int32(total + np.int32(np.int32(weights[lens, unit, i]) * np.int32(parts[row, i])))
    return total


@numba.njit(nogil=True, fastmath=_FREE)
def _apart(x, lens, row, high, low):
    """The row in two parts, and what one of their units is worth: no number where the row has one that is none."""
    largest, fine = np.float32(0), True
    for i in range(x.shape[2]):
        size = abs(x[lens, row, i])
        largest = max(largest, size)
        fine &= size <= np.float32(_MOST)
    if not fine:
        return np.float32(np.nan)
    unit = max(np.float32(largest / np.float32(_HIGH * _LOW)), np.float32(_TINY))
    for i in range(x.shape[2]):
        whole = np.int32(np.rint(x[lens, row, i] / unit))
        top = np.int32((whole + 64) >> 7)
        high[row, i], low[row, i] = np.int8(top), np.int8(whole - top * 128)
    return unit


@numba.njit(nogil=True, fastmath=_FREE)
def _layer(weights, scales, biases, x, out, hidden):
    """weights [lenses, out, in] × x [1 or lenses, n, in] → out [lenses, n, out]; a hidden layer has a rectifier."""
    lenses, units, width = weights.shape
    rows = x.shape[1]
    high, low = np.empty((rows, width), np.int8), np.empty((rows, width), np.int8)
    worth = np.empty(rows, np.float32)
    for lens in range(lenses):
        if lens < x.shape[0]:
            for row in range(rows):
                worth[row] = _apart(x, lens, row, high, low)
        for unit in range(units):
            for row in range(rows):
                found = np.float32(_dot(weights, lens, unit, high, row)) * np.float32(_LOW)
                found += np.float32(_dot(weights, lens, unit, low, row))
                found = found * worth[row] * scales[lens, unit] + biases[lens, unit]
                out[lens, row, unit] = np.float32(0) if hidden and found < 0 else found


@numba.njit(nogil=True, fastmath=_FREE)
def _wide_layer(weights, biases, x, out, hidden):
    """The same with the upper halves of float32 numbers."""
    lenses, units, width = weights.shape
    for lens in range(lenses):
        which = min(lens, x.shape[0] - 1)
        for unit in range(units):
            for row in range(x.shape[1]):
                found = np.float32(0)
                for i in range(width):
                    weight = np.uint32(np.uint32(weights[lens, unit, i]) << np.uint32(16)).view(np.float32)
                    found += weight * x[which, row, i]
                found += biases[lens, unit]
                out[lens, row, unit] = np.float32(0) if hidden and found < 0 else found


def evaluates(rows: int, widths: tuple[int, ...], compute: torch.dtype, kept: torch.dtype) -> bool:
    del widths
    return 0 < rows <= _MOST_ROWS.get(kept, 0) and compute == torch.float32


def evaluate(tensors: Mapping[str, Tensor], x: Tensor, start: int, stop: int, out: Tensor) -> None:
    """Logits of the lenses [start, stop) of a stack for rows [n, hidden] → out [n, lenses]. As many threads as torch
    would take have their part of the lenses."""
    arrays = {name: _array(tensor[start:stop]) for name, tensor in tensors.items()}
    rows, target = x.contiguous().numpy()[None], out.numpy()
    parts = max(1, min(torch.get_num_threads(), (stop - start) // _WORTH_A_THREAD))
    edges = [(stop - start) * part // parts for part in range(parts + 1)]
    others = [_threads().submit(_part, arrays, rows, a, b, target) for a, b in itertools.pairwise(edges[1:])]
    _part(arrays, rows, 0, edges[1], target)
    for other in others:
        other.result()


def _part(arrays: Mapping[str, np.ndarray], rows: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
    state, depth = rows, sum(name.startswith("w") for name in arrays)
    for i in range(depth):
        weights, biases = (arrays[f"{name}{i}"][start:stop] for name in "wb")
        if weights.dtype == np.float32:  # the last one of several: one output
            state = np.matmul(state, weights.mT) + biases[:, None]
            continue
        made = np.empty((stop - start, rows.shape[1], weights.shape[1]), np.float32)
        if weights.dtype == np.int8:
            _layer(weights, arrays[f"s{i}"][start:stop], biases, state, made, i < depth - 1)
        else:
            _wide_layer(weights, biases, state, made, i < depth - 1)
        state = made
    out[:, start:stop] = state[..., 0].T


def _array(tensor: Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="steerscope-lenses")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # where nobody would do what it is given


def chooses(lenses: int, k: int, output: Output) -> bool:
    del lenses, k, output
    return False
