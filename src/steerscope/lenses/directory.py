"""A directory that appears whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from steerscope.files import flush
from steerscope.specs.errors import BadFile


@contextmanager
def atomic_directory(path: Path, marker: str) -> Iterator[Path]:
    """Fill the yielded directory; it becomes `path` when the block ends well and vanishes when it does not.

    A directory that is there is replaced if it holds the file `marker`, so that it was one of ours, or nothing.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise BadFile(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    if target.exists() and not (target.is_dir() and ((target / marker).is_file() or not any(target.iterdir()))):
        raise BadFile(f"cannot write {path}: it is there and has no {marker}; choose another place")
    temporary = target.with_name(f".steerscope-{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                flush(file)
        _put(temporary, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFile(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


def _put(temporary: Path, target: Path) -> None:
    """A directory with files in it cannot be replaced in one step: the old one steps aside, and back on an error."""
    if not target.exists():
        os.rename(temporary, target)
        return
    aside = target.with_name(f".steerscope-{secrets.token_hex(8)}")
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
