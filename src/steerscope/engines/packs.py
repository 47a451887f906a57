"""Lens packs of an engine: loaded by threads beside its own, put to use between two of its steps.

To read and prepare a pack takes from milliseconds to minutes, in which running requests must not wait. So every pack
that is not there gets a `Load` with a thread; the engine's thread only begins it and takes over what it has made.
Registering a pack waits for its load, and so does a request that brings its pack along; other requests go on.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from steerscope.engines.plan import Plan
from steerscope.lenses.reader import Registered
from steerscope.specs.errors import EngineClosed, PackNotLoaded, SteerscopeError, TimedOut

LOAD_S = 600.0
_IDLE = 2  # packs that are neither registered nor used by a request, and stay
T = TypeVar("T")


class Store(Protocol[T]):
    """Where an engine has its packs. All but `load` is short, and done in the engine's thread."""

    def load(self, registered: Registered, stopped: threading.Event) -> T:
        """Read and prepare a pack. `stopped` is set when it is not needed any more."""
        ...

    def install(self, registered: Registered, loaded: T) -> None: ...
    def discard(self, registered: Registered, loaded: T) -> None:
        """Give up what was loaded and is not installed."""
        ...

    def remove(self, registered: Registered) -> None:
        """Give up what was installed, as soon as no request reads with it."""
        ...


class Load:
    """A pack on its way."""

    def __init__(self, registered: Registered) -> None:
        self.registered, self.stopped = registered, threading.Event()
        self.done: Future[None] = Future()  # when it is installed
        self.thread = threading.Thread(target=lambda: None, daemon=True)
        self.until = time.monotonic() + LOAD_S

    def end(self, error: BaseException | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)

    def stop(self, error: BaseException) -> None:
        self.stopped.set()
        self.end(error)


class Request(Protocol):
    """A request that may bring a pack along."""

    plan: Plan
    load: Load | None  # it waits for


class Packs(Generic[T]):
    """`call` does something in the engine's thread and waits for it, `put` does not wait; `used` are the packs of all
    requests. Methods without a note belong to the engine's thread."""

    def __init__(
        self,
        store: Store[T],
        call: Callable[..., Any],
        put: Callable[[Callable[[], None]], None],
        used: Callable[[], set[str]],
    ) -> None:
        self._store, self._call, self._put, self._used = store, call, put, used
        self._there: OrderedDict[str, Registered] = OrderedDict()  # used last comes last
        self._loads: dict[str, Load] = {}
        self._stopped: list[Load] = []  # their threads may still run
        self._names: dict[str, dict[int, Registered]] = {}  # the registrations of each pack
        self._leaving: set[str] = set()  # not registered any more, but used
        self._closed = False

    # --- registering: any other thread

    def register(self, registered: Registered, timeout_s: float, began: float) -> None:
        """Return when requests can use the pack. What fails, or takes longer than `timeout_s` since `began`, leaves
        nothing behind."""
        what, until = f"registering pack {registered.pack.info.name!r}", began + timeout_s
        try:
            _ = registered.word  # takes a while for a pack in memory
            load: Load | None = self._call(lambda: self._hold(registered), what, _left(until))
            if load is not None:
                load.done.result(_left(until))
        except BaseException as error:
            with suppress(EngineClosed):
                self._put(lambda: self._let_go(registered))
            if not isinstance(error, TimeoutError) or isinstance(error, SteerscopeError):
                raise
            remedy = "it is not registered: allow more with timeout_s, or put its folder on a faster disk"
            raise TimedOut(f"{what} took longer than {timeout_s:g} s; {remedy}") from None

    def unregister(self, registered: Registered) -> None:
        """Requests on their way keep the pack until they have ended."""
        self._call(lambda: self._let_go(registered), f"unregistering pack {registered.pack.info.name!r}")

    def _hold(self, registered: Registered) -> Load | None:
        self._names.setdefault(registered.word, {})[id(registered)] = registered
        self._leaving.discard(registered.word)
        return self._bring(registered)

    def _let_go(self, registered: Registered) -> None:
        """Also of a registration that never came here."""
        name = registered.word
        self._names.get(name, {}).pop(id(registered), None)
        if not self._names.get(name):
            self._names.pop(name, None)
            self._leaving.add(name)
            self.sweep()

    # --- requests

    def ready(self, one: Request) -> bool:
        """Whether a waiting request can run with its pack, which begins to load if it is not there. Raises what
        loading it has raised."""
        if one.plan.watch is None:
            return True
        load, one.load = one.load, None
        if load is not None and load.done.done():
            load.done.result()
        one.load = load = self._bring(one.plan.watch.registered)
        if load is not None and time.monotonic() > load.until and load.registered.word not in self._names:
            self._forget(load.registered.word)
        return load is None

    def awaited_by(self, one: Request) -> bool:
        """Whether this request waits for a pack that is still being loaded."""
        return one.load is not None and not one.load.done.done()

    def sweep(self) -> None:
        """Give up packs that were unregistered while requests used them."""
        if self._leaving:
            unused = self._leaving - self._used()
            self._leaving -= unused
            for name in unused:
                self._forget(name)

    # --- loading

    def _bring(self, registered: Registered) -> Load | None:
        """The load of a pack that is not there."""
        name = registered.word
        if name in self._there:
            self._there.move_to_end(name)
            return None
        if name not in self._loads:
            if self._closed:
                raise EngineClosed("the engine was closed: load it again")
            load = self._loads[name] = Load(registered)
            load.thread = threading.Thread(target=self._load, args=(load,), name="steerscope-pack", daemon=True)
            load.thread.start()
        return self._loads[name]

    def _load(self, load: Load) -> None:
        """In the load's thread."""
        try:
            loaded = self._store.load(load.registered, load.stopped)
        except BaseException as error:
            told = error if isinstance(error, SteerscopeError) else not_loaded(load.registered.pack.info.name, error)
            work = functools.partial(self._failed, load, told)
        else:
            work = functools.partial(self._loaded, load, loaded)
        try:
            self._put(work)
        except EngineClosed as error:
            load.end(error)

    def _loaded(self, load: Load, loaded: T) -> None:
        registered, name = load.registered, load.registered.word
        if self._loads.get(name) is not load:
            self._store.discard(registered, loaded)
            return
        try:
            self._store.install(registered, loaded)
        except Exception as error:
            with suppress(Exception):
                self._store.discard(registered, loaded)
            self._failed(load, not_loaded(registered.pack.info.name, error))
            return
        del self._loads[name]
        self._there[name] = registered
        if name not in self._names:
            self._make_room(name)
        load.end(None)

    def _failed(self, load: Load, error: BaseException) -> None:
        if self._loads.get(load.registered.word) is load:
            del self._loads[load.registered.word]
        load.end(error)

    def _make_room(self, name: str) -> None:
        """For a pack that will be idle too, once its requests have ended."""
        loose = [other for other in self._there if other not in self._names and other != name]
        if len(loose) >= _IDLE:
            used = self._used()
            idle = [other for other in loose if other not in used]
            for other in idle[: max(0, len(idle) - _IDLE + 1)]:
                self._forget(other)

    def _forget(self, name: str) -> None:
        load, found = self._loads.pop(name, None), self._there.pop(name, None)
        if load is not None:
            self._stopped = [other for other in self._stopped if other.thread.is_alive()] + [load]
            what = f"pack {load.registered.pack.info.name!r} was not loaded"
            load.stop(
                PackNotLoaded(f"{what}: it took longer than {LOAD_S:g} s, or was unregistered; register it again")
            )
        if found is not None:
            self._store.remove(found)

    # --- the end

    def close(self) -> None:
        self._closed = True
        self._stopped += self._loads.values()
        for load in self._loads.values():
            load.stop(EngineClosed("the engine was closed while a pack was being loaded: load it again"))
        self._loads.clear()

    def join(self, timeout_s: float) -> None:
        """Wait for threads, after `close`: one inside torch when the interpreter ends would abort it. Any thread."""
        until = time.monotonic() + timeout_s
        for load in self._stopped:
            load.thread.join(max(0.0, until - time.monotonic()))


def _left(until: float) -> float:
    """Seconds from now; raises TimeoutError when there are none."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def not_loaded(name: str, error: BaseException) -> PackNotLoaded:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    told = f"pack {name!r} could not be loaded: {reason}"
    return PackNotLoaded(f"{told}; see that its folder can be read and memory is free, or give budget_bytes")
