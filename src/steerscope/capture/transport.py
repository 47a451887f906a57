"""Rows from a worker to its client without a copy: one file, mapped by both.

The client allocates and owns regions; a worker writes to the region of a request. A tensor over a region keeps it: its
bytes are not reused while any view of them lives. The file is unlinked once all processes have mapped it, so no process
can leave it behind.
"""

import contextlib
import itertools
import mmap
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from steerscope.specs.errors import CapacityExceeded

ALIGN = 64
STAGES = 7  # workers that write to one region
# Every region begins with counters, a cache line each: rows written, by stage; whether a stage failed; whether the
# stage has left the region for good; whether it has seen the request; the owner of the region; the number of readings.
ROWS = 0
FAILED = STAGES
LEFT = STAGES + 1
MET = 2 * STAGES + 1
OWNER = 3 * STAGES + 1
READ = 3 * STAGES + 2
# then, as text, the reason of a failure
WHY = (READ + 1) * ALIGN
WHY_SIZE = 256
HEADER = WHY + WHY_SIZE
_ZEROS = bytes(WHY)


def shared_folder(size: int) -> Path:
    """Return a folder in memory, or on disk where memory is too small, as in many containers."""
    memory = Path("/dev/shm")  # nosec B108 # files there are new (O_EXCL), with random names
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size + (size >> 3):
        return memory
    return Path(tempfile.gettempdir())


def _allocate(handle: int, size: int) -> None:
    """Reserve the file's blocks, so that a full disk fails here and not as a signal at the first write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


class Arena:
    """A mapped file. Its first cache line holds the time of the last failure of a request."""

    def __init__(self, path: Path, size: int, *, create: bool) -> None:
        self.path = path
        self.size = size
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                _allocate(handle, size)
            self._map = mmap.mmap(handle, size)
        except OSError as error:
            if create:
                path.unlink(missing_ok=True)
            raise CapacityExceeded(
                f"cannot get {size >> 20} MiB for captured rows at {path.parent}: {error.strerror}; "
                "lower capture_budget"
            ) from error
        finally:
            os.close(handle)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.bytes = self.memory.numpy()
        self.words = self.bytes[: size // 8 * 8].view(np.int64)
        self.raw = memoryview(self._map)
        self.ints = self.raw[: size // 8 * 8].cast("q")  # the same words, three times as fast to read

    def at(self, offset: int, size: int) -> int:
        """Return the address of `size` bytes at an offset."""
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"[{offset}, {offset + size}) lies outside an arena of {self.size} bytes")
        return self.address + offset

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return shared memory as a tensor. All processes see what is written to it."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.at(offset, size)
        return self.memory[offset : offset + size].view(dtype).view(shape)

    def fail(self, offset: int, why: str) -> None:
        """Record in a region that its request failed, and why."""
        text = np.frombuffer(why.encode()[:WHY_SIZE].ljust(WHY_SIZE, b"\0"), np.uint8)
        self.bytes[offset + WHY : offset + HEADER] = text
        self.words[(offset + ALIGN * FAILED) // 8] = 1
        self.words[0] = time.monotonic_ns()  # differs for every failure

    @property
    def failures(self) -> int:
        """A number that changes when a request fails."""
        return self.ints[0]

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


class Region:
    """A part of an arena, in use while this object or an array over it lives."""

    def __init__(self, regions: "Regions", offset: int, size: int, stages: tuple[int, ...]) -> None:
        self._regions = regions
        self.offset = offset
        self.size = size
        self.stages = stages
        self.owner = next(regions.owners)
        self.counters = regions.counters(offset)

    @property
    def failed(self) -> bool:
        """Whether a worker failed the request."""
        return bool(self.counters[FAILED])

    @property
    def failure(self) -> str | None:
        """The reason of a failure, or None."""
        if not self.counters[FAILED]:
            return None
        start = self.offset + WHY
        text = self._regions.arena.bytes[start : start + WHY_SIZE].tobytes()
        return text.rstrip(b"\0").decode(errors="replace")

    def withdraw(self) -> None:
        """Release a region whose request will not run. A stage that has not seen the request finds another owner and
        never writes. (A stage marks MET before it reads the owner, and then also marks when it has left.)"""
        counters = self.counters
        counters[OWNER] = 0
        for stage in self.stages:
            if not counters[MET + stage]:
                counters[LEFT + stage] = 1

    @property
    def __array_interface__(self) -> dict[str, object]:
        where = self._regions.arena.address + self.offset + HEADER
        return {"version": 3, "shape": (self.size - HEADER,), "typestr": "|u1", "data": (where, False)}

    def part(self, start: int, stop: int) -> np.ndarray:
        """Return a part of the data as an array that does not keep the region alive."""
        first = self.offset + HEADER
        return self._regions.arena.bytes[first + start : first + stop]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the data as a tensor that keeps the region alive."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        held = torch.from_numpy(np.asarray(self))  # its storage holds the array, the array holds the region
        return held[:size].view(dtype).view(shape)

    def shrink(self, data: int) -> None:
        """Free all but the first `data` bytes."""
        size = Regions.bytes_for(data)
        if size < self.size:
            self._regions.free(Freed(self.offset + size, self.size - size, self.offset, self.stages))
            self.size = size

    def __del__(self) -> None:
        if Freed is not None:  # None while the interpreter exits
            self._regions.free(Freed(self.offset, self.size, self.offset, self.stages))


class Freed(NamedTuple):
    """Memory that the client has freed. Stages may write to it until they have left its region."""

    offset: int
    size: int
    region: int  # offset of the counters
    stages: tuple[int, ...]


class Regions:
    """The allocator of an arena: first fit, free neighbours merged."""

    def __init__(self, arena: Arena, when_untidy: Callable[[], None] | None = None) -> None:
        """`when_untidy` is called, from any thread, at the first `free` after a merge: another thread can then `tidy`,
        which takes longer than allocating and would delay the next request."""
        self.arena = arena
        self._when_untidy = when_untidy
        self._lock = threading.RLock()  # a finaliser may run inside allocate
        self._free: list[tuple[int, int]] = [(ALIGN, arena.size - ALIGN)]  # (offset, size), ascending
        self._returned: list[Freed] = []
        self._kept = 0  # how many of them were still written to at the last merge
        self.owners = itertools.count(secrets.randbits(62) | 1)

    @staticmethod
    def bytes_for(data: int) -> int:
        return HEADER + -(-data // ALIGN) * ALIGN

    def counters(self, offset: int) -> memoryview:
        return self.arena.ints[offset // 8 : (offset + WHY) // 8 : ALIGN // 8]

    def allocate(self, data: int, stages: Iterable[int] = ()) -> Region | None:
        """Return a region for `data` bytes, written by these stages, with counters at 0 and a new owner; None when no
        gap is large enough. Freed memory is reused only when its writers have left it."""
        size = self.bytes_for(data)
        with self._lock:
            # Used memory is mapped and perhaps cached, so it is better reused; with many gaps merging takes long.
            if len(self._returned) > self._kept + len(self._free) // 8:
                self._merge()
            offset = self._take(size)
            if offset is None:
                self._merge()
                offset = self._take(size)
        if offset is None:
            return None
        self.arena.raw[offset : offset + WHY] = _ZEROS
        region = Region(self, offset, size, tuple(stages))
        region.counters[OWNER] = region.owner
        return region

    @property
    def untidy(self) -> bool:
        """Whether memory was freed since the last merge."""
        return len(self._returned) > self._kept

    def tidy(self) -> None:
        with self._lock:
            self._merge()

    def _take(self, size: int) -> int | None:
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def free(self, part: Freed) -> None:
        with self._lock:
            self._returned.append(part)
            first = len(self._returned) == self._kept + 1
        if first and self._when_untidy is not None:
            self._when_untidy()

    def _merge(self) -> None:
        """Merge freed memory that all stages have left. All parts are checked before the first is merged, because they
        hold the counters. A finaliser that runs meanwhile appends to the new list."""
        words = self.arena.words
        parts = self._returned
        self._returned = []
        left = [all(words[(part.region + ALIGN * (LEFT + stage)) // 8] for stage in part.stages) for part in parts]
        returned = [(part.offset, part.size) for part, gone in zip(parts, left, strict=True) if gone]
        kept = [part for part, gone in zip(parts, left, strict=True) if not gone]
        self._kept = len(kept)
        self._returned += kept
        if not returned:
            return
        merged: list[tuple[int, int]] = []
        for offset, size in sorted([*self._free, *returned]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged

    @property
    def used(self) -> int:
        with self._lock:
            self._merge()
            return self.arena.size - ALIGN - sum(size for _, size in self._free)
