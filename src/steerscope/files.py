"""Atomic writes and guarded reads, for all rooms.

`atomic_path` yields a temporary file beside the target and renames it only when everything was written, so a full disk
or a crash leaves the old file or none, never a partial one. `reading` converts all errors of a reader to a `BadFile`.
"""

import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steerscope.specs.errors import BadFile, SteerscopeError, not_json


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` when the block ends, and removed when it fails.

    Every OSError becomes a BadFile. A symlink is written through; an existing file keeps its permissions.
    """
    target = check_folder(path)
    temporary = target.with_name(f".steerscope-{secrets.token_hex(8)}{target.suffix}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # not mkstemp: the umask decides
        if target.is_file():
            shutil.copymode(target, temporary)
        yield temporary
        flush(temporary)
        os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or f"not all of it could be written ({error})"  # numpy gives no errno
        raise BadFile(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_folder(path: str | Path) -> Path:
    """Return the real path of a file to write; its folder must exist."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise BadFile(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    return target


def flush(path: Path) -> None:
    """Wait until a file is on the disk; some file systems report a full disk only then."""
    with path.open("r+b" if os.name == "nt" else "rb") as file:  # Windows flushes only what is open for writing
        os.fsync(file.fileno())


def lock(handle: int, *, wait: bool) -> None:
    """Lock a file until it is closed; without `wait`, raise BlockingIOError when it is locked already."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return _lock_on_windows(handle, wait)
    return fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Run the block in one thread of one process at a time. The file is created and stays: removing it would let two
    in."""
    with path.open("ab") as file:
        lock(file.fileno(), wait=True)
        yield


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Create a folder and refuse other writers until every process with the yielded descriptor has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("w") as file:
        try:
            lock(file.fileno(), wait=False)
        except BlockingIOError:
            raise BadFile(f"another run is writing to {folder}: wait for it or stop it") from None
        except OSError as error:
            reason = f"{error.strerror}: choose a folder that can be locked"
            raise BadFile(f"cannot lock {path}: {reason}") from error
        yield file.fileno()


def _lock_on_windows(handle: int, wait: bool) -> None:
    import msvcrt

    while True:
        try:
            return msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:  # without a reason
            if not wait:
                raise BlockingIOError(*error.args) from error
            time.sleep(0.1)


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Convert every error of the block to `BadFile: {path} is not a readable {what}: …`."""
    try:
        yield
    except BadFile:
        raise
    except Exception as error:
        raise BadFile(f"{path} is not a readable {what}: {why_unreadable(error)}") from error


def why_unreadable(error: Exception) -> str:
    """Return the reason and the remedy; messages of libraries are about their internals."""
    match error:
        case SteerscopeError():
            return str(error)
        case json.JSONDecodeError():
            return f"it {not_json(error)}; correct it"
        case UnicodeError():
            return "it is damaged, or not text in UTF-8; convert or copy it"
        case RecursionError():
            return "it is nested too deep; make it flatter"
        case FileNotFoundError():
            return "it does not exist; check the path"
        case OSError(strerror=str() as reason) if error.errno != errno.EINVAL:  # EINVAL: beyond its end
            return f"{reason}; check the path and its permissions"
        case KeyError(args=(str() as name,)) if re.fullmatch(r"[\w.:-]+", name):
            return f"it has no {name!r}; add it"
    return "it is damaged, cut short or of another kind; make or copy it anew"
