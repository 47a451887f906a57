"""A fixed number of bytes for captured rows. Bytes are reserved before a request is submitted. A request waits while
too few are free, and is refused after a time limit. Only expired handles are dropped to free bytes."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable

from pydantic import ByteSize

from steerscope.specs.errors import CapacityExceeded, EngineClosed

_POLL_S = 0.02


def human(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


class Reservation:
    """Bytes held by one capture until it is closed, dropped or expired."""

    def __init__(self, budget: "ByteBudget", size: int) -> None:
        self._budget = budget
        self.size = size

    def split(self, size: int) -> "Reservation":
        """Split off a part of this reservation."""
        with self._budget.lock:
            self.size -= size
        return Reservation(self._budget, size)

    def shrink(self, size: int) -> None:
        if size >= self.size:
            return
        with self._budget.lock:  # a handle may be closed by a user and by expiry at the same time
            freed = max(0, self.size - size)
            self.size -= freed
            self._budget.give_back(freed)

    def release(self) -> None:
        self.shrink(0)


class ByteBudget:
    def __init__(self, total: int, wait_s: float) -> None:
        self.total = total
        self.wait_s = wait_s
        self.used = 0
        self.lock = threading.RLock()  # a finaliser may release while this thread holds the lock
        self.closed = False
        self.reserved = 0  # bytes, in total
        self.released = 0  # bytes, in total
        self._queue: deque[object] = deque()  # waiting requests, in order
        self._expire: dict[int, tuple[float, Callable[[], None]]] = {}

    async def reserve(
        self, size: int, what: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> Reservation:
        if size > self.total:
            raise CapacityExceeded(
                f"{what} needs {human(size)}, the capture budget is {human(self.total)}: capture fewer layers or "
                "tokens, lower max_tokens, use reduce, send fewer prompts at once, or raise capture_budget"
            )
        turn = object()
        with self.lock:
            self._queue.append(turn)
        moved = self.released
        deadline = time.monotonic() + self.wait_s
        try:
            # In order: a large request must not starve behind small ones.
            while True:
                reservation = self.take(size) if self._queue[0] is turn else None
                if reservation is not None:
                    return reservation
                if self.closed:
                    raise EngineClosed("the engine was closed while a capture waited for room")
                if moved != self.released:  # other captures finish, so waiting helps
                    moved = self.released
                    deadline = time.monotonic() + self.wait_s
                if time.monotonic() > deadline:
                    raise CapacityExceeded(
                        f"{what} needs {human(size)}, but open captures hold {human(self.used)} of {human(self.total)} "
                        f"and gave nothing back for {self.wait_s:g} s: close handles you have fetched, or raise "
                        "capture_budget"
                    )
                await sleep(_POLL_S)
        finally:
            with self.lock:
                self._queue.remove(turn)

    def give_back(self, size: int) -> None:
        with self.lock:
            self.used -= size
            self.released += size

    def expire_after(self, handle_id: int, ttl_s: float, expire: Callable[[], None]) -> None:
        with self.lock:
            self._expire[handle_id] = (time.monotonic() + ttl_s, expire)

    def forget(self, handle_id: int) -> None:
        with self.lock:
            self._expire.pop(handle_id, None)

    def stats(self) -> dict[str, float]:
        with self.lock:
            totals = {"capture_reserved": self.reserved, "capture_released": self.released}
            return {"capture_bytes": self.used, "capture_budget": self.total, **totals}

    def sweep(self) -> None:
        """Expire handles whose rows were not fetched in time."""
        now = time.monotonic()
        with self.lock:
            waiting = list(self._expire.values())  # a copy: a handle collected meanwhile removes its entry
        due = [expire for deadline, expire in waiting if deadline <= now]
        for expire in due:
            expire()

    def take(self, size: int) -> Reservation | None:
        """Reserve bytes, or return None when too few are free."""
        self.sweep()
        with self.lock:
            if self.used + size > self.total:
                return None
            self.used += size
            self.reserved += size
        return Reservation(self, size)
