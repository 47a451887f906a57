"""A bounded queue before the engine: limits on running choices and waiting requests; the rest are refused with 429."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from steerscope.serving.errors import ApiError

_MEMORY = 0.9  # weight of earlier requests in the mean duration


class Admission:
    """First come, first served. A request of more choices than may run at once runs alone."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.waiting = 0
        self._turn = asyncio.Lock()  # held by the first of those that wait
        self._freed = asyncio.Event()
        self._mean_s = 1.0

    @contextlib.asynccontextmanager
    async def place(self, choices: int) -> AsyncIterator[None]:
        self.check(choices)
        self.waiting += 1
        try:
            async with self._turn:
                while not self._fits(choices):
                    self._freed.clear()
                    await self._freed.wait()
                self.running += choices
        finally:
            self.waiting -= 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * (time.monotonic() - began)
            self.running -= choices
            self._freed.set()

    def check(self, choices: int = 1) -> None:
        """Refuse a request that can neither run now nor wait."""
        if self.waiting >= self.max_waiting and (self.waiting or not self._fits(choices)):
            what = f"{self.running} choices are running and {self.waiting} requests wait: try again later"
            retry_after = min(60.0, max(1.0, self._mean_s * (1 + self.waiting / self.max_running)))
            raise ApiError(429, what, "queue_full", retry_after=retry_after)

    def _fits(self, choices: int) -> bool:
        return self.running == 0 or self.running + choices <= self.max_running
