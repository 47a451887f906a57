"""A fixed number of bytes for captured rows. Room is reserved before a request is submitted; a request that finds none
waits, and after a while is refused with who holds the room. Nothing is dropped to make room except expired handles."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable

from steerscope.specs.errors import CapacityExceeded, EngineClosed

_POLL_S = 0.02


def human(size: int) -> str:
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


class Reservation:
    """Bytes held by one capture until it is closed, dropped or expired."""

    def __init__(self, budget: "ByteBudget", size: int) -> None:
        self._budget, self.size = budget, size

    def split(self, size: int) -> "Reservation":
        """A part of this reservation that lives on its own."""
        with self._budget.lock:
            self.size -= size
        return Reservation(self._budget, size)

    def shrink(self, size: int) -> None:
        if size >= self.size:
            return
        with self._budget.lock:  # a handle may be closed and expire at the same moment
            freed = max(0, self.size - size)
            self.size -= freed
            self._budget.give_back(freed)

    def release(self) -> None:
        self.shrink(0)


class ByteBudget:
    def __init__(self, total: int, wait_s: float) -> None:
        self.total, self.wait_s = total, wait_s
        self.used = 0
        self.lock = threading.RLock()  # finalisers may give back while this thread holds it
        self.closed = False
        self.reserved = 0  # bytes, ever
        self.released = 0  # and those that came back
        self._queue: deque[object] = deque()  # who waits for room, in order
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
        moved, deadline = self.released, time.monotonic() + self.wait_s
        try:
            # First come, first served: a large request must not starve behind small ones.
            while self._queue[0] is not turn or (reservation := self.take(size)) is None:
                if self.closed:
                    raise EngineClosed("the engine was closed while a capture waited for room")
                if moved != self.released:  # somebody finishes: waiting makes sense
                    moved, deadline = self.released, time.monotonic() + self.wait_s
                if time.monotonic() > deadline:
                    raise CapacityExceeded(
                        f"{what} needs {human(size)}, but open captures hold {human(self.used)} of {human(self.total)} "
                        f"and gave nothing back for {self.wait_s:g} s: close handles you have fetched, or raise "
                        "capture_budget"
                    )
                await sleep(_POLL_S)
            return reservation
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
            books = {"capture_reserved": self.reserved, "capture_released": self.released}
            return {"capture_bytes": self.used, "capture_budget": self.total, **books}

    def sweep(self) -> None:
        """Expire what nobody fetched in time."""
        now = time.monotonic()
        with self.lock:
            waiting = list(self._expire.values())  # at once: a handle collected meanwhile takes itself off
        due = [expire for deadline, expire in waiting if deadline <= now]
        for expire in due:
            expire()

    def take(self, size: int) -> Reservation | None:
        """Room for so much, if there is any now."""
        self.sweep()
        with self.lock:
            if self.used + size > self.total:
                return None
            self.used += size
            self.reserved += size
        return Reservation(self, size)
