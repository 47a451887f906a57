"""A folder of vectors, and what else lies in it."""

from pathlib import Path

import torch

from steerscope.analysis.compare import vector_files
from steerscope.analysis.results import Result, load_results
from steerscope.vectors.files import save
from steerscope.vectors.folder import VectorFolder
from steerscope.vectors.vector import SteeringVector

LEFT = ".steerscope-0123456789abcdef"  # by somebody who writes just now, or was killed when he did


def test_what_is_being_written_is_nobodys_yet(tmp_path: Path) -> None:
    save(SteeringVector({0: torch.ones(4)}), tmp_path / "a.safetensors")
    (tmp_path / f"{LEFT}.safetensors").write_bytes(b"")
    assert list(VectorFolder(tmp_path)) == ["a"]
    assert [path.name for path, _ in vector_files([tmp_path])] == ["a.safetensors"]
    Result("kind", {}, {}).save(tmp_path)
    (tmp_path / f"{LEFT}.json").write_bytes(b"")
    assert list(load_results(tmp_path)) == ["kind"]
