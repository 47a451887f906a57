"""Lens packs of an engine: loaded in threads of their own, installed between two steps of the engine.

Reading and preparing a pack takes milliseconds to minutes, in which running requests must not wait. So each pack that
is not installed gets a `Load` with its own thread; the engine's thread only starts it and installs its result.
Registering a pack waits for its load, and so does a request that brings its own pack; other requests go on.
"""

import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from steerscope.lenses.reader import Registered
from steerscope.specs.errors import EngineClosed, PackNotLoaded, SteerscopeError, TimedOut, first_line

log = logging.getLogger("steerscope")
LOAD_S = 600.0
_MAX_IDLE = 2  # packs that stay installed though they are neither registered nor used by a request


class Store(Protocol):
    """Where an engine keeps its packs. `load` runs in the load's thread, until it is `stopped`; the others are short,
    in the engine's. `discard` frees a loaded pack that was not installed, `remove` an installed one as soon as no
    request reads with it."""

    def load(self, registered: Registered, stopped: threading.Event) -> Any: ...
    def install(self, registered: Registered, loaded: Any) -> None: ...
    def discard(self, registered: Registered, loaded: Any) -> None: ...
    def remove(self, registered: Registered) -> None: ...


class Load:
    def __init__(self, registered: Registered, work: Callable[["Load"], None]) -> None:
        self.registered = registered
        self.stopped = threading.Event()
        self.done: Future[None] = Future()  # resolved when the pack is installed
        self.until = time.monotonic() + LOAD_S
        self.thread = threading.Thread(target=work, args=(self,), name="steerscope-pack", daemon=True)

    def end(self, error: BaseException | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)

    def stop(self, error: BaseException) -> None:
        self.stopped.set()
        self.end(error)


class Packs:
    """The packs that an engine has installed, is loading, or has under a registered name, by `Registered.digest`.

    `call` runs a function in the engine's thread and waits for its result, `put` does not wait; `used` returns the
    digests of the packs of all requests. Methods belong to the engine's thread unless their section says otherwise.
    """

    def __init__(
        self,
        store: Store,
        call: Callable[..., Any],
        put: Callable[[Callable[[], None]], None],
        used: Callable[[], set[str]],
    ) -> None:
        self._store = store
        self._call = call
        self._put = put
        self._used = used
        self._installed: OrderedDict[str, Registered] = OrderedDict()  # least recently used first
        self._loads: dict[str, Load] = {}
        self._stopped: list[Load] = []  # their threads may still run
        self._registrations: dict[int, Registered] = {}  # by id
        self._unregistered: set[str] = set()  # to be dropped when no request uses them
        self._closed = False

    # --- registering: any other thread

    def register(self, registered: Registered, timeout_s: float, began: float) -> None:
        """Return when requests can use the pack. A registration that fails, or takes longer than `timeout_s` since
        `began`, leaves nothing behind."""
        what = f"registering pack {registered.pack.info.name!r}"
        until = began + timeout_s
        try:
            _ = registered.digest  # hashes the weights of a pack in memory
            load: Load | None = self._call(lambda: self._add(registered), what, _left(until))
            if load is not None:
                load.done.result(_left(until))
        except BaseException as error:
            with suppress(EngineClosed):
                self._put(lambda: self._withdraw(registered))
            if not isinstance(error, TimeoutError) or isinstance(error, SteerscopeError):
                raise
            remedy = "it is not registered: allow more with timeout_s, or put its folder on a faster disk"
            raise TimedOut(f"{what} took longer than {timeout_s:g} s; {remedy}") from None

    def unregister(self, registered: Registered) -> None:
        """Drop a registration. Requests that were submitted keep the pack until they end."""
        self._call(lambda: self._withdraw(registered), f"unregistering pack {registered.pack.info.name!r}")

    def _add(self, registered: Registered) -> Load | None:
        self._registrations[id(registered)] = registered
        self._unregistered.discard(registered.digest)
        return self._load_of(registered)

    def _withdraw(self, registered: Registered) -> None:
        """Drop a registration, also one that was never added."""
        self._registrations.pop(id(registered), None)
        if registered.digest not in self._registered():
            self._unregistered.add(registered.digest)
            self.sweep()

    def _registered(self) -> set[str]:
        return {registered.digest for registered in self._registrations.values()}

    # --- requests

    def ready(self, one: Any) -> bool:
        """Return whether the pack of a waiting `RunningText` is installed; if it is not, start loading it. Raises the
        error of the load that the request has waited for."""
        if one.plan.watch is None:
            return True
        load = one.load
        one.load = None
        if load is not None and load.done.done():
            load.done.result()
        one.load = load = self._load_of(one.plan.watch.registered)
        if load is not None and time.monotonic() > load.until and load.registered.digest not in self._registered():
            self._drop(load.registered.digest)
        return load is None

    def sweep(self) -> None:
        """Drop packs that were unregistered and that no request uses any more."""
        if self._unregistered:
            unused = self._unregistered - self._used()
            self._unregistered -= unused
            for digest in unused:
                self._drop(digest)

    # --- loading

    def _load_of(self, registered: Registered) -> Load | None:
        """Return the load of a pack, started now if there is none; None if the pack is installed."""
        digest = registered.digest
        if digest in self._installed:
            self._installed.move_to_end(digest)
            return None
        if digest not in self._loads:
            if self._closed:
                raise EngineClosed("the engine was closed: load it again")
            self._loads[digest] = Load(registered, self._run)
            self._loads[digest].thread.start()
        return self._loads[digest]

    def _run(self, load: Load) -> None:
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

    def _loaded(self, load: Load, loaded: Any) -> None:
        registered = load.registered
        digest = load.registered.digest
        discard = functools.partial(self._store.discard, registered, loaded)
        if self._loads.get(digest) is not load:
            _free(registered, discard)
            return
        try:
            self._store.install(registered, loaded)
        except Exception as error:
            _free(registered, discard)
            self._failed(load, not_loaded(registered.pack.info.name, error))
            return
        del self._loads[digest]
        self._installed[digest] = registered
        if digest not in self._registered():
            self._make_room(digest)
        load.end(None)

    def _failed(self, load: Load, error: BaseException) -> None:
        if self._loads.get(load.registered.digest) is load:
            del self._loads[load.registered.digest]
        load.end(error)

    def _make_room(self, digest: str) -> None:
        """Drop idle packs, so that this one can be idle too when its requests have ended."""
        needed = self._registered() | self._used() | {digest}
        idle = [other for other in self._installed if other not in needed]
        for other in idle[: max(0, len(idle) - _MAX_IDLE + 1)]:
            self._drop(other)

    def _drop(self, digest: str) -> None:
        load = self._loads.pop(digest, None)
        installed = self._installed.pop(digest, None)
        if load is not None:
            self._stopped = [other for other in self._stopped if other.thread.is_alive()] + [load]
            why = f"it took longer than {LOAD_S:g} s, or was unregistered; register it again"
            load.stop(PackNotLoaded(f"pack {load.registered.pack.info.name!r} was not loaded: {why}"))
        if installed is not None:
            _free(installed, functools.partial(self._store.remove, installed))

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


def _free(registered: Registered, work: Callable[[], None]) -> None:
    """Free a pack's memory. A failure is logged: raised in the engine's thread, it would end requests of others."""
    try:
        work()
    except Exception as error:
        log.warning("the memory of pack %r was not freed: %s", registered.pack.info.name, error)


def _left(until: float) -> float:
    """Return the seconds from now. Raises TimeoutError when there are none."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def not_loaded(name: str, error: BaseException) -> PackNotLoaded:
    what = f"pack {name!r} could not be loaded: {first_line(error)}"
    return PackNotLoaded(f"{what}; see that its folder can be read and memory is free, or give budget_bytes")
