"""`steerscope bench` on the transformers engine and a tiny shape."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steerscope.bench import drivers
from steerscope.capture import Rows
from steerscope.cli.main import app
from steerscope.engines.api import Engine
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add

pytestmark = pytest.mark.slow

SMALL = ["--model", "tiny", "--batch", "2", "--prefill", "6", "--decode", "4", "--iterations", "3"]


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    output = tmp_path / "x.json"
    done = CliRunner().invoke(app, ["bench", words[0], *SMALL, *words[1:], "--out", str(output)])
    assert done.exit_code == 0, done.output
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("--mode", "zero-layer"), 0),
        (("--mode", "custom", "--layers", "0,2"), 2 * 9 * 2),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_capture(tmp_path: Path, words: tuple[str, ...], rows: int) -> None:
    found = bench(tmp_path, "capture", *words)
    assert found.keys() == {
        "configuration", "versions", "hardware", "engine", "iterations", "verified", "summary",
    }  # fmt: skip
    assert [one["rows"] for one in found["iterations"]] == [rows] * 3
    assert found["verified"]["rows"] == rows
    assert found["verified"]["bytes"] == rows * 128 * 4
    assert bool(found["verified"]["checksum"]) == bool(rows)
    for one in found["iterations"]:
        assert one["total_s"] == pytest.approx(one["generation_s"] + one["fetch_s"])
        assert one["tokens_per_s"] == pytest.approx(2 * 4 / one["generation_s"])
    assert found["summary"]["generation"].keys() == {"median", "min", "spread", "drift"}
    assert ("fetch_gb_per_s" in found["summary"]) == bool(rows)


def test_all_layers_and_baseline_give_the_same_rows_as_the_model(tmp_path: Path) -> None:
    """The checksum is that of the rows a plain forward has."""
    import torch

    from steerscope.bench.shapes import load_model
    from steerscope.bench.workload import Setup

    found = bench(tmp_path, "capture", "--mode", "custom", "--layers", "0")
    model: Any = load_model("tiny", "cpu", torch.float32)
    prompts = torch.tensor(Setup(model="tiny", batch=2, prefill=6).prompts(2))
    with torch.no_grad():
        whole = model.generate(prompts, max_new_tokens=4, do_sample=False, eos_token_id=None)
        rows = model(whole[:, :-1], output_hidden_states=True).hidden_states[1]
    assert found["verified"]["checksum"] == pytest.approx(float(rows.abs().sum()), rel=1e-4)


def test_steer(tmp_path: Path) -> None:
    found = bench(tmp_path, "steer", "--op", "cap", "--layers", "one", "--specs", "one")
    assert found["configuration"]["cell"] == "cap:one:same"
    assert len(found["iterations"]) == 3


def test_stream(tmp_path: Path) -> None:
    found = bench(tmp_path, "stream")
    for one in found["iterations"]:
        assert 0 < one["first_token_s"] <= one["last_first_token_s"] <= one["total_s"]
        assert one["tokens_per_s"] == pytest.approx(2 * 4 / one["total_s"])


@pytest.mark.parametrize("mode", ["baseline", "all-layers", "mean"])
def test_requests_that_end_one_after_the_other(tmp_path: Path, mode: str) -> None:
    done = bench(tmp_path, "capture", "--mode", mode, "--decode", "8", "--stagger", "3")
    texts = {"baseline": 0, "all-layers": 2 * 6 + 7 + 4, "mean": 2}
    assert done["verified"]["rows"] == 4 * texts[mode]
    assert done["iterations"][0]["tokens_per_s"] == pytest.approx(13 / done["iterations"][0]["generation_s"])


def test_an_op_that_does_nothing_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = [Add(vector=[1.0] * 128, scale=1e-3, layers=0), Add(vector=[1.0] * 128, scale=0.0, layers=0)]
    monkeypatch.setattr(drivers, "steering_of", lambda *_: nothing)
    done = CliRunner().invoke(app, ["bench", "steer", *SMALL, "--out", str(tmp_path / "x.json")])
    assert done.exit_code == 2
    assert "add changed nothing for 1 of 2 requests" in done.output
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(("value", "why"), [(0.0, "a row is empty"), (float("inf"), "a row is not finite")])
def test_rows_that_hold_nothing_are_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, why: str
) -> None:
    real = SyncEngine.fetch_all

    def spoiled(self: SyncEngine, handles: list, **more: Any) -> list[Rows]:
        found = real(self, handles, **more)
        next(iter(found[1].values()))[3].fill_(value)
        return found

    monkeypatch.setattr(SyncEngine, "fetch_all", spoiled)
    refused(tmp_path, why)


def test_copies_that_differ_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncEngine.fetch_all

    def spoiled(self: SyncEngine, handles: list, copy: bool = False, **more: Any) -> list[Rows]:
        found = real(self, handles, copy=copy, **more)
        if copy:
            next(iter(found[0].values()))[0] += 1
        return found

    monkeypatch.setattr(SyncEngine, "fetch_all", spoiled)
    refused(tmp_path, "the private copy of the rows differs")


def refused(tmp_path: Path, why: str) -> None:
    words = ["bench", "capture", "--mode", "all-layers", *SMALL, "--out", str(tmp_path / "x.json")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert why in done.output
    assert not (tmp_path / "x.json").exists()


def test_streams_that_come_one_by_one_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: dict[object, asyncio.Lock] = {}  # every round has a loop of its own
    real = Engine.stream

    async def one_by_one(self: Engine, *given: Any, **asked: Any) -> AsyncGenerator[Any]:
        async with turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            async for event in real(self, *given, **asked):
                yield event

    monkeypatch.setattr(Engine, "stream", one_by_one)
    done = CliRunner().invoke(app, ["bench", "stream", *SMALL, "--out", str(tmp_path / "x.json")])
    assert done.exit_code == 2
    assert "a stream began when another had ended" in done.output


def test_requests_that_run_one_by_one_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncEngine.generate

    def one_by_one(self: SyncEngine, prompts: list, sampling: Any, **asked: Any) -> list:
        return [real(self, prompt, sampling, **asked) for prompt in prompts]

    monkeypatch.setattr(SyncEngine, "generate", one_by_one)
    words = ["bench", "capture", "--mode", "zero-layer", "--model", "tiny", "--batch", "8", "--prefill", "4"]
    output = tmp_path / "x.json"
    done = CliRunner().invoke(app, [*words, "--decode", "4", "--iterations", "1", "--out", str(output)])
    assert done.exit_code == 2
    assert "requests did not run together" in done.output
    assert not output.exists()


def test_rows_that_did_not_arrive_are_not_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drivers, "wanted_rows", lambda *_: 1)
    words = ["bench", "capture", "--mode", "all-layers", *SMALL, "--out", str(tmp_path / "x.json")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "72 rows arrived, 1 were asked for" in done.output


def test_layers_go_with_custom_only(tmp_path: Path) -> None:
    for words in (("--mode", "custom"), ("--mode", "baseline", "--layers", "0")):
        done = CliRunner().invoke(app, ["bench", "capture", *words, *SMALL, "--out", str(tmp_path / "x.json")])
        assert done.exit_code == 2
        assert "goes with --mode custom" in done.output
