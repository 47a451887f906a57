"""Sweeps: where runs go, what is shared and skipped, and that a failed run stops no other."""

import copy
import json
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.specs.errors import InvalidRequest
from steerscope.training.settings import TrainSettings
from steerscope.training.sweep import plan, sweep
from steerscope.training.texts import Completion, TrainingSet
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

TEXTS = tuple(
    Completion(prompt=f"The {word} ", response=f"jumps over {word} again.") for word in ("fox", "dog", "week")
)
DATA = TrainingSet("jumps", TEXTS[:2], TEXTS[2:])
OTHER = TrainingSet("others", TEXTS[1:], TEXTS[:1], prompts=("Jump.",))


def settings(**more: object) -> TrainSettings:
    return TrainSettings.parse({"layers": 1, "epochs": 1, "batch": 2, **more})


class Opened:
    """Opens engines on a tiny model and remembers where."""

    def __init__(self) -> None:
        self.devices: list[str | None] = []
        self.threads: set[int] = set()

    def __call__(self, device: str | None) -> SyncEngine:
        self.devices.append(device)
        self.threads.add(threading.get_ident())
        return HFEngine(copy.deepcopy(tiny.model()), tiny.tokenizer(), name="tiny").sync  # a device has its own


def test_runs_go_to_root_model_set_run_and_finished_ones_are_skipped(tmp_path: Path) -> None:
    asked = [settings(learning_rate=rate, layers=layers) for layers in ("1", "1-2") for rate in (0.1, 0.5)]
    runs, opened = plan(tmp_path, "models/tiny", [DATA, OTHER], asked), Opened()
    done = sweep(runs, opened)
    assert [one.error for one in done] == [None] * 8
    assert opened.devices == [None]
    names = ["L1-lr0.1-seed0", "L1-lr0.5-seed0", "L1-2-lr0.1-seed0", "L1-2-lr0.5-seed0"]
    for data in ("jumps", "others"):
        folder = tmp_path / "tiny" / data
        assert sorted(one.name for one in folder.iterdir()) == sorted(names)
        assert all((folder / name / "vector.safetensors").is_file() for name in names)
    told = json.loads((tmp_path / "tiny" / "sweep.json").read_text())["runs"]
    assert [row["run"] for row in told] == [run.name for run in runs]
    assert told[0]["steered"] == pytest.approx(done[0].result.steered)  # type: ignore[union-attr]
    ElementTree.fromstring((tmp_path / "tiny" / "sweep.svg").read_text())
    seen: list[str] = []
    again = sweep(runs, opened, told=lambda run, _line, _most: seen.append(run.name))
    assert [one.result for one in again] == [one.result for one in done]
    assert seen == []


def test_a_second_sweep_adds_to_what_the_first_told(tmp_path: Path) -> None:
    first = plan(tmp_path, "tiny", [DATA], [settings(learning_rate=0.1), settings(layers=9)])
    second = plan(tmp_path, "tiny", [DATA, OTHER], [settings(learning_rate=0.1), settings(learning_rate=0.5)])
    done = [*sweep(first, Opened()), *sweep(second, Opened())]
    told = json.loads((tmp_path / "tiny" / "sweep.json").read_text())["runs"]
    assert [row["run"] for row in told] == list(dict.fromkeys(one.run.name for one in done))
    assert [row["run"] for row in told if "error" in row] == [first[1].name]
    drawn = (tmp_path / "tiny" / "sweep.svg").read_text()
    assert all(words in drawn for words in ("jumps L1", "others L1", "jumps unsteered", "others prompted"))


def test_a_run_that_fails_is_told_and_stops_nobody(tmp_path: Path) -> None:
    short = TrainingSet("bad", (Completion(prompt="The fox", response=""),), TEXTS[:1])
    asked = [settings(layers=layer) for layer in (1, 9)]
    done = sweep(plan(tmp_path, "tiny", [short, DATA], asked), Opened())
    assert [one.result is not None for one in done] == [False, False, True, False]
    assert "has no token that counts" in str(done[0].error)
    assert "tiny has layers 0–3" in str(done[3].error)
    told = json.loads((tmp_path / "tiny" / "sweep.json").read_text())["runs"]
    assert ["error" in row for row in told] == [True, True, False, True]


def test_devices_take_turns_and_share_nothing(tmp_path: Path) -> None:
    asked = [settings(learning_rate=rate) for rate in (0.1, 0.2, 0.3)]
    opened = Opened()
    apart = sweep(plan(tmp_path / "two", "tiny", [DATA], asked), opened, ["cpu:0", "cpu:1"])
    assert sorted(map(str, opened.devices)) == ["cpu:0", "cpu:1"]
    assert len(opened.threads) == 2
    alone = sweep(plan(tmp_path / "one", "tiny", [DATA], asked), Opened())
    assert [one.result for one in apart] == [one.result for one in alone]


def test_a_device_that_cannot_be_opened_fails_its_own_runs(tmp_path: Path) -> None:
    good = Opened()

    def open_engine(device: str | None) -> SyncEngine:
        if device == "cuda:7":
            raise RuntimeError("no such device")
        return good(device)

    runs = plan(tmp_path, "tiny", [DATA], [settings(learning_rate=rate) for rate in (0.1, 0.2)])
    done = sweep(runs, open_engine, ["cpu", "cuda:7"])
    assert [one.error for one in done] == [None, "RuntimeError: no such device"]


def test_runs_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is asked for twice"):
        plan(tmp_path, "tiny", [DATA], [settings(), settings(epochs=2)])


def test_runs_of_another_seed_hold_out_other_texts(tmp_path: Path) -> None:
    many = tuple(Completion(prompt=f"The {i} ", response=f"jumps over {i} again.") for i in range(12))
    asked = [settings(seed=seed) for seed in (0, 1)]
    sweep(plan(tmp_path, "tiny", [TrainingSet("many", many)], asked), Opened())
    there = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("tiny/many/*/settings.json"))]
    assert [one["seed"] for one in there] == [0, 1]
    assert there[0]["texts"] != there[1]["texts"]
