"""Channels that bring outcomes from an engine's thread to the calls that wait for them.

A `LoopQueue` serves all calls of one event loop, so that a step of many sequences wakes the loop once. A `LoopChannel`
is where one call waits; it hands over everything that has come and, if asked to, not more often than every `pause`
seconds, so that a server writes larger batches to its sockets. What an engine reports inside `together` wakes each loop
once: a wake-up is a system call, and the thread that wakes competes with the engine's.

A call without a loop waits at a `ThreadChannel`, in its own thread (`in_this_thread`).
"""

import asyncio
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from steerscope.engines.results import Choice, EngineJob, Outcome

Pause = Callable[[], float]
T = TypeVar("T")
_here = threading.local()  # of each thread: .held, channels to wake at the end of `together`; .waits: in_this_thread


@contextmanager
def together() -> Iterator[None]:
    """Wake each channel that this thread puts something into once, at the end."""
    if getattr(_here, "held", None) is not None:
        yield
        return
    _here.held = {}
    try:
        yield
    finally:
        held, _here.held = _here.held, None
        for waiting in held:
            waiting.wake()


def in_this_thread(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine of an engine to its end without a loop: where it waits, this thread blocks."""
    before, _here.waits = waits_here(), True
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    finally:
        _here.waits = before
    coroutine.close()
    raise RuntimeError(f"{coroutine} wants a loop")


def waits_here() -> bool:
    """Return whether coroutines may block this thread."""
    return getattr(_here, "waits", False)


async def sleep(seconds: float) -> None:
    if waits_here():
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


class ThreadChannel:
    """Outcomes for one call that blocks its thread, in order. A signal that ends the main thread leaves nothing in it
    half done."""

    def __init__(self) -> None:
        self._items: deque[tuple[EngineJob, Outcome]] = deque()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, job: EngineJob, outcome: Outcome) -> None:
        self._items.append((job, outcome))
        if job.abandoned:  # perhaps after the caller took for the last time
            for _, left in self.rest():
                discard(left)
        _wake(self)

    def wake(self) -> None:
        self._woken.put(None)

    async def take(self) -> list[tuple[EngineJob, Outcome]]:
        """Return everything since the last time, at least one."""
        while not self._items:
            self._woken.get()
        return self.rest()

    def rest(self) -> list[tuple[EngineJob, Outcome]]:
        found: list[tuple[EngineJob, Outcome]] = []
        with suppress(IndexError):  # of a caller that leaves, both threads may take what is left
            while True:
                found.append(self._items.popleft())
        return found


def _wake(channel: "ThreadChannel | LoopQueue") -> None:
    """Wake a channel now, or at the end of `together`."""
    held = getattr(_here, "held", None)
    if held is None:
        channel.wake()
    else:
        held[channel] = None


class LoopChannel:
    """Outcomes for one call, in order. Belongs to its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: Pause | None = None) -> None:
        self._loop, self._pause = loop, pause
        self._items: list[tuple[EngineJob, Outcome]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._urgent = False  # an end is handed over without a pause

    def put(self, job: EngineJob, outcome: Outcome) -> None:
        self._items.append((job, outcome))
        if isinstance(outcome, Choice | Exception):
            self._urgent = True
        if self._waiter is not None:
            self._consider()

    async def take(self) -> list[tuple[EngineJob, Outcome]]:
        """Return everything since the last time, at least one."""
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

    def rest(self) -> list[tuple[EngineJob, Outcome]]:
        items, self._items, self._urgent = self._items, [], False
        return items

    def _ready(self) -> bool:
        return bool(self._items) and (self._pause is None or self._urgent or self._loop.time() >= self._due)

    def _consider(self) -> None:
        """Wake the waiting call, now or when it is due."""
        if self._ready():
            self._wake()
        elif self._items and self._timer is None:
            self._timer = self._loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


ResultChannel = LoopChannel | ThreadChannel


class LoopQueue:
    """Takes outcomes from any thread to the channels of one loop, with one wake-up for all since the loop last read."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[LoopChannel, EngineJob, Outcome]] = deque()
        self._woken, self._lock = False, threading.Lock()

    def put(self, channel: LoopChannel, job: EngineJob, outcome: Outcome) -> None:
        self._waiting.append((channel, job, outcome))
        _wake(self)

    def wake(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, True
        if woken:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed
            while self._waiting:
                _, job, outcome = self._waiting.popleft()
                job.cancel()
                discard(outcome)
            self._woken = False

    def _deliver(self) -> None:
        with self._lock:
            self._woken = False  # what comes from here on wakes it again
        while self._waiting:
            channel, job, outcome = self._waiting.popleft()
            if job.abandoned:
                discard(outcome)
            else:
                channel.put(job, outcome)


class ResultChannels:
    """Makes the channels of one engine's calls."""

    def __init__(self) -> None:
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopQueue] = weakref.WeakKeyDictionary()

    def open(self, pause: Pause | None) -> tuple[ResultChannel, Callable[[EngineJob, Outcome], None]]:
        """Return a channel for a call of this thread or of its loop, and the function that puts into it."""
        if waits_here():
            blocking = ThreadChannel()
            return blocking, blocking.put
        loop = asyncio.get_running_loop()
        queue_of_loop = self._queues.get(loop)
        if queue_of_loop is None:
            queue_of_loop = self._queues[loop] = LoopQueue(loop)
        channel = LoopChannel(loop, pause)
        return channel, functools.partial(queue_of_loop.put, channel)


def discard(outcome: Outcome) -> None:
    if isinstance(outcome, Choice) and outcome.capture is not None:
        outcome.capture.close("the request was abandoned")
