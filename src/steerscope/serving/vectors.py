"""Steering vectors by name: those of a folder to begin with, and those that clients upload.

An upload under an existing name replaces that vector for later requests; running requests keep the vector they began
with. Where the server has a folder, uploads are written into it and deletions remove their file, so that a restarted
server knows the same vectors; without one they live as long as the server.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from steerscope.engines.api import Engine
from steerscope.serving.errors import ApiError
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, SteerscopeError
from steerscope.vectors.files import SUFFIXES, load, save
from steerscope.vectors.vector import SteeringVector

log = logging.getLogger("steerscope.serving")
_STALE_S = 3600.0


class Vectors(Mapping[str, SteeringVector]):
    """The vectors that the server has registered with its engine."""

    def __init__(self, max_vectors: int, folder: Path | None = None) -> None:
        self.max_vectors = max_vectors
        self.folder = folder
        self.changing = asyncio.Lock()
        self._known: dict[str, SteeringVector] = {}

    def __getitem__(self, name: str) -> SteeringVector:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def put(self, engine: Engine, name: str, vector: SteeringVector) -> None:
        check_count(name, self._known, self.max_vectors)
        n_layers = engine.facts.layers
        if max(vector.layers or (), default=0) >= n_layers:
            what = f"the vector has layer {max(vector.layers or ())}"
            raise InvalidRequest([Problem(name, what, f"{engine.facts.name} has layers 0–{n_layers - 1}")])
        engine.register(name, vector)
        self._known[name] = vector

    def keep(self, engine: Engine, name: str, vector: SteeringVector) -> None:
        """Register a vector and write it into the folder; if writing fails, neither is done."""
        before = self._known.get(name)
        self.put(engine, name, vector)
        if self.folder is None:
            return
        path = self.folder / f"{name}.safetensors"
        try:
            save(vector, path)
        except BadFile as error:
            self._forget(engine, name) if before is None else self.put(engine, name, before)
            raise not_kept(error) from None
        for other in vector_files(self.folder, name):  # a name has one file
            if not other.samefile(path):
                other.unlink(missing_ok=True)

    def remove(self, engine: Engine, name: str) -> None:
        try:
            for path in [] if self.folder is None else vector_files(self.folder, name):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise not_kept(error) from None
        self._forget(engine, name)

    def read_folder(self, engine: Engine) -> None:
        """Register the folder's vectors; files that do not fit this model are left out with a warning."""
        if self.folder is None:
            return
        if not self.folder.is_dir():
            what = f"{self.folder} is not a folder"
            raise InvalidRequest([Problem("vectors", what, "name one that holds vector files")])
        for left in self.folder.glob(".steerscope-*"):  # by a server that was killed while it wrote
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink(missing_ok=True)
        for path in vector_files(self.folder):
            try:
                self.put(engine, path.stem, load(path))
            except SteerscopeError as error:
                log.warning("the vector %s is left out: %s", path.name, error)

    def register_all(self, engine: Engine) -> None:
        """Register every vector with an engine that was started again."""
        for name, vector in self._known.items():
            engine.register(name, vector)

    def _forget(self, engine: Engine, name: str) -> None:
        del self._known[name]
        engine.unregister(name)


def vector_files(folder: Path, name: str | None = None) -> list[Path]:
    """Return the vector files of a folder, all or those of one name. Names are compared, never joined to a path."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
        if name is None or path.stem == name
    ]


def check_count(name: str, known: Collection[str], max_vectors: int) -> None:
    """Refuse a new vector when the server already holds as many as it may."""
    if name not in known and len(known) >= max_vectors:
        what = f"the server holds {max_vectors} vectors, which is its limit"
        raise InvalidRequest([Problem("name", what, "delete one first, or start it with more max_vectors")])


def not_kept(error: Exception) -> ApiError:
    log.error("the folder of vectors cannot be written: %s", error)
    return ApiError(507, "the server's folder of vectors cannot be written; its log says why", "not_kept")
