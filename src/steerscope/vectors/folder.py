"""A folder of vector files as a mapping from names to vectors. A file that changes is read again."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from steerscope.specs.steering import VectorData
from steerscope.vectors.files import SUFFIXES, load


class VectorFolder(Mapping[str, VectorData]):
    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._read: dict[Path, tuple[tuple[int, int], VectorData]] = {}

    def _files(self) -> dict[str, Path]:
        if not self._folder.is_dir():
            return {}
        seen = (path for path in self._folder.iterdir() if not path.name.startswith("."))  # those are being written
        found = sorted(path for path in seen if path.suffix.lower() in SUFFIXES)
        return {path.stem: path for path in found}

    def __getitem__(self, name: str) -> VectorData:
        path = self._files()[name]
        state = path.stat()
        mark = (state.st_mtime_ns, state.st_size)
        if path not in self._read or self._read[path][0] != mark:
            self._read[path] = (mark, load(path).to_spec())
        return self._read[path][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files())

    def __len__(self) -> int:
        return len(self._files())
