"""Lens packs of vLLM's workers, seen from the client.

An RPC to the workers waits for the forward that runs and delays the next one. So an RPC only starts a load, which every
worker does in a thread of its own, and short RPCs ask later whether it is ready. Workers read a pack from the folder
that it came from; a pack without one is written to a temporary folder, which is removed when they have read it.
"""

import contextlib
import dataclasses
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steerscope.lenses.formats import own
from steerscope.lenses.reader import Registered
from steerscope.specs.errors import EngineClosed, InvalidRequest, PackNotLoaded, Problem, SteerscopeError

_LONGEST_PAUSE_S = 0.1  # between two questions whether a load is ready


class WorkerStore:
    """The packs of all workers. Each load has a number, by which the workers know it until it is installed."""

    def __init__(self, rpc: Callable[..., list[Any]], call: Callable[..., Any]) -> None:
        self._rpc = rpc
        self._call = call
        self._load_ids = itertools.count()

    # --- the load's thread

    def load(self, registered: Registered, stopped: threading.Event) -> int:
        load_id = next(self._load_ids)
        options = dataclasses.asdict(registered.options)
        with _folder_of(registered) as folder:
            try:
                self._ask("load_pack", load_id, str(folder), registered.pack.digest, options)
                self._wait(load_id, registered, stopped)
            except BaseException:
                with contextlib.suppress(SteerscopeError):
                    self._ask("drop_load", load_id)
                raise
        return load_id

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self._call(lambda: self._rpc(method, *args), "loading a pack")

    def _wait(self, load_id: int, registered: Registered, stopped: threading.Event) -> None:
        pause_s = 0.001
        while not stopped.wait(pause_s):
            states = self._ask("load_state", load_id)
            for state in states:
                if state["problems"]:
                    raise InvalidRequest([Problem(*problem) for problem in state["problems"]])
                if state["error"]:
                    raise PackNotLoaded(state["error"])
            if all(state["ready"] for state in states):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise EngineClosed(f"pack {registered.pack.info.name!r} is not needed any more")

    # --- the engine's thread

    def install(self, registered: Registered, loaded: int) -> None:
        try:
            self._rpc("keep_pack", loaded, registered.digest)
        except BaseException:
            with contextlib.suppress(Exception):  # some workers may have installed it
                self.remove(registered)
            raise

    def discard(self, registered: Registered, loaded: int) -> None:
        del registered
        self._rpc("drop_load", loaded)

    def remove(self, registered: Registered) -> None:
        self._rpc("drop_pack", registered.digest)


@contextlib.contextmanager
def _folder_of(registered: Registered) -> Iterator[Path]:
    """Yield a folder that holds the pack: its own if that still does, else a temporary one."""
    pack = registered.pack
    if pack.folder is not None and own.digest_in(pack.folder) == pack.digest:
        yield pack.folder
        return
    with tempfile.TemporaryDirectory(prefix="steerscope-pack-") as folder:
        pack.save(Path(folder) / "pack")
        yield Path(folder) / "pack"
