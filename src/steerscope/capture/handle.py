"""CaptureHandle: returned by a request in place of its rows. `fetch` is lazy and idempotent; `with` closes it."""

import asyncio
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from steerscope.capture.budget import ByteBudget, Reservation
from steerscope.capture.private import private
from steerscope.capture.rows import Rows
from steerscope.specs.errors import CaptureClosed


class UnfetchedRows(UserWarning):
    """Captured rows were dropped unfetched. (A ResourceWarning would not be shown by default.)"""


class CaptureHandle:
    """Rows of one choice of one request. They stay until the handle is closed, dropped or expired."""

    def __init__(
        self, request_id: str, count: int, load: Callable[[], Rows], budget: ByteBudget, held: Reservation, ttl_s: float
    ) -> None:
        self.request_id, self.count = request_id, count
        self._load: Callable[[], Rows] | None = load
        self._rows: Rows | None = None
        self._gone: str | None = None
        self.saving: Future[Path] | None = None  # of a request with `save_as`
        self._own = False  # the rows are copies outside the budget
        self._budget, self._held = budget, held
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
                self._rows, self._load = self._load(), None
                self._budget.forget(id(self))
            return self._rows

    def keep(self, rows: Rows) -> Rows:
        """Replace the rows by this copy and release their budget."""
        with self._lock:
            if self._gone is None:
                self._rows, self._own = rows, True
                self._held.release()
            return rows

    @property
    def own(self) -> bool:
        """Whether the rows are a copy already."""
        return self._own

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
                self._gone, self._load, self._rows = why, None, None
                self._budget.forget(id(self))
                self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
