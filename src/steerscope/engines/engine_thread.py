"""An engine with a thread of its own: requests come in through a queue, and the thread works until told to stop."""

import atexit
import functools
import queue
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from steerscope.capture.budget import ByteBudget
from steerscope.engines.api import Engine
from steerscope.engines.results import EngineJob
from steerscope.engines.sequence import RunningText
from steerscope.engines.sync import SyncEngine
from steerscope.specs.errors import EngineClosed, RequestFailed, TimedOut

SWEEP_S = 5.0  # how often an idle engine looks for captures that have expired
_TIDY_S = 0.005  # how long it has been idle when it tidies up
_PARKED_S = 0.05  # how often the thread looks for cancellations while all requests wait for packs
_ANSWER_S = 120.0
OVERTAKEN_S = 10.0  # how long a request that waits for a slot may be overtaken without limit
T = TypeVar("T")
S = TypeVar("S", bound=RunningText)


class ThreadedEngine(Engine, Generic[S]):
    def __init__(self, budget: ByteBudget) -> None:
        super().__init__(budget)
        self._waiting: list[S] = []
        self._inbox: queue.SimpleQueue[list[EngineJob] | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # orders submitting and closing
        self._counts: dict[str, float] = {"requests": 0, "finished": 0, "failed": 0, "tokens": 0, "steps": 0}

    @functools.cached_property
    def sync(self) -> SyncEngine:
        """The same engine for code without await; works inside notebooks too."""
        return SyncEngine(self)

    # --- what an engine does in its thread

    @abstractmethod
    def _loop(self) -> None:
        """The thread's work, until `_receive` says that it is over."""

    @abstractmethod
    def _sequence(self, job: EngineJob) -> S: ...

    @abstractmethod
    def _busy(self) -> bool:
        """Requests are running; the thread must not wait for others."""

    def _untidy(self) -> bool:
        """Whether something is left to be done of requests that have ended, which the next one would have to."""
        return False

    def _tidy(self) -> None:
        """Do it. Never raises."""

    # --- any thread

    def _run(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=f"steerscope-{self.facts.name}", daemon=True)
        self._thread.start()
        stop = weakref.WeakMethod(self._stop)  # a thread inside torch when the interpreter ends would abort it
        atexit.register(lambda: (found := stop()) and found())

    def _submit(self, jobs: Sequence[EngineJob]) -> None:
        self._put(list(jobs))

    def _put(self, item: list[EngineJob] | Callable[[], None]) -> None:
        with self._lock:
            if self.closed or not self._thread.is_alive():
                raise EngineClosed(f"the engine of {self.facts.name} was closed: load it again")
            self._inbox.put(item)

    def _call(self, work: Callable[[], T], what: str = "a question to the engine", timeout_s: float | None = None) -> T:
        """Do something in the engine's thread, between two steps. After a time-out it is still done, but not told."""
        if threading.current_thread() is self._thread:
            return work()
        done = self._post(work)
        limit_s = _ANSWER_S if timeout_s is None else min(timeout_s, _ANSWER_S)
        wait([done], limit_s)
        if not done.done():
            why = f"{what} was not answered by the engine of {self.facts.name} within {limit_s:.3g} s"
            remedy = "a step takes longer, or its device hangs: try again, or close the engine and load it anew"
            raise TimedOut(f"{why}; {remedy}")
        try:
            return done.result()
        except TimedOut:
            raise
        except TimeoutError as error:  # of a worker, or a file system
            raise TimedOut(f"{what} failed: {error or 'it took too long'}; try again") from error

    def exclusively(self, work: Callable[[], T]) -> T:
        """Use the model between two steps: no request runs meanwhile, and requests take a step before the next call.
        The work has ended when this returns, also if the caller is interrupted."""
        done = self._post(work)
        try:
            return done.result()
        finally:
            wait([done])

    def _post(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._put(run)
        return done

    def _stop(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=60)
            self._lenses.join(timeout_s=60)

    # --- the engine's thread

    def _receive(self) -> bool:
        """Take new jobs, waiting only when there is nothing to do. False: the engine is closed."""
        due = self._inbox.qsize()  # what comes meanwhile is taken after a step: callers must not keep requests waiting
        while True:
            if self._busy() and (due <= 0 or self._inbox.empty()):
                return True
            idle = not self._busy() and not self._waiting
            parked = self._parked()
            untidy = idle and self._untidy()
            patience = _PARKED_S if parked else _TIDY_S if untidy else SWEEP_S
            try:
                item = self._inbox.get(block=idle or parked, timeout=patience)
            except queue.Empty:
                if not idle:
                    return True
                if untidy:
                    self._tidy()
                else:
                    self.budget.sweep()
                continue
            due -= 1
            if item is None:
                return False
            if callable(item):
                item()
                del item  # what it holds must not stay until the next one comes
                self.budget.sweep()  # a caller that asks all the time must not keep the engine from it
                continue
            self._counts["requests"] += len(item)
            for job in item:
                try:
                    self._waiting.append(self._sequence(job))
                except Exception as error:
                    self._counts["failed"] += 1
                    job.fail(RequestFailed(f"{job.plan.request_id} could not be started: {error}"))

    def _parked(self) -> bool:
        """Whether nothing can be done before a pack is loaded."""
        if self._busy() or not self._waiting:
            return False
        return all(one.load is not None and not one.load.done.done() for one in self._waiting)

    def _packs_in_use(self) -> set[str]:
        """The packs of all requests, running or waiting."""
        watches = [one.plan.watch for one in self._all_requests()]
        return {watch.registered.digest for watch in watches if watch is not None}

    @abstractmethod
    def _all_requests(self) -> list[S]: ...

    def _refuse_rest(self) -> None:
        """Refuse what is left in the queue when the thread ends."""
        with self._lock:
            self.closed = self.budget.closed = True
        self._lenses.close()
        while not self._inbox.empty():
            item = self._inbox.get()
            if callable(item):
                item()
            for job in item if isinstance(item, list) else ():
                self._counts["failed"] += 1
                job.fail(RequestFailed(f"{job.plan.request_id} failed: the engine has ended"))

    def _overtakes(self, one: S, blocked: S, place_is_free: bool) -> bool:
        """Whether a request may begin before one that waits for a slot. Only a request that needs none may: another
        one could keep the slot in use for ever. Behind a request that has waited long it takes no more than a free
        place of the batch, so that no queue stands before that request when its slot is free."""
        return not one.needs_slot and (place_is_free or blocked.waited < OVERTAKEN_S)

    def _drop_waiting(self, cancelled_only: bool) -> None:
        for one in [one for one in self._waiting if one.job.cancelled or not cancelled_only]:
            self._waiting.remove(one)
            one.end("cancelled")

    def _failed(self, one: S, error: Exception) -> None:
        self._counts["failed"] += 1
        wrapped = RequestFailed(f"{one.name} failed: {type(error).__name__}: {error}")
        one.fail(error if isinstance(error, RequestFailed) else wrapped)
