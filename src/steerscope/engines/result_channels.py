"""Channels that bring outcomes from an engine's thread to the calls that wait for them.

A call waits at its channel, in its own thread (`in_this_thread`) or on its event loop, and takes everything that has
come; if asked to, not more often than every `pause` seconds, so that a server writes larger batches to its sockets.
What an engine reports inside `together` wakes each thread and each loop once: a wake-up is a system call, and the
thread that wakes competes with the engine's.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from steerscope.engines.results import Choice, EngineJob, Outcome
from steerscope.specs.errors import RequestFailed

Pause = Callable[[], float]
T = TypeVar("T")
_ENDS = (Choice, RequestFailed)
_here = threading.local()  # of each thread: .held, what to wake at the end of `together`; .waits: in_this_thread


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
        held = _here.held
        _here.held = None
        for waiting in held:
            waiting.wake()


def in_this_thread(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine of an engine to its end without a loop: where it waits, this thread blocks."""
    before = waits_here()
    _here.waits = True
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


class ResultChannel:
    """Outcomes for one call that blocks its thread, in order. A signal that ends the main thread leaves nothing in it
    half done."""

    def __init__(self) -> None:
        self._items: deque[tuple[EngineJob, Outcome]] = deque()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, job: EngineJob, outcome: Outcome) -> None:
        self._append(job, outcome)
        _wake(self)

    def _append(self, job: EngineJob, outcome: Outcome) -> None:
        self._items.append((job, outcome))
        if job.abandoned:  # perhaps after the caller took for the last time
            self.discard_rest()

    def wake(self) -> None:
        self._woken.put(None)

    async def take(self) -> list[tuple[EngineJob, Outcome]]:
        """Return everything since the last time, at least one."""
        while not self._items:
            self._woken.get()
        return self._rest()

    def _rest(self) -> list[tuple[EngineJob, Outcome]]:
        found: list[tuple[EngineJob, Outcome]] = []
        with suppress(IndexError):  # of a caller that leaves, both threads may take what is left
            while True:
                found.append(self._items.popleft())
        return found

    def discard_rest(self, cancel: bool = False) -> None:
        for job, outcome in self._rest():
            discard(outcome)
            if cancel:
                job.cancel()


class LoopChannel(ResultChannel):
    """The same for a call on an event loop."""

    def __init__(self, waker: "LoopWaker", pause: Pause | None = None) -> None:
        super().__init__()
        self._waker = waker
        self._pause = pause
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._due = 0.0

    def put(self, job: EngineJob, outcome: Outcome) -> None:
        self._append(job, outcome)
        self._waker.news.append((self, isinstance(outcome, _ENDS)))
        _wake(self._waker)

    def look(self, ended: bool) -> None:
        """Let the call see what has come; an end is handed over without a pause. Belongs to the loop."""
        self._arrived.set()
        if ended:
            self._ended.set()

    async def take(self) -> list[tuple[EngineJob, Outcome]]:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        left_s = self._due - time.monotonic()
        if left_s > 0 and not self._ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), left_s)
        self._ended.clear()
        if self._pause is not None:
            self._due = time.monotonic() + self._pause()
        return self._rest()


class LoopWaker:
    """Wakes a loop once for everything that its channels have received since it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.news: deque[tuple[LoopChannel, bool]] = deque()  # channels, and whether an end came
        self._woken = False
        self._lock = threading.Lock()

    def wake(self) -> None:
        with self._lock:
            woken = self._woken
            self._woken = True
        if woken:
            return
        try:
            self._loop.call_soon_threadsafe(self._look)
        except RuntimeError:  # the loop is closed
            while self.news:
                self.news.popleft()[0].discard_rest(cancel=True)
            self._woken = False

    def _look(self) -> None:
        with self._lock:
            self._woken = False  # what comes from here on wakes it again
        while self.news:
            channel, ended = self.news.popleft()
            channel.look(ended)


def _wake(waiting: ResultChannel | LoopWaker) -> None:
    """Wake a thread or a loop now, or at the end of `together`."""
    held = getattr(_here, "held", None)
    if held is None:
        waiting.wake()
    else:
        held[waiting] = None


def open_channel(wakers: MutableMapping[asyncio.AbstractEventLoop, LoopWaker], pause: Pause | None) -> ResultChannel:
    """Return a channel for a call of this thread or of its loop, whose waker is among these."""
    if waits_here():
        return ResultChannel()
    loop = asyncio.get_running_loop()
    if loop not in wakers:
        wakers[loop] = LoopWaker(loop)
    return LoopChannel(wakers[loop], pause)


def discard(outcome: Outcome) -> None:
    if isinstance(outcome, Choice) and outcome.capture is not None:
        outcome.capture.close("the request was abandoned")
