"""Lens packs in a worker: read and prepared in threads beside its steps, then installed under `Registered.digest`."""

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
        self.installed: dict[str, Registered] = {}
        self._monitor = monitor
        self._loads: dict[int, Future[Reader]] = {}
        self._threads: list[threading.Thread] = []

    # --- RPCs: none waits for a load

    def load_pack(self, load_id: int, folder: str, digest: str, options: dict[str, Any]) -> None:
        """Start to load the pack of this digest (of the pack alone) from a folder."""
        load: Future[Reader] = Future()
        work = functools.partial(_load, load, folder, digest, options, self._monitor.device)
        thread = threading.Thread(target=work, name="steerscope-pack", daemon=True)
        self._loads[load_id] = load
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def load_state(self, load_id: int) -> dict[str, Any]:
        """Return whether a load is ready, and what its pack's options or its files are refused for."""
        load, problems, reason = self._loads[load_id], list[list[str]](), ""
        error = load.exception() if load.done() else None
        if isinstance(error, InvalidRequest):
            problems = [[problem.field, problem.what, problem.remedy] for problem in error.problems]
        elif error is not None:
            reason = str(error)
        return {"ready": load.done() and error is None, "problems": problems, "error": reason}

    def drop_load(self, load_id: int) -> None:
        """Give up a load. If it still runs, what it makes is freed when it ends."""
        self._loads.pop(load_id, None)

    @torch.inference_mode()
    def keep_pack(self, load_id: int, digest: str) -> None:
        """Install what a load that is ready has made."""
        reader = self._loads.pop(load_id).result(timeout=0)
        self._monitor.keep(reader)
        self.installed[digest] = reader.registered

    @torch.inference_mode()
    def drop_pack(self, digest: str) -> None:
        if (registered := self.installed.pop(digest, None)) is not None:
            self._monitor.drop(registered)

    # --- the end

    def close(self) -> None:
        """End all threads: one inside torch when the interpreter ends would abort it."""
        self.installed.clear()
        self._monitor.close()
        self._loads.clear()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _load(load: Future[Reader], folder: str, digest: str, options: dict[str, Any], device: torch.device) -> None:
    """The load's thread."""
    name = "in " + folder  # until the pack's own is known
    try:
        pack = Pack.load(folder, verify=False)
        name = pack.info.name
        if pack.digest != digest:
            raise BadFile(f"{folder} was changed while its pack was being registered: register it again")
        kept = PackOptions(**{**options, "pinned": tuple(options["pinned"])})
        reader = load_reader(Registered(pack, kept), device)
        if reader.tiers is None:  # tiers read more of the file later
            pack.release_tensors()
        load.set_result(reader)
    except SteerscopeError as error:
        load.set_exception(error)
    except BaseException as error:
        load.set_exception(not_loaded(name, error))
