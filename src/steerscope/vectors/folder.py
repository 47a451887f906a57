"""A folder of vector files as a mapping from names to vectors.

A file that changes is read again. Vectors of deleted files are dropped at the next access.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from steerscope.specs.steering import VectorData
from steerscope.vectors.files import SUFFIXES, load


class VectorFolder(Mapping[str, VectorData]):
    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._read: dict[Path, tuple[tuple[int, int, int], VectorData]] = {}

    def _files(self) -> dict[str, Path]:
        seen = self._folder.iterdir() if self._folder.is_dir() else ()
        # Files whose names begin with a dot are still being written.
        found = sorted(p for p in seen if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        for gone in self._read.keys() - set(found):
            self._read.pop(gone, None)
        return {path.stem: path for path in found}

    def __getitem__(self, name: str) -> VectorData:
        path = self._files()[name]
        try:
            state = path.stat()
        except FileNotFoundError:  # deleted meanwhile
            raise KeyError(name) from None
        mark = (state.st_mtime_ns, state.st_size, state.st_ino)
        known = self._read.get(path)
        if known is None or known[0] != mark:
            self._read[path] = known = (mark, load(path).to_spec())
        return known[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files())

    def __len__(self) -> int:
        return len(self._files())
