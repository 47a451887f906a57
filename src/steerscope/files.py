"""Files without surprises, for every room that reads or writes them.

`atomic_path` gives a temporary file beside the target and moves it into place only when everything was written, so a
full disk or a crash leaves the old file (or none) and never half a one. `reading` turns whatever a foreign reader
raises into one `BadFile` that names the file.
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
    """Write to the yielded path; it becomes `path` when the block ends well and vanishes when it does not.

    Any OSError on the way becomes a BadFile. A symlink is written through; an existing file keeps its permissions.
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


def check_folder(path: str | Path) -> Path:
    """Return where a file at this path would be written; its folder must exist."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise BadFile(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    return target


def flush(path: Path) -> None:
    """Wait until a file is on the disk: some file systems report only then that the disk is full."""
    with path.open("r+b" if os.name == "nt" else "rb") as file:  # Windows flushes only what is open for writing
        os.fsync(file.fileno())


def lock(handle: int, *, wait: bool) -> None:
    """Keep other processes out until the file is closed; without `wait` a file that is locked is a BlockingIOError."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return _lock_on_windows(handle, wait)
    return fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one thread of one process at a time into the block. The file at the path is made, and stays."""
    with path.open("ab") as file:
        lock(file.fileno(), wait=True)
        yield


def _lock_on_windows(handle: int, wait: bool) -> None:
    import msvcrt

    while True:
        try:
            return msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:  # it does not say why
            if not wait:
                raise BlockingIOError(*error.args) from error
            time.sleep(0.1)


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Everything that goes wrong inside becomes `BadFile: {path} is not a readable {what}: …`."""
    try:
        yield
    except BadFile:
        raise
    except Exception as error:
        raise BadFile(f"{path} is not a readable {what}: {why_unreadable(error)}") from error


def why_unreadable(error: Exception) -> str:
    """Return the reason and the remedy in our words: what a library says is about its own insides."""
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
        case OSError(strerror=str() as reason) if error.errno != errno.EINVAL:  # that is a place behind a file's end
            return f"{reason}; check the path and its permissions"
        case KeyError(args=(str() as name,)) if re.fullmatch(r"[\w.:-]+", name):
            return f"it has no {name!r}; add it"
    return "it is damaged, cut short or of another kind; make or copy it anew"
