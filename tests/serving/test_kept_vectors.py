"""Uploaded vectors are files of the server's folder: they outlive it, whole or not at all, and go when deleted."""

import os
import time
from pathlib import Path

import pytest
import torch

from serving.conftest import Live, Serve
from steerscope import SteeringVector, save_vector
from steerscope.vectors.files import load

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

STEERED = {"prompt": "one two", "max_tokens": 6, "temperature": 0, "steerscope": {"steer": "mine"}}


def data(folder: Path, seed: int, suffix: str = "safetensors") -> bytes:
    vector = SteeringVector({2: 9 * torch.randn(64, generator=torch.Generator().manual_seed(seed))})
    save_vector(vector, path := folder / f"made.{suffix}")
    return path.read_bytes()


def text(live: Live) -> str:
    return live.http.post("/v1/completions", json=STEERED).json()["choices"][0]["text"]


def known(live: Live) -> list[str]:
    return [one["name"] for one in live.http.get("/v1/vectors").json()["data"]]


def upload(live: Live, content: bytes, name: str = "mine") -> int:
    return live.http.post("/v1/vectors", params={"name": name}, content=content).status_code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def test_an_upload_outlives_its_server_and_a_deletion_too(serve: Serve, folder: Path, tmp_path: Path) -> None:
    first = serve(vectors=str(folder)).ready()
    assert [upload(first, data(tmp_path, 1)), upload(first, data(tmp_path, 1), "straße +1")] == [201, 201]
    wanted = text(first)
    second = serve(vectors=str(folder)).ready()
    assert known(second) == ["mine", "straße +1"]
    assert text(second) == wanted
    assert second.http.delete("/v1/vectors/mine").status_code == 200
    assert [path.name for path in folder.iterdir()] == ["straße +1.safetensors"]
    assert known(serve(vectors=str(folder)).ready()) == ["straße +1"]


def test_an_upload_takes_the_place_of_any_file_of_its_name(serve: Serve, folder: Path, tmp_path: Path) -> None:
    (folder / "mine.gguf").write_bytes(data(tmp_path, 1, "gguf"))
    live = serve(vectors=str(folder)).ready()
    before = text(live)
    assert upload(live, data(tmp_path, 2)) == 200
    assert [path.name for path in folder.iterdir()] == ["mine.safetensors"]
    assert text(serve(vectors=str(folder)).ready()) == text(live) != before


def test_what_cannot_be_written_is_not_known_and_what_was_stays(serve: Serve, folder: Path, tmp_path: Path) -> None:
    live = serve(vectors=str(folder)).ready()
    assert upload(live, data(tmp_path, 1)) == 201
    before = text(live)
    folder.rename(tmp_path / "away")
    refused = live.http.post("/v1/vectors", params={"name": "other"}, content=data(tmp_path, 2))
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "not_kept")
    assert str(tmp_path) not in refused.text
    assert upload(live, data(tmp_path, 2)) == 507
    assert live.http.delete("/v1/vectors/mine").status_code == 507
    assert (known(live), text(live)) == (["mine"], before)
    (tmp_path / "away").rename(folder)
    assert upload(live, data(tmp_path, 2)) == 200
    assert text(live) != before


def test_a_refused_upload_leaves_the_file_as_it_was(serve: Serve, folder: Path, tmp_path: Path) -> None:
    live = serve(vectors=str(folder)).ready()
    assert upload(live, data(tmp_path, 1)) == 201
    kept = (folder / "mine.safetensors").read_bytes()
    save_vector(SteeringVector({1: torch.ones(32)}), tmp_path / "narrow.safetensors")
    assert upload(live, (tmp_path / "narrow.safetensors").read_bytes()) == 400
    assert upload(live, b"nonsense") == 400
    assert upload(live, data(tmp_path, 2), "–" + 90 * "漢") == upload(live, data(tmp_path, 2), 90 * "漢") == 400
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"mine.safetensors": kept}


def test_what_a_killed_server_left_half_written_is_never_read(serve: Serve, folder: Path, tmp_path: Path) -> None:
    old, new = folder / ".steerscope-0.safetensors", folder / ".steerscope-1.safetensors"
    for path in (old, new):
        path.write_bytes(data(tmp_path, 1)[:-9])
    os.utime(old, (time.time() - 7200,) * 2)
    save_vector(SteeringVector({1: torch.ones(64)}), folder / "mine.safetensors")
    assert known(serve(vectors=str(folder)).ready()) == ["mine"]
    assert {path.name for path in folder.iterdir()} == {new.name, "mine.safetensors"}, "another server may be writing"
    assert load(folder / "mine.safetensors").layers == (1,)
