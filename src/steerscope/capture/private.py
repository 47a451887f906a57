"""Rows in memory of the caller's own, so that what they had of the engine's is free for the next request.

One thread copies as fast as one core reads, and memory that was never used is made page by page while it is written to.
So several threads share the rows in parts, and fresh memory is asked for in huge pages. `room` is memory that was used
before: nothing is made then, but what it held last is gone.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.specs.errors import InvalidRequest, Problem

THREADS = min(8, os.cpu_count() or 1)
_ALIGN = 64
_PART = 4 << 20  # bytes that one thread copies at a time


def private(rows: Sequence[Rows], room: Tensor | None = None, threads: int = THREADS) -> list[Rows]:
    """Copies of all of them, side by side in fresh memory, or in `room` (bytes; see `private_bytes`)."""
    size = private_bytes(rows)
    if room is None:
        room = _fresh(size)
    elif not _fits(room, size):
        what = f"{room.numel()} elements of {room.dtype} on {room.device}, from {room.storage_offset()} on"
        raise InvalidRequest(
            [Problem("room", what, f"give a contiguous uint8 tensor of {size} bytes on the CPU, whole")]
        )
    made, parts, start = [], list[tuple[Tensor, Tensor]](), 0
    for one in rows:
        copies = {}
        for key, tensor in one.tensors.items():
            copies[key] = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            parts += _parts(copies[key], tensor)
            start += _aligned(tensor.nbytes)
        made.append(replace(one, tensors=copies))
    if (threads := min(threads, -(-size // _PART))) > 1:  # a thread is worth its start where it has much to copy
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy, parts))
    else:
        for part in parts:
            _copy(part)
    return made


def _fits(room: Tensor, size: int) -> bool:
    whole = room.is_contiguous() and room.storage_offset() % _ALIGN == 0
    return whole and room.dtype == torch.uint8 and room.numel() >= size and not room.is_cuda


def private_bytes(rows: Sequence[Rows]) -> int:
    """What their copies take."""
    return sum(_aligned(tensor.nbytes) for one in rows for tensor in one.tensors.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _parts(to: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A long tensor in several parts, so that no thread has it all."""
    rows = max(1, _PART * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() > 1 else 0
    return zip(to.split(rows), tensor.split(rows), strict=True) if rows else iter([(to, tensor)])


def _copy(part: tuple[Tensor, Tensor]) -> None:
    part[0].copy_(part[1])


def _fresh(size: int) -> Tensor:
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
