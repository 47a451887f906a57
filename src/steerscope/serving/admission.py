"""A bounded queue before the engine: so many choices run, so many requests wait, and the rest are told to come back."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator

from steerscope.serving.errors import ApiError

_MEMORY = 0.9  # how much of the mean duration survives a request


class Admission:
    """First come, first served. A request of more choices than may run at all runs alone."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.running = 0
        self.rejected = 0
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()
        self._mean_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def place(self, choices: int) -> AsyncIterator[None]:
        await self._enter(choices)
        began = time.monotonic()
        try:
            yield
        finally:
            self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * (time.monotonic() - began)
            self.running -= choices
            self._let_in()

    def check(self, choices: int = 1) -> None:
        """Refuse what could neither run now nor wait."""
        if self.waiting >= self.max_waiting and (self._queue or not self._fits(choices)):
            self.rejected += 1
            what = f"{self.running} choices are running and {self.waiting} requests wait: try again later"
            raise ApiError(429, what, "queue_full", retry_after=self.retry_after)

    async def _enter(self, choices: int) -> None:
        if not self._queue and self._fits(choices):
            self.running += choices
            return
        self.check(choices)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((turn, choices))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in at the very moment it left
                self.running -= choices
            else:
                with contextlib.suppress(ValueError):  # another who left at the same moment has swept it away
                    self._queue.remove((turn, choices))
            self._let_in()
            raise

    @property
    def retry_after(self) -> float:
        """Seconds until the queue has probably moved on."""
        return min(60.0, max(1.0, self._mean_s * (1 + self.waiting / self.max_running)))

    def _fits(self, choices: int) -> bool:
        return self.running == 0 or self.running + choices <= self.max_running

    def _let_in(self) -> None:
        while self._queue and self._fits(self._queue[0][1]):
            turn, choices = self._queue.popleft()
            if not turn.done():
                self.running += choices
                turn.set_result(None)
