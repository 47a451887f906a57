"""The pairs: order, ratios, failures, and what is written, with engines that are not there."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import paired
from bench.gpu.child import ChildFailed
from bench.gpu.cores import Cores
from bench.gpu.drivers import load_of
from bench.tables.gpu import costs, hooks, pairs, phases, shapes, speed, steps
from steerscope.bench.workload import Setup

SETUP = Setup(model="tiny", engine="vllm", batch=2, prefill=6, decode=4)
TIMES = {"baseline": 1.0, "ours": 1.004}


class FakeChild:
    """Answers like an engine. Which order it was given is kept for all of them together."""

    log: list[tuple[str, ...]] = []
    broken: set[str] = set()
    wrong: dict[str, str] = {}

    def __init__(self, kind: str, *_: object) -> None:
        self.kind, self.alive = kind, True
        engine = {"mode": "compiled", "async_scheduling": True}
        self.about = {"engine": engine, "start_s": 1.0, "hardware": {"gpu": "G"}}
        FakeChild.log.append(("start", kind))

    def ready(self) -> None: ...

    def order(self, what: str, cell: str, seed: int, *how: bool) -> dict[str, Any]:
        FakeChild.log.append((what, self.kind, cell, str(seed)))
        if what in ("load", "cores"):
            return {}
        if what == "profile":
            return {"cell": cell, "hooks": {}}
        if cell in FakeChild.broken and self.kind == "ours":
            self.alive = False
            raise ChildFailed("ours: the process died")
        if why := self._wrong(cell, *how):
            return {"error": why}
        seconds = TIMES[self.kind] + (0.02 if cell == "all-layers" and self.kind == "ours" else 0)
        fetch = 0.001 if len(how) > 1 else 0.0
        return {
            "seconds": seconds, "tokens": [[1], [2]], "steps": 4, "rows": 5, "bytes": 10**8, "fetch": fetch,
            "checksum": 1.5,
            "extra": {"fetch_fresh": 0.01, "stall_s": 0.25, "stats": {}, "steps_ms": [3.0, 3.0 * seconds],
                      "phases": {"coming": 2.0 * seconds, "step": 0.5}},
        }  # fmt: skip

    def _wrong(self, cell: str, verify: bool = False, fetch: bool = False) -> str | None:
        """Found when rows are looked at, or when they are only copied."""
        return FakeChild.wrong.get(cell if verify else "copies" if fetch else "")

    def close(self) -> None:
        FakeChild.log.append(("close", self.kind))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(paired, "Child", FakeChild)
    FakeChild.log, FakeChild.broken, FakeChild.wrong = [], set(), {}

    def measure(*cells: str, **more: Any) -> dict[str, Any]:
        given = {
            "setup": SETUP,
            "cells": cells,
            "rounds": 6,
            "rounds_of": {},
            "passes": 1,
            "warmups": 1,
            "cell_seconds": 60.0,
            "baseline": "baseline",
        }
        given |= {"loads": [], "profile": [], "noop": False, "out": tmp_path / "speed.json"}
        given |= {"cores": Cores(False)}
        return paired.measure(argparse.Namespace(**given | more), tmp_path)

    return measure


def test_rounds_go_there_and_back_with_the_same_prompts(run: Any) -> None:
    found = run("noise", "zero-layer")["cells"]
    timed = [entry for entry in FakeChild.log if entry[0] == "run" and entry[2] == "zero-layer" and int(entry[3]) < 100]
    assert [entry[1] for entry in timed] == ["baseline", "ours", "ours", "baseline"] * 3
    assert [entry[3] for entry in timed] == [str(i // 2) for i in range(12)]
    assert found["noise"]["ratio"]["median"] == 1.0
    assert found["zero-layer"]["ratio"]["median"] == pytest.approx(1.004)
    assert found["zero-layer"]["holds"]
    assert found["zero-layer"]["same_tokens"] == 1.0
    assert found["zero-layer"]["phases"] == {
        "baseline": {"coming": 2.0, "step": 0.5},
        "tapped": {"coming": 2.008, "step": 0.5},
    }
    assert FakeChild.log[:2] == [("start", "ours"), ("start", "baseline")]  # before anybody is waited for
    assert set(FakeChild.log[-2:]) == {("close", "baseline"), ("close", "ours")}


def test_several_loads_share_two_engines_and_have_rounds_and_files_of_their_own(run: Any, tmp_path: Path) -> None:
    loads = [load_of(SETUP, text) for text in ("2x6+4", "1x9+2:3")]
    run("noise", "zero-layer", loads=loads, rounds_of={"1x9-2-3/noise": 0, "zero-layer": 7, "1x9-2-3/zero-layer": 5})
    assert [entry for entry in FakeChild.log if entry[0] == "start"] == [("start", "ours"), ("start", "baseline")]
    told = [(entry[1], entry[3]) for entry in FakeChild.log if entry[0] == "load"]
    first, second = (
        str({"batch": 2, "prefill": 6, "decode": 4, "stagger": 0}),
        str({"batch": 1, "prefill": 9, "decode": 3, "stagger": 1}),
    )
    assert list(dict.fromkeys(told)) == [("baseline", first), ("ours", first), ("baseline", second), ("ours", second)]
    for name, load, rounds in (
        ("2x6-4", loads[0], {"noise": 6, "zero-layer": 7}),
        ("1x9-2-3", loads[1], {"zero-layer": 5}),
    ):
        found = json.loads((tmp_path / f"speed-{name}.json").read_text())
        assert found["configuration"] | {"batch": load.batch, "stagger": load.stagger} == found["configuration"]
        assert {cell: one["rounds"] for cell, one in found["cells"].items()} == rounds
        assert ("goal" in found["cells"]["zero-layer"]) == (load is loads[0])  # others have none


def test_rows_are_verified_and_a_missed_goal_is_said(run: Any) -> None:
    cell = run("all-layers")["cells"]["all-layers"]
    assert (cell["verified"], cell["checksum"], cell["holds"]) == (True, 1.5, False)
    assert cell["fetch_gb_per_s"] == pytest.approx(100.0)
    assert cell["fetch_holds"]
    assert "MISSES" in paired.shown("all-layers", cell)


def test_a_cell_that_takes_too_long_ends_with_fewer_rounds(run: Any) -> None:
    assert run("zero-layer", cell_seconds=0.0)["cells"]["zero-layer"]["rounds"] == 4


def test_a_dead_engine_costs_its_cell_only(run: Any, tmp_path: Path) -> None:
    FakeChild.broken = {"cap"}
    found = run("zero-layer", "cap", "add")["cells"]
    assert found["cap"] == {"error": "ours: the process died"}
    assert found["add"]["rounds"] == 6
    assert FakeChild.log.count(("start", "ours")) == 2
    assert json.loads((tmp_path / "speed.json").read_text())["cells"].keys() == found.keys()


def test_tables_of_a_gpu_run(run: Any, tmp_path: Path) -> None:
    FakeChild.broken = {"cap"}
    found = run("noise", "zero-layer", "all-layers", "cap")
    (tmp_path / "gpu").mkdir()
    assert "No figures yet" in speed(tmp_path)
    assert "No profile yet" in hooks(tmp_path)
    assert "No figures yet" in phases(tmp_path)
    assert "No figures yet" in shapes(tmp_path)
    for name in ("qwen2.5-3b", "x"):
        (tmp_path / "gpu" / f"speed-{name}.json").write_text(json.dumps(found))
    times = {"us_per_step": 12.34, "calls_per_step": 1.0, "median_call_us": 5.0}
    profile = {"cell": "add", "hooks": {"WorkerTaps._stage": times}}
    (tmp_path / "gpu" / "profile-add.json").write_text(json.dumps({"profile": profile}))
    found["cells"].pop("cap")
    head = "| ms more than unmodified vLLM | coming | step | rounds | it starts in |\n|---|---|---|---|---|"
    assert head in phases(tmp_path)
    assert "| nothing requested | +0.01 | +0.00 | 6 |" in phases(tmp_path)
    text = speed(tmp_path)
    assert "**tiny, 2 × (6 + 4)**" in text
    assert "| nothing requested | 1.0000 | 1.0040 | +0.40 % [+0.40, +0.40] | ≤ +0.5 %: holds | +0.0 % |  |" in text
    assert "| ≤ +1.0 %: **missed** | +0.0 % (goal ≤ 1 %) | 100.0; 10.0 (goal ≥ 10) | 100.0 % |" in text
    assert "the process died" in text
    waited = "| +0.40 % [+0.40, +0.40] | 250 | 6 |"
    assert f"| tiny, 2 × (6 + 4) | nothing requested | 1.0000 | 1.0040 {waited}" in shapes(tmp_path)
    assert "| tiny, 2 × (6 + 4) | cap at every layer, one vector per request | — | — |" in shapes(tmp_path)
    assert "| `WorkerTaps._stage` | 12.3 | 1 | 5.0 |" in hooks(tmp_path)
    told = {"baseline": [9.0, 9.0, 9.0, 3.0, 3.0, 3.0, 3.0], "tapped": [1.0, 1.0, 1.0, 3.01, 3.01, 3.5, 3.01]}
    many = {"baseline": [3.0] * 33, "tapped": [3.2] * 33}
    all_told = {"mean": told, "noise": dict.fromkeys(told, [3.0] * 5), "last": many}
    ratio = {"median": 1.002, "interval": [0.99, 1.01]}
    told = {"cells": {name: {"steps_ms": ms, "ratio": ratio} for name, ms in all_told.items()}}
    (tmp_path / "gpu" / "speed-qwen2.5-3b.json").write_text(json.dumps(told))
    assert "| all layers, mean | +0.20 % [-1.00, +1.00] | +10 | +0.5 | +0.5 | 5 |" in steps(tmp_path)
    assert "| +200 | +6.0 | +6.0 | 30 of 30 |" in steps(tmp_path)
    assert "| +0 | +0.0 | +0.0 | none |" in steps(tmp_path)
    found["configuration"] |= {"stagger": 3, "eager": True}
    (tmp_path / "gpu" / "speed-ends.json").write_text(json.dumps(found))
    assert "| tiny, 2 × (6 + 1 to 4), eager | nothing requested |" in shapes(tmp_path)
    found["configuration"] |= {"stagger": 0, "eager": False, "pool_bytes": 5_800_000_000}
    (tmp_path / "gpu" / "speed-room.json").write_text(json.dumps(found))
    assert "| tiny, 2 × (6 + 4), 5.8 GB for rows | nothing requested |" in shapes(tmp_path)
    (tmp_path / "gpu" / "speed-room-again.json").write_text(json.dumps(found))
    assert "| tiny, 2 × (6 + 4), 5.8 GB for rows, again | nothing requested |" in shapes(tmp_path)


def test_a_cell_whose_rows_are_not_what_they_should_be_has_no_times(run: Any, tmp_path: Path) -> None:
    """Neither in the file nor in any table, whatever was measured before; and it is not measured again."""
    FakeChild.wrong = {"all-layers": "not measured: a row is empty", "add": "not measured: add changed nothing"}
    found = run("noise", "all-layers", "add", "zero-layer", passes=2)
    for cell, why in FakeChild.wrong.items():
        assert found["cells"][cell] == {"error": why}
        last = [entry for entry in FakeChild.log if entry[0] == "run" and entry[2] == cell and int(entry[3]) < 100]
        assert {int(entry[3]) for entry in last} == {0, 1, 2}  # the first pass alone
    assert found["cells"]["zero-layer"]["rounds"] == 6
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "speed-qwen2.5-3b.json").write_text(json.dumps(found))
    for table in (speed(tmp_path), pairs(tmp_path)):
        assert "a row is empty" in next(line for line in table.splitlines() if "every row" in line)
    assert "every row" not in costs(tmp_path)
