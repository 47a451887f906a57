"""Rows from a worker to its client without a copy: one file, mapped by both.

The client hands out regions and owns them; a worker writes where it is told. A tensor made from a region keeps the
region: its bytes are not used again while any view of them lives. The file has no name once everybody has mapped it,
so nothing is left behind whoever dies first.
"""

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from steerscope.specs.errors import CapacityExceeded

ALIGN = 64
STAGES = 7  # workers that write to one region
# Every region begins with counters, a cache line each: rows that each stage has written; whether one of them gave up;
# and whether each stage has left the region for good.
ROWS, FAILED, LEFT = 0, STAGES, STAGES + 1
HEADER = (2 * STAGES + 1) * ALIGN


def shared_folder(size: int) -> Path:
    """Memory where there is enough of it (containers often have little), else the disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size + (size >> 3):
        return memory
    return Path(tempfile.gettempdir())


class Arena:
    """A mapped file."""

    def __init__(self, path: Path, size: int, *, create: bool) -> None:
        self.path, self.size = path, size
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if create:
                os.posix_fallocate(handle, 0, size)  # a full disk is found here, not as a signal at the first write
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
        self.words = self.memory.numpy()[: size // 8 * 8].view(np.int64)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Shared memory as a tensor; writing to it is seen by everybody."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"[{offset}, {offset + size}) lies outside an arena of {self.size} bytes")
        return self.memory[offset : offset + size].view(dtype).view(shape)

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


class Region:
    """A part of an arena, in use as long as this object or an array over it lives."""

    def __init__(self, regions: "Regions", offset: int, size: int, stages: tuple[int, ...]) -> None:
        self._regions, self.offset, self.size, self.stages = regions, offset, size, stages

    @property
    def counters(self) -> np.ndarray:
        return self._regions.counters(self.offset)

    @property
    def __array_interface__(self) -> dict[str, object]:
        where = self._regions.arena.address + self.offset + HEADER
        return {"version": 3, "shape": (self.size - HEADER,), "typestr": "|u1", "data": (where, False)}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The data as a tensor that keeps this region."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        held = torch.from_numpy(np.asarray(self))  # its storage holds the array, the array holds the region
        return held[:size].view(dtype).view(shape)

    def shrink(self, data: int) -> None:
        """Keep only the first bytes of the data."""
        size = Regions.bytes_for(data)
        if size < self.size:
            self._regions.free(Freed(self.offset + size, self.size - size, self.offset, self.stages))
            self.size = size

    def __del__(self) -> None:
        self._regions.free(Freed(self.offset, self.size, self.offset, self.stages))


class Freed(NamedTuple):
    """Memory the client has no use for; the stages may still write to it until they have left its region."""

    offset: int
    size: int
    region: int  # where its counters are
    stages: tuple[int, ...]


class Regions:
    """Who has which part of an arena: first fit, neighbours merged."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._lock = threading.RLock()  # a finaliser may run inside allocate
        self._free: list[tuple[int, int]] = [(0, arena.size)]  # (offset, size), ascending
        self._returned: list[Freed] = []

    @staticmethod
    def bytes_for(data: int) -> int:
        return HEADER + -(-data // ALIGN) * ALIGN

    def counters(self, offset: int) -> np.ndarray:
        return self.arena.words[offset // 8 : (offset + HEADER) // 8 : ALIGN // 8]

    def allocate(self, data: int, stages: Iterable[int] = ()) -> Region | None:
        """Room for so many bytes that these stages will write, with its counters at 0; None when no gap is large
        enough. What was freed is handed out again only when its writers have left it."""
        size = self.bytes_for(data)
        with self._lock:
            self._merge()
            for i, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    region = Region(self, offset, size, tuple(stages))
                    region.counters[:] = 0
                    return region
        return None

    def free(self, part: Freed) -> None:
        with self._lock:
            self._returned.append(part)

    def _merge(self) -> None:
        """Take back what is free and left. All parts are judged before the first is: counters lie in them."""
        left = [all(self.counters(part.region)[LEFT + s] for s in part.stages) for part in self._returned]
        returned = [(part.offset, part.size) for part, gone in zip(self._returned, left, strict=True) if gone]
        self._returned = [part for part, gone in zip(self._returned, left, strict=True) if not gone]
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
            return self.arena.size - sum(size for _, size in self._free)
