"""A folder of vectors, and what else lies in it."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from steerscope.analysis.compare import vector_files
from steerscope.analysis.results import AnalysisResult, load_results
from steerscope.vectors.files import VectorFolder, save
from steerscope.vectors.vector import SteeringVector

LEFT = ".steerscope-0123456789abcdef"  # left by a writer that still runs or was killed


def test_what_is_being_written_is_nobodys_yet(tmp_path: Path) -> None:
    save(SteeringVector({0: torch.ones(4)}), tmp_path / "a.safetensors")
    (tmp_path / f"{LEFT}.safetensors").write_bytes(b"")
    assert list(VectorFolder(tmp_path)) == ["a"]
    assert [path.name for path, _ in vector_files([tmp_path])] == ["a.safetensors"]
    AnalysisResult("kind", {}, {}).save(tmp_path)
    (tmp_path / f"{LEFT}.json").write_bytes(b"")
    assert list(load_results(tmp_path)) == ["kind"]


def test_a_deleted_file_is_no_vector_any_more_and_takes_no_memory(tmp_path: Path) -> None:
    for name in "ab":
        save(SteeringVector({0: torch.ones(4)}), tmp_path / f"{name}.safetensors")
    folder = VectorFolder(tmp_path)
    kept = weakref.ref(folder["a"])
    assert folder["b"].hidden == 4
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(KeyError):
        folder["a"]
    gc.collect()
    assert (list(folder), kept()) == (["b"], None)


def test_a_file_in_the_place_of_another_is_read_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    """As when two versions are made beforehand, and one is moved over the other."""
    place = tmp_path / "a.safetensors"
    save(SteeringVector({0: torch.ones(4)}), place)
    save(SteeringVector({0: -torch.ones(4)}), tmp_path / "new.safetensors")
    for path in (place, tmp_path / "new.safetensors"):
        os.utime(path, ns=(10**18, 10**18))
    folder = VectorFolder(tmp_path)
    before = folder["a"].to_json()
    (tmp_path / "new.safetensors").replace(place)
    assert folder["a"].to_json() != before
    kept = weakref.ref(folder["a"])
    place.unlink()
    assert len(folder) == 0
    gc.collect()
    assert kept() is None
