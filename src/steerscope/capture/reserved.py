"""Files that captures will be saved to, reserved while their requests run.

A reservation is a lock on `.NAME.safetensors.reserved` beside the file. It excludes the threads and processes that
share the folder, and ends with the process that holds it: after a crash the name is free again.
"""

import logging
import os
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from pathlib import Path

from steerscope.capture.handle import CaptureHandle
from steerscope.files import lock
from steerscope.specs.errors import BadFile, InvalidRequest, NameInUse, SaveFailed, SteerscopeError

log = logging.getLogger("steerscope")


class ReservedFile:
    """A file that no other request may write. The future `saved` returns its path or raises SaveFailed."""

    def __init__(self, path: Path) -> None:
        """Reserve the file, or raise NameInUse, or InvalidRequest when the folder cannot be written."""
        self.path = path
        self.name = path.stem
        self.writing = False
        self.saved: Future[Path] = Future()
        self.saved.set_running_or_notify_cancel()  # a client that leaves does not cancel it
        self._lock_path = path.with_name(f".{path.name}.reserved")
        try:
            self._held = self._acquire()
        except OSError as error:
            what = f"the server's folder for captures cannot be written: {error.strerror or error}"
            raise InvalidRequest.of("save_as", what, "have its operator correct that") from error

    def _acquire(self) -> ExitStack:
        """Lock the file. Return what removes and unlocks it, in this order: no other process owns it meanwhile."""
        while True:
            with ExitStack() as held:
                handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
                held.callback(os.close, handle)
                try:
                    lock(handle, wait=False)
                    if not os.path.samestat(os.fstat(handle), self._lock_path.stat()):
                        continue  # its holder removed it meanwhile, so the lock excludes no process
                except FileNotFoundError:
                    continue
                except BlockingIOError:
                    raise self._in_use("another request is saving under it") from None
                held.callback(self._lock_path.unlink, missing_ok=True)
                self._check_absent()
                return held.pop_all()

    def _check_absent(self) -> None:
        if os.path.lexists(self.path):
            raise self._in_use("a capture of that name exists")

    def _in_use(self, why: str) -> NameInUse:
        return NameInUse.of("save_as", f"{self.name!r} is in use: {why}", "choose another name")

    def write_in(self, executor: Executor, handle: CaptureHandle) -> None:
        """Save the rows in another thread. A handle whose rows were saved is closed; otherwise it keeps them."""
        self.writing = True
        handle.saving = self.saved
        executor.submit(self._write, handle)

    def _write(self, handle: CaptureHandle) -> None:
        try:
            handle.fetch()
            self._check_absent()
            handle.save(self.path)
            handle.close(f"they were saved as {self.name!r}")
        except Exception as error:
            log.error("the rows of %s were not saved as %s: %s", handle.request_id, self.path, error)
            self.release(_why(error))
        else:
            with suppress(OSError):  # the rows are saved, whatever becomes of the lock
                self._held.close()  # first: a caller that sees the result may ask for the name again
            self.saved.set_result(self.path)

    def release(self, why: str = "its text did not end normally") -> None:
        """Free the name. `why` is the reason where the rows were not saved."""
        self._held.close()
        if not self.saved.done():  # a new error: a raised one would keep the rows alive through its frames
            self.saved.set_exception(SaveFailed(f"the rows were not saved as {self.name!r}: {why}"))


def _why(error: Exception) -> str:
    """Return the reason without names of folders, which clients must not see."""
    match error:
        case BadFile():
            return getattr(error.__cause__, "strerror", None) or "the file could not be written"
        case SteerscopeError():
            return str(error)
        case _:
            return "the server failed; its log says more"
