"""Outcomes on their way from an engine's thread to the coroutines that wait for them.

An Outbox serves all calls of one event loop, so that a step of many sequences wakes the loop once. An Inbox is what one
call waits at; it hands over everything that has come, and where it is asked to, not more often than every `pause`
seconds: who writes each batch to a socket then writes less often than tokens come. What an engine tells `together`
wakes each loop once: a wake-up is a system call, and the thread that wakes competes with the engine's.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steerscope.engines.generation import Choice, Job, Outcome

Pause = Callable[[], float]
_here = threading.local()  # .held: outboxes that this thread has put something into and not woken


@contextmanager
def together() -> Iterator[None]:
    """Whoever this thread tells something is woken once, at the end."""
    if getattr(_here, "held", None) is not None:
        yield
        return
    _here.held = {}
    try:
        yield
    finally:
        held, _here.held = _here.held, None
        for outbox in held:
            outbox.wake()


class Inbox:
    """What has come for one call, in order. Lives on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: Pause | None = None) -> None:
        self._loop, self._pause = loop, pause
        self._items: list[tuple[Job, Outcome]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._urgent = False  # an end is told at once

    def put(self, job: Job, outcome: Outcome) -> None:
        self._items.append((job, outcome))
        if isinstance(outcome, Choice | Exception):
            self._urgent = True
        if self._waiter is not None:
            self._consider()

    async def take(self) -> list[tuple[Job, Outcome]]:
        """Everything since the last time, at least one."""
        if not self._ready():
            self._waiter = self._loop.create_future()
            try:
                self._consider()
                await self._waiter
            finally:
                self._waiter = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        if self._pause is not None:
            self._due = self._loop.time() + self._pause()
        return self.rest()

    def rest(self) -> list[tuple[Job, Outcome]]:
        items, self._items, self._urgent = self._items, [], False
        return items

    def _ready(self) -> bool:
        return bool(self._items) and (self._pause is None or self._urgent or self._loop.time() >= self._due)

    def _consider(self) -> None:
        """Wake whoever waits, now or when it is due."""
        if self._ready():
            self._wake()
        elif self._items and self._timer is None:
            self._timer = self._loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox:
    """From any thread into the inboxes of one loop: one wake-up for all that has come until the loop looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Inbox, Job, Outcome]] = deque()
        self._woken, self._lock = False, threading.Lock()

    def put(self, inbox: Inbox, job: Job, outcome: Outcome) -> None:
        self._waiting.append((inbox, job, outcome))
        held = getattr(_here, "held", None)
        if held is None:
            self.wake()
        else:
            held[self] = None

    def wake(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, True
        if woken:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            while self._waiting:
                _, job, outcome = self._waiting.popleft()
                job.cancel()
                discard(outcome)
            self._woken = False

    def _deliver(self) -> None:
        with self._lock:
            self._woken = False  # what comes from here on wakes it again
        while self._waiting:
            inbox, job, outcome = self._waiting.popleft()
            if job.abandoned:
                discard(outcome)
            else:
                inbox.put(job, outcome)


def discard(outcome: Outcome) -> None:
    if isinstance(outcome, Choice) and outcome.capture is not None:
        outcome.capture.close("the request was abandoned")
