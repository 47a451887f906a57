"""Outcomes on their way from an engine's thread to the coroutines that wait for them.

An Outbox serves all calls of one event loop, so that a step of many sequences wakes the loop once. An Inbox is what one
call waits at; it hands over everything that has come, and where it is asked to, not more often than every `pause`
seconds: who writes each batch to a socket then writes less often than tokens come. What an engine tells `together`
wakes each loop once: a wake-up is a system call, and the thread that wakes competes with the engine's.

A call without a loop waits at a Mailbox, in its own thread (`in_this_thread`).
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
_here = threading.local()  # .held: who was told something by this thread and not woken; .waits: in_this_thread


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


def in_this_thread(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine of an engine to its end without a loop: wherever it waits, this thread does."""
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
    """Whether coroutines may hold up this thread."""
    return getattr(_here, "waits", False)


async def sleep(seconds: float) -> None:
    if waits_here():
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


class Mailbox:
    """What has come for one call that holds up its thread, in order. Nothing in it can be left half done by a signal
    that ends the main thread."""

    def __init__(self) -> None:
        self._items: deque[tuple[EngineJob, Outcome]] = deque()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, job: EngineJob, outcome: Outcome) -> None:
        self._items.append((job, outcome))
        if job.abandoned:  # perhaps since the caller looked for the last time
            for _, left in self.rest():
                discard(left)
        _wake(self)

    def wake(self) -> None:
        self._woken.put(None)

    async def take(self) -> list[tuple[EngineJob, Outcome]]:
        """Everything since the last time, at least one."""
        while not self._items:
            self._woken.get()
        return self.rest()

    def rest(self) -> list[tuple[EngineJob, Outcome]]:
        found: list[tuple[EngineJob, Outcome]] = []
        with suppress(IndexError):  # of a caller that leaves, both threads may take what is left
            while True:
                found.append(self._items.popleft())
        return found


def _wake(box: "Mailbox | Outbox") -> None:
    """Now, or at the end of what is told together."""
    held = getattr(_here, "held", None)
    if held is None:
        box.wake()
    else:
        held[box] = None


class Inbox:
    """What has come for one call, in order. Lives on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: Pause | None = None) -> None:
        self._loop, self._pause = loop, pause
        self._items: list[tuple[EngineJob, Outcome]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._urgent = False  # an end is told at once

    def put(self, job: EngineJob, outcome: Outcome) -> None:
        self._items.append((job, outcome))
        if isinstance(outcome, Choice | Exception):
            self._urgent = True
        if self._waiter is not None:
            self._consider()

    async def take(self) -> list[tuple[EngineJob, Outcome]]:
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

    def rest(self) -> list[tuple[EngineJob, Outcome]]:
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


Box = Inbox | Mailbox


class Outbox:
    """From any thread into the inboxes of one loop: one wake-up for all that has come until the loop looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Inbox, EngineJob, Outcome]] = deque()
        self._woken, self._lock = False, threading.Lock()

    def put(self, inbox: Inbox, job: EngineJob, outcome: Outcome) -> None:
        self._waiting.append((inbox, job, outcome))
        _wake(self)

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


class Boxes:
    """Where the calls of one engine wait."""

    def __init__(self) -> None:
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = weakref.WeakKeyDictionary()

    def open(self, pause: Pause | None) -> tuple[Box, Callable[[EngineJob, Outcome], None]]:
        """For a call of this thread, or of the loop that runs here; and how it is told something."""
        if waits_here():
            box = Mailbox()
            return box, box.put
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = Outbox(loop)
        inbox = Inbox(loop, pause)
        return inbox, functools.partial(outbox.put, inbox)


def discard(outcome: Outcome) -> None:
    if isinstance(outcome, Choice) and outcome.capture is not None:
        outcome.capture.close("the request was abandoned")
