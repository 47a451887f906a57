"""Files without surprises, for every room that reads or writes them.

`atomic_path` gives a temporary file beside the target and moves it into place only when everything was written, so a
full disk or a crash leaves the old file (or none) and never half a one. `reading` turns whatever a foreign reader
raises into one `BadFile` that names the file.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steerscope.specs.errors import BadFile, InvalidRequest


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
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # some file systems report a full disk only here
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


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Everything that goes wrong inside becomes `BadFile: {path} is not a readable {what}: …`."""
    try:
        yield
    except BadFile:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        text = str(error) if isinstance(error, InvalidRequest) else lines[0] if lines else type(error).__name__
        raise BadFile(f"{path} is not a readable {what}: {text}") from error
