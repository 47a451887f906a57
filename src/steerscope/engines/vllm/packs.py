"""Lens packs that the workers have, as the client knows it. They are given by way of a folder, before the first request
that needs them, and taken back when nobody can ask for them any more."""

import dataclasses
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steerscope.engines.vllm.wire import pack_name
from steerscope.lenses.reader import Registered

_IDLE = 2  # packs that nobody registered, and nobody uses any more


class Packs:
    """Belongs to the engine's thread. `used` says which ones running requests need."""

    def __init__(self, rpc: Callable[..., Any], used: Callable[[], set[str]]) -> None:
        self._rpc, self._used = rpc, used
        self._there: OrderedDict[str, None] = OrderedDict()  # used last comes last
        self._registered: Counter[str] = Counter()

    def keep(self, registered: Registered) -> None:
        self._bring(registered)
        self._registered[pack_name(registered)] += 1

    def drop(self, registered: Registered) -> None:
        """Requests on their way go on: what they need is an unregistered pack from now on."""
        name = pack_name(registered)
        self._registered[name] -= 1
        if not +self._registered[name] and name not in self._used():
            self._take_back(name)

    def lend(self, registered: Registered) -> None:
        """For a request that is about to run."""
        self._bring(registered)
        loose = [name for name in self._there if not self._registered[name]]
        if len(loose) < _IDLE:
            return
        used = self._used() | {pack_name(registered)}
        idle = [name for name in loose if name not in used]
        for name in idle[: max(0, len(idle) - _IDLE + 1)]:  # this one will be idle too
            self._take_back(name)

    def _bring(self, registered: Registered) -> None:
        name = pack_name(registered)
        if name in self._there:
            self._there.move_to_end(name)
            return
        options = dataclasses.asdict(registered.options)
        with tempfile.TemporaryDirectory(prefix="steerscope-pack-") as folder:
            path = Path(folder) / "pack"
            registered.pack.save(path)
            self._rpc("keep_pack", name, str(path), options)
        self._there[name] = None

    def _take_back(self, name: str) -> None:
        self._there.pop(name, None)
        self._rpc("drop_pack", name)
