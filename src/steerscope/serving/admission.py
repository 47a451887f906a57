"""A bounded queue before the engine: limits on running choices and waiting requests; the rest are refused with 429."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator

from steerscope.serving.errors import ApiError

_MEMORY = 0.9  # weight of earlier requests in the mean duration


class Admission:
    """First come, first served. A request of more choices than may run at once runs alone."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
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
            self._admit()

    def check(self, choices: int = 1) -> None:
        """Refuse a request that can neither run now nor wait."""
        if self.waiting >= self.max_waiting and (self._queue or not self._fits(choices)):
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
            if turn.done() and not turn.cancelled():  # admitted at the moment of its cancellation
                self.running -= choices
            else:
                with contextlib.suppress(ValueError):  # another cancelled request has removed it
                    self._queue.remove((turn, choices))
            self._admit()
            raise

    @property
    def retry_after(self) -> float:
        """Estimated seconds until the queue has moved on."""
        return min(60.0, max(1.0, self._mean_s * (1 + self.waiting / self.max_running)))

    def _fits(self, choices: int) -> bool:
        return self.running == 0 or self.running + choices <= self.max_running

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][1]):
            turn, choices = self._queue.popleft()
            if not turn.done():
                self.running += choices
                turn.set_result(None)
