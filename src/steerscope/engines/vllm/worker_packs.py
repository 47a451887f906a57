"""Lens packs in a worker: read and prepared in threads beside its steps, and known by name once they are installed."""

import functools
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch

from steerscope.engines.packs import not_loaded
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.pack import Pack
from steerscope.lenses.reader import PackOptions, Reader, Registered, load_reader
from steerscope.specs.errors import BadFile, InvalidRequest, SteerscopeError

PACK_RPC = ("load_pack", "load_state", "drop_load", "keep_pack", "drop_pack")
_JOIN_S = 60.0


class WorkerPacks:
    def __init__(self, monitor: Monitor) -> None:
        self.known: dict[str, Registered] = {}
        self._monitor = monitor
        self._loads: dict[int, Future[Reader]] = {}
        self._threads: list[threading.Thread] = []

    # --- RPCs: each takes no longer than to start a thread, or to look something up

    def load_pack(self, number: int, folder: str, digest: str, options: dict[str, Any]) -> None:
        found: Future[Reader] = Future()
        work = functools.partial(_load, found, folder, digest, options, self._monitor.device)
        thread = threading.Thread(target=work, name="steerscope-pack", daemon=True)
        self._loads[number] = found
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def load_state(self, number: int) -> dict[str, Any]:
        load, problems, told = self._loads[number], list[list[str]](), ""
        error = load.exception() if load.done() else None
        if isinstance(error, InvalidRequest):
            problems = [[problem.field, problem.what, problem.remedy] for problem in error.problems]
        elif error is not None:
            told = str(error)
        return {"ready": load.done() and error is None, "problems": problems, "error": told}

    def drop_load(self, number: int) -> None:
        """Give up a load, which may still be going on: what it makes is closed as soon as it is there."""
        if (load := self._loads.pop(number, None)) is not None:
            load.add_done_callback(_close)

    @torch.inference_mode()
    def keep_pack(self, number: int, name: str) -> None:
        reader = self._loads.pop(number).result(timeout=0)
        self._monitor.keep(reader)
        self.known[name] = reader.registered

    @torch.inference_mode()
    def drop_pack(self, name: str) -> None:
        if (found := self.known.pop(name, None)) is not None:
            self._monitor.drop(found)

    # --- the end

    def close(self) -> None:
        """Packs kept in tiers have threads, and one inside torch when the interpreter ends would abort it."""
        self.known.clear()
        self._monitor.close()
        for number in list(self._loads):
            self.drop_load(number)
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _load(found: Future[Reader], folder: str, digest: str, options: dict[str, Any], device: torch.device) -> None:
    name = "in " + folder
    try:
        pack = Pack.load(folder, verify=False)
        name = pack.info.name
        if pack.digest != digest:
            raise BadFile(f"{folder} was changed while its pack was being registered: register it again")
        kept = PackOptions(**{**options, "pinned": tuple(options["pinned"])})
        found.set_result(load_reader(Registered(pack, kept), device))
    except SteerscopeError as error:
        found.set_exception(error)
    except BaseException as error:
        found.set_exception(not_loaded(name, error))


def _close(load: Future[Reader]) -> None:
    if load.exception() is None:
        load.result().close()
