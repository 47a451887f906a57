"""Lens packs of vLLM's workers, as the client sees them.

An RPC to the workers waits for the forward that runs, and holds the next one up. So it only begins a load, which every
worker does in a thread of its own, and later asks whether it is ready. Workers read a pack from the folder that it
came from; one that has none is written to a temporary folder, which goes when they have read it.
"""

import contextlib
import dataclasses
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steerscope.lenses import packfiles
from steerscope.lenses.reader import Registered
from steerscope.specs.errors import EngineClosed, InvalidRequest, PackNotLoaded, Problem, SteerscopeError

_LONGEST_PAUSE_S = 0.1  # between two questions


class WorkerStore:
    """A load has a number of its own, under which the workers know it until it is installed."""

    def __init__(self, rpc: Callable[..., list[Any]], call: Callable[..., Any]) -> None:
        self._rpc, self._call = rpc, call
        self._numbers = itertools.count()

    def load(self, registered: Registered, stopped: threading.Event) -> int:
        number, options = next(self._numbers), dataclasses.asdict(registered.options)
        with _folder_of(registered) as folder:
            try:
                self._ask("load_pack", number, str(folder), registered.pack.digest, options)
                self._wait(number, registered, stopped)
            except BaseException:
                with contextlib.suppress(SteerscopeError):
                    self._ask("drop_load", number)
                raise
        return number

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self._call(lambda: self._rpc(method, *args), "loading a pack")

    def _wait(self, number: int, registered: Registered, stopped: threading.Event) -> None:
        pause = 0.001
        while not stopped.wait(pause):
            states = self._ask("load_state", number)
            for state in states:
                if state["problems"]:
                    raise InvalidRequest([Problem(*problem) for problem in state["problems"]])
                if state["error"]:
                    raise PackNotLoaded(state["error"])
            if all(state["ready"] for state in states):
                return
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise EngineClosed(f"pack {registered.pack.info.name!r} is not needed any more")

    # --- the engine's thread

    def install(self, registered: Registered, loaded: int) -> None:
        self._rpc("keep_pack", loaded, registered.word)

    def discard(self, registered: Registered, loaded: int) -> None:
        """Also of workers that have installed it when another one could not."""
        self._rpc("drop_load", loaded)
        self._rpc("drop_pack", registered.word)

    def remove(self, registered: Registered) -> None:
        self._rpc("drop_pack", registered.word)


@contextlib.contextmanager
def _folder_of(registered: Registered) -> Iterator[Path]:
    """A folder that holds the pack: its own, if that still does."""
    pack = registered.pack
    if pack.folder is not None and packfiles.digest_in(pack.folder) == pack.digest:
        yield pack.folder
        return
    with tempfile.TemporaryDirectory(prefix="steerscope-pack-") as folder:
        pack.save(Path(folder) / "pack")
        yield Path(folder) / "pack"
