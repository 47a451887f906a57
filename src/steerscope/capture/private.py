"""Copies of rows, which free the engine's memory for the next request.

One thread copies only as fast as one core reads, and the kernel maps fresh memory page by page while it is written.
So several threads copy parts of the rows, with numpy, because torch's copy would start a team of threads in each. Fresh
memory is mapped in huge pages. `room` is memory that was used before, which is faster still.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.specs.errors import InvalidRequest, Problem

Identity = tuple[int, torch.Size, tuple[int, ...]]  # address, shape and strides
THREADS = min(8, os.cpu_count() or 1)
_ALIGN = 64
_PART = 4 << 20  # bytes that one thread copies at a time
_HUGE = 2 << 20  # bytes of a huge page


def private(rows: Sequence[Rows], room: Tensor | None = None, threads: int = THREADS) -> list[Rows]:
    """Copy all rows: each to fresh memory, or side by side to `room`, of at least `private_bytes(rows)` bytes."""
    if room is not None:
        _check(room, private_bytes(rows))
    made: list[Rows] = []
    parts: list[tuple[Tensor, Tensor]] = []
    start = 0
    for one in rows:
        size = private_bytes([one])
        where = _fresh(size) if room is None else room[start : start + size]
        copies = _placed(one, where)
        for identity, tensor in _distinct(one).items():
            parts += _parts(copies[identity], tensor)
        made.append(replace(one, tensors={key: copies[_identity(tensor)] for key, tensor in one.tensors.items()}))
        start += size
    threads = min(threads, -(-sum(to.nbytes for to, _ in parts) // _PART))  # one part is not worth a thread
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy, parts))
    else:
        for part in parts:
            _copy(part)
    return made


def private_bytes(rows: Sequence[Rows]) -> int:
    """Return the bytes of their copies."""
    return sum(_aligned(tensor.nbytes) for one in rows for tensor in _distinct(one).values())


def _check(room: Tensor, size: int) -> None:
    if room.device.type != "cpu" or room.dtype != torch.uint8 or room.dim() != 1 or not room.is_contiguous():
        what = f"a {room.dim()}-dimensional tensor of {room.dtype} on {room.device}"
    elif room.numel() < size:
        what = f"{room.numel()} bytes are too few"
    elif room.storage_offset() % _ALIGN:
        what = f"it begins at byte {room.storage_offset()} of its memory"
    else:
        return
    remedy = f"give a contiguous tensor of {size} bytes (uint8) in the host's memory, whole"
    raise InvalidRequest([Problem("room", what, remedy)])


def _identity(tensor: Tensor) -> Identity:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _distinct(rows: Rows) -> dict[Identity, Tensor]:
    """Return each tensor once: two sites of one tap share a tensor."""
    return {_identity(tensor): tensor for tensor in rows.tensors.values()}


def _placed(rows: Rows, where: Tensor) -> dict[Identity, Tensor]:
    """Return the parts of `where` that hold the copies, side by side."""
    found: dict[Identity, Tensor] = {}
    start = 0
    for identity, tensor in _distinct(rows).items():
        found[identity] = where[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _parts(to: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a long tensor in several parts, for several threads."""
    rows = max(1, _PART * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() > 1 else 0
    return zip(to.split(rows), tensor.split(rows), strict=True) if rows else iter([(to, tensor)])


def _copy(part: tuple[Tensor, Tensor]) -> None:
    to, tensor = part
    if tensor.device.type == "cpu" and tensor.dim() and tensor.stride(-1) == 1:
        np.copyto(to.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())
    else:
        to.copy_(tensor)


def _fresh(size: int) -> Tensor:
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):  # or not Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
