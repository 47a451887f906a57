"""`steerscope capture` as a user sees it."""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from steerscope.capture.store import ActivationStore
from steerscope.cli.capture import CorpusProgress
from steerscope.corpus.run import Status

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"The weather on day {i} was good."}) for i in range(9)]
    path.write_text("\n".join([*lines[:4], "{oops", *lines[4:]]))
    return path


def test_run_resume_and_show(cli: Cli, model: str, data: Path, tmp_path: Path, refused: Refused) -> None:
    command = ["capture", "run", "--model", model, "--data", data, "--layers", "2", "--out", tmp_path / "store"]
    done = cli(*command, "--shard-documents", 4)
    assert done.exit_code == 0, done.output
    store = ActivationStore(tmp_path / "store")
    assert store.complete
    assert store.checksum in done.stdout
    assert "10, 1 of them bad, 0 cut" in done.stdout
    assert f"{data}:5" in done.stdout
    assert "3/3" in done.stderr
    assert "rows/s" in done.stderr

    assert refused(*command) == [
        f"out: {tmp_path / 'store'} already holds a capture; add --resume to continue it, or choose another folder"
    ]
    again = cli(*command, "--resume")
    assert again.exit_code == 0, again.output
    assert store.checksum in again.stdout

    assert "all checksums hold" in cli("capture", "show", tmp_path / "store", "--verify").stdout
    rows = tmp_path / "store" / "rows" / "00000001.safetensors"
    rows.write_bytes(rows.read_bytes()[:-1] + b"\0")
    broken = cli("capture", "show", tmp_path / "store", "--verify")
    assert broken.exit_code == 2
    assert "00000001.safetensors has changed since it was written; remove its commit" in broken.stderr


def test_all_mistakes_are_told_together(refused: Refused, model: str, data: Path, tmp_path: Path) -> None:
    command = ["capture", "run", "--model", model, "--data", data, "--out", tmp_path / "store"]
    lines = refused(*command, "--layers", "x", "--batch", -1, "--workers", 0, "--data", tmp_path / "none.jsonl")
    assert [line.split(":")[0] for line in lines] == ["layers", "batch", "--workers", "data"]
    assert refused(*command, "--layers", "9") == ["layers: layer 9 does not exist; the model has layers 0–3"]
    assert refused(*command, "--layers", "1", "--workers", 2, "--device", "cpu") == [
        "--device: every worker takes a GPU of its own; leave it out, or set CUDA_VISIBLE_DEVICES"
    ]


def test_a_run_that_does_not_end_with_a_whole_store_is_told(cli: Cli, model: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    command = ["capture", "run", "--model", model, "--data", data, "--layers", "2", "--out", out]
    assert cli(*command).exit_code == 0
    (out / "commits" / "00000007.json").write_bytes((out / "commits" / "00000000.json").read_bytes())
    done = cli(*command, "--resume")
    assert done.exit_code == 2
    assert "commits of" in done.stderr


def test_speed_and_time_left_are_those_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    said: list[str] = []
    meter = CorpusProgress(lambda *about: said.append(about[-1]))  # type: ignore[arg-type]
    for clock[0], shards in ((0.0, 0), (500.0, 1), (600.0, 2)):
        meter(Status(4, shards, rows=shards * 1000))
    assert said[-1] == "shards: 10 rows/s, 0:03:20 left, 0 bad"


def test_a_run_that_fails_says_how_far_it_came(cli: Cli, model: str, data: Path, tmp_path: Path) -> None:
    command = ["capture", "run", "--model", model, "--data", data, "--layers", "2", "--out", tmp_path / "store"]
    assert cli(*command, "--shard-documents", 4).exit_code == 0
    (tmp_path / "store" / "commits" / "00000001.json").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))  # stands for a disk that is full
    try:
        done = cli(*command, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2
    assert "2 of 3 shards" in done.stderr
    assert "go on with --resume" in done.stderr
    assert "rows/00000001.safetensors: File too large" in done.stderr
    assert "Traceback" not in done.output
    assert cli(*command, "--resume").exit_code == 0
