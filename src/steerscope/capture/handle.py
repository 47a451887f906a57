"""CaptureHandle: returned by a request in place of its rows. `fetch` is lazy and idempotent; `with` closes it."""

import asyncio
import contextlib
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from steerscope.capture.budget import ByteBudget, Reservation
from steerscope.capture.rows import Rows
from steerscope.specs.errors import CaptureClosed, InvalidRequest

THREADS = min(8, os.cpu_count() or 1)
_ALIGN = 64
_PART = 4 << 20  # bytes that one thread copies at a time
_HUGE = 2 << 20  # bytes of a huge page


class UnfetchedRows(UserWarning):
    """Captured rows were dropped unfetched. (A ResourceWarning would not be shown by default.)"""


class CaptureHandle:
    """Rows of one choice of one request. They stay until the handle is closed, dropped or expired."""

    def __init__(
        self, request_id: str, count: int, load: Callable[[], Rows], budget: ByteBudget, held: Reservation, ttl_s: float
    ) -> None:
        self.request_id = request_id
        self.count = count
        self._load: Callable[[], Rows] | None = load
        self._rows: Rows | None = None
        self._gone: str | None = None
        self.saving: Future[Path] | None = None  # of a request with `save_as`
        self.own = False  # whether the rows are copies outside the budget
        self._budget = budget
        self._held = held
        self._lock = threading.RLock()  # user threads and the budget's sweep
        me = weakref.ref(self)  # the budget must not keep a dropped handle alive

        def expire() -> None:
            if handle := me():
                with handle._lock:
                    if not handle.fetched:
                        handle.close(f"they were not fetched for {ttl_s:g} s (capture_ttl)")

        budget.expire_after(id(self), ttl_s, expire)

    def fetch(self, copy: bool = False) -> Rows:
        """Return the rows; every call returns the same ones. With `copy` they are copied, which frees their budget at
        once (`engine.fetch_all` copies the rows of many handles together)."""
        if copy:
            return fetch_all([self], copy=True)[0]
        with self._lock:
            if self._rows is None:
                if self._load is None:
                    raise CaptureClosed(f"the rows of {self.request_id} are gone: {self._gone}")
                self._rows = self._load()
                self._load = None
                self._budget.forget(id(self))
            return self._rows

    def keep(self, rows: Rows) -> Rows:
        """Replace the rows by this copy and release their budget."""
        with self._lock:
            if self._gone is None:
                self._rows = rows
                self.own = True
                self._held.release()
            return rows

    async def fetch_async(self, copy: bool = False) -> Rows:
        return await asyncio.to_thread(self.fetch, True) if copy else self.fetch()

    @property
    def captures(self) -> Rows:
        return self.fetch()

    @property
    def fetched(self) -> bool:
        return self._rows is not None

    def message(self, i: int, template: bool = False) -> Rows:
        """Return the rows of one chat message."""
        return self.fetch().message(i, template)

    def save(self, path: Path | str) -> Path:
        """Write the rows to a file that `load_rows` reads."""
        return self.fetch().save(path)

    def saved(self, timeout_s: float | None = None) -> Path | None:
        """Wait for the file that the request named with `save_as`. After a SaveFailed the handle still has the rows."""
        return None if self.saving is None else self.saving.result(timeout_s)

    def close(self, why: str = "the handle was closed") -> None:
        """Release the budget. Rows that were already fetched stay valid."""
        with self._lock:
            if self._gone is None:
                self._gone = why
                self._load = None
                self._rows = None
                self._budget.forget(id(self))
                self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_gone", "") is None:
            unfetched = not self.fetched
            self.close()  # before the warning, which may be an error
            if unfetched:
                message = (
                    f"{self.count} captured rows of {self.request_id} were dropped unfetched: fetch() or close() them"
                )
                warnings.warn(message, UnfetchedRows, stacklevel=2)

    def __repr__(self) -> str:
        state = "fetched" if self.fetched else "ready"
        if self._gone:
            state = f"gone: {self._gone}"
        return f"CaptureHandle({self.request_id}, {self.count} rows, {state})"


def fetch_all(handles: Sequence[CaptureHandle], copy: bool = False, room: Tensor | None = None) -> list[Rows]:
    """Return the rows of many handles, copied by several threads where asked. Rows copied to `room` last until it is
    used again, which a handle cannot detect; so those handles are closed."""
    rows = {id(handle): handle.fetch() for handle in handles}
    if copy or room is not None:
        to_copy = {id(handle): handle for handle in handles if room is not None or not handle.own}
        copies = private([rows[name] for name in to_copy], room)
        rows |= dict(zip(to_copy, copies, strict=True))  # drops the originals before their budget is released
        for name, handle in to_copy.items():
            if room is None:
                handle.keep(rows[name])
            else:
                handle.close("they were copied to the room that fetch_all was given")
    return [rows[id(handle)] for handle in handles]


# --- copies, which free the engine's memory for the next request


def private(rows: Sequence[Rows], room: Tensor | None = None, threads: int = THREADS) -> list[Rows]:
    """Copy all rows: each to fresh memory, or side by side to `room`, of at least `private_bytes(rows)` bytes.

    Several threads copy parts of the rows, because one copies only as fast as one core reads, and the kernel maps fresh
    memory page by page while it is written. `room` is memory that was used before, which is faster still.
    """
    if room is not None:
        _check(room, private_bytes(rows))
    made: list[Rows] = []
    parts: list[tuple[Tensor, Tensor]] = []
    start = 0
    for one in rows:
        size = private_bytes([one])
        where = _fresh(size) if room is None else room[start : start + size]
        start += size
        copies: dict[int, Tensor] = {}
        for name, tensor in _distinct(one).items():
            copies[name] = where[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            where = where[_aligned(tensor.nbytes) :]
            if tensor.dim() > 1:
                n_rows = max(1, _PART * len(tensor) // max(1, tensor.nbytes))
                parts += zip(copies[name].split(n_rows), tensor.split(n_rows), strict=True)
            else:
                parts.append((copies[name], tensor))
        made.append(replace(one, tensors={key: copies[id(tensor)] for key, tensor in one.tensors.items()}))
    threads = min(threads, -(-sum(to.nbytes for to, _ in parts) // _PART))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy, parts))
    else:  # a few rows are not worth a thread
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
    raise InvalidRequest.of("room", what, remedy)


def _distinct(rows: Rows) -> dict[int, Tensor]:
    """Return each tensor once, by its identity: two sites of one tap share a tensor."""
    return {id(tensor): tensor for tensor in rows.tensors.values()}


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _copy(part: tuple[Tensor, Tensor]) -> None:
    to, tensor = part
    if tensor.device.type == "cpu" and tensor.dim() and tensor.stride(-1) == 1:
        # With numpy, because torch's copy would start a team of threads in each of ours.
        np.copyto(to.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())
    else:
        to.copy_(tensor)


def _fresh(size: int) -> Tensor:
    """Return new memory, in huge pages where there are some: the kernel maps these in a fraction of the time."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):  # or not Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
