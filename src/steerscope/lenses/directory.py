"""Write a directory that appears complete or not at all."""

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
    """Yield a directory that becomes `path` when the block succeeds and is removed when it fails.

    An existing directory is replaced only if it is empty or holds the file `marker`.
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
    """Replace the target. A directory that is not empty must be renamed first, and is renamed back on an error."""
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
