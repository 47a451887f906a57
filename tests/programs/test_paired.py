"""The pairs: order, ratios, failures, and what is written, with engines that are not there."""

import argparse
import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import cores, paired
from bench.gpu.child import ChildFailed
from bench.gpu.cores import Cores
from bench.gpu.paired import CELLS, parse
from bench.tables.gpu import costs, hidden_states, hooks, pairs, phases, shapes, speed, steps
from steerscope.bench import steps as steps_module
from steerscope.bench.workload import Setup, load_of

SETUP = Setup("tiny", batch=2, prefill=6, decode=4)
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


def test_what_is_profiled_comes_last_and_is_a_file_of_its_own(run: Any, tmp_path: Path) -> None:
    run("zero-layer", profile=["add", "all-layers"])
    last = [entry for entry in FakeChild.log if entry[0] in ("run", "profile")][-2:]
    assert [entry[:3] for entry in last] == [("profile", "ours", "add"), ("profile", "ours", "all-layers")]
    assert json.loads((tmp_path / "profile-add.json").read_text())["profile"]["cell"] == "add"
    assert set(json.loads((tmp_path / "speed.json").read_text())["cells"]) == {"zero-layer"}
    FakeChild.log = []
    run(profile=["add"])
    assert [entry[1] for entry in FakeChild.log if entry[0] == "start"] == ["ours"]


def test_rows_are_verified_and_a_missed_goal_is_said(run: Any) -> None:
    cell = run("all-layers")["cells"]["all-layers"]
    assert (cell["verified"], cell["checksum"], cell["holds"]) == (True, 1.5, False)
    assert cell["fetch_gb_per_s"] == pytest.approx(100.0)
    assert cell["fetch_holds"]
    assert "MISSES" in paired.shown("all-layers", cell)


def test_a_cell_may_have_rounds_of_its_own(run: Any) -> None:
    found = run("noise", "zero-layer", "add", rounds_of={"add": 9, "noise": 5})["cells"]
    assert [one["rounds"] for one in found.values()] == [5, 6, 9]


def test_passes_give_every_cell_a_part_of_its_rounds_in_turn(run: Any) -> None:
    found = run("noise", "zero-layer", "generated", passes=3, rounds_of={"zero-layer": 7}, warmups=2)["cells"]
    assert [one["rounds"] for one in found.values()] == [6, 7, 6]
    runs = [entry[1:] for entry in FakeChild.log if entry[0] == "run" and entry[2] == "zero-layer"]
    timed = [entry for entry in runs if int(entry[2]) < 100]
    assert [entry[0] for entry in timed] == (["baseline", "ours", "ours", "baseline"] * 4)[:14]
    assert [entry[2] for entry in timed] == [str(i // 2) for i in range(14)]
    assert len(runs) - len(timed) == 2 * 4  # two to warm up, and one before each later part
    order = [cell for cell, _ in itertools.groupby(e[2] for e in FakeChild.log if e[0] == "run")]
    assert order == ["baseline", "zero-layer", "generated"] * 3
    checks = [entry for entry in FakeChild.log if entry[0] == "run" and entry[2] == "generated" and entry[3] == "0"]
    assert len(checks) == 4  # its first pair, and once the rows, verified and copied
    assert found["generated"]["verified"] is True
    FakeChild.broken = {"cap"}
    found = run("cap", "zero-layer", passes=2)["cells"]
    assert found["cap"] == {"error": "ours: the process died"}
    assert found["zero-layer"]["rounds"] == 6


def test_two_unmodified_engines_are_compared_like_any_others(run: Any) -> None:
    found = run("twin", "zero-layer")["cells"]["twin"]
    assert found["ratio"]["median"] == 1.0
    assert "goal" not in found
    assert [what[1] for what in FakeChild.log if what[0] == "start"] == ["ours", "baseline", "baseline"]


def test_a_cell_that_takes_too_long_ends_with_fewer_rounds(run: Any) -> None:
    assert run("zero-layer", cell_seconds=0.0)["cells"]["zero-layer"]["rounds"] == 4


def test_a_dead_engine_costs_its_cell_only(run: Any, tmp_path: Path) -> None:
    FakeChild.broken = {"cap"}
    found = run("zero-layer", "cap", "add")["cells"]
    assert found["cap"] == {"error": "ours: the process died"}
    assert found["add"]["rounds"] == 6
    assert FakeChild.log.count(("start", "ours")) == 2
    assert json.loads((tmp_path / "speed.json").read_text())["cells"].keys() == found.keys()


def test_each_run_has_the_cores_that_were_fastest_before_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_FEWEST", 4)
    first, second = [3, 3, 9, 1, 2, 2, 1, 4], [1, 1, 1, 1, 8, 1, 9, 9]  # two looks at each of four cores
    took = itertools.chain(first, second, itertools.repeat(5.0))
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(set(cores)))
    found = run("zero-layer", cores=Cores(True, lambda: next(took)), rounds=4, warmups=0)["cells"]["zero-layer"]
    assert bound[:4] == [{0}, {0, 2, 4, 6}, {0}, {0, 2, 4, 6}]
    told = [entry[:2] + entry[3:] for entry in FakeChild.log if entry[0] in ("cores", "run")]
    assert told[:2] == [("cores", "baseline", "[4, 0, 6]"), ("run", "baseline", "0")]  # 3, 9, 2, 4
    assert told[2:4] == [("cores", "ours", "[0, 2, 4]"), ("run", "ours", "0")]  # 2, 5, 5, 6.5
    assert told[-2:] == [("cores", kind, "[0, 2, 4, 6]") for kind in ("baseline", "ours")]
    assert found["phases_of_rounds"]["tapped"] == [[2.01, 0.5]] * 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert not Cores(True).chosen  # two would not be a choice
    assert not Cores(False).chosen
    assert 0 < cores.work() < 60


def test_pairs_that_lost_their_cores_are_measured_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_FEWEST", 1)
    losses = itertools.cycle([0.0, 0.01, 0.01, 0.0, 0.03, 0.0])  # of runs: one of three pairs comes again
    taken = itertools.accumulate(loss for lost in losses for loss in (0.0, lost))  # before and after each
    monkeypatch.setattr(paired, "stolen", lambda _: next(taken))
    host = Cores(True, lambda: 1.0)
    found = run("zero-layer", cores=host, rounds=4)["cells"]["zero-layer"]
    assert found["rounds"] == 4
    assert found["stolen_s"] == [[0.0, 0.01], [0.0, 0.01], [0.01, 0.0], [0.01, 0.0]]
    assert [[lost for _, lost in pair] for pair in found["measured_again"]] == [[0.03, 0.0]]
    assert "4 rounds, drift +0.0 % (1 more)" in paired.shown("zero-layer", found)
    always = itertools.count()
    monkeypatch.setattr(paired, "stolen", lambda _: float(next(always)))
    found = run("zero-layer", cores=host, rounds=4)["cells"]["zero-layer"]
    assert (found["rounds"], found["measured_again"]) == (8, [])  # there are no others
    assert found["ratio_of_all"]["median"] == pytest.approx(1.004)


def test_what_others_had_of_a_core_is_counted_by_the_system(tmp_path: Path) -> None:
    counts = tmp_path / "stat"
    counts.write_text("cpu  9 9 9 9 9 9 9 999 0 0\ncpu0 1 2 3 4 5 6 7 300 9 9\ncpu1 1 2 3 4 5 6 7 50 9 9\nintr 5\n\n")
    tick = os.sysconf("SC_CLK_TCK")
    assert cores.stolen([0, 1], counts) == 350 / tick
    assert cores.stolen([1], counts) == 50 / tick
    assert cores.stolen([1], tmp_path / "nowhere") == 0
    assert cores.stolen(sorted(os.sched_getaffinity(0))) >= 0


def test_all_threads_of_a_process_are_confined() -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        cores.confine(everywhere[:1])
        assert [os.sched_getaffinity(i) for i in (0, thread.native_id or 0)] == [{everywhere[0]}] * 2
    finally:
        cores.confine(everywhere)
        done.set()
        thread.join()
    assert os.sched_getaffinity(0) == set(everywhere)


def test_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-8b", "--batch", "64", "--eager", "--cells", "noise", "layers=0,5", "--out", "x.json"]
    words += ["--rounds-of", "noise=3", "8x512-128/noise=2", "--loads", "8x512+128", "4x2048+16:48"]
    monkeypatch.setattr(sys, "argv", ["paired", *words])
    args = parse()
    assert (args.setup.model, args.setup.batch, args.setup.eager, args.setup.engine) == ("llama-8b", 64, True, "vllm")
    assert args.cells == ["noise", "layers=0,5"]
    assert args.rounds_of == {"noise": 3, "8x512-128/noise": 2}
    assert [(one.model, one.batch, one.prefill, one.decode, one.stagger) for one in args.loads] == [
        ("llama-8b", 8, 512, 128, 0),
        ("llama-8b", 4, 2048, 48, 32),
    ]
    assert not args.cores.chosen  # there is no GPU, so the host computes
    monkeypatch.setattr(sys, "argv", ["paired", *words, "--rounds-of", "nois=3"])
    with pytest.raises(SystemExit):
        parse()
    for wrong, why in {
        "--loads 8x512": "is not a load",
        "--loads 8x512+200:128": "every request makes a token at least",
        "--cells noise nothing": "'nothing' is unknown",
        "--profile nothing": "'nothing' is unknown",
    }.items():
        monkeypatch.setattr(sys, "argv", ["paired", "--out", "x.json", *wrong.split()])
        with pytest.raises(SystemExit):
            parse()
        assert why in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["paired", "--out", str(tmp_path)])
    assert tuple(parse().cells) == CELLS


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


def test_the_table_of_vllms_own_way_to_get_at_rows(run: Any, tmp_path: Path) -> None:
    FakeChild.broken = {"cap"}
    found = run("noise", "all-layers", "cap")
    (tmp_path / "gpu").mkdir()
    assert "No figures yet" in hidden_states(tmp_path)
    (tmp_path / "gpu" / "speed-qwen2.5-3b-peer.json").write_text(json.dumps(found))
    cell, text = found["cells"]["all-layers"], hidden_states(tmp_path)
    step, rows = cell["phases"]["tapped"]["step"], f"{cell['rows']:,} ({cell['bytes'] / 1e9:.2f} GB)"
    assert f"] | {step:.2f} | {rows} | {cell['rounds']} |" in text
    assert f"| {step:.2f} |  | 6 |" in next(line for line in text.splitlines() if "against itself" in line)
    assert "| cap at every layer, one vector per request | — | — |" in text
    assert "No figures yet" in shapes(tmp_path)


@pytest.mark.parametrize(("prompts", "split"), [(1, (500.0, 500.0, 2000.0, 500.0)), (2, (500.0, 500.0, 2250.0, 250.0))])
def test_a_round_is_split_at_both_ends_of_its_first_step_the_end_of_its_prompts_and_its_last_step(
    monkeypatch: pytest.MonkeyPatch, prompts: int, split: tuple[float, ...]
) -> None:
    """Prompts are read when the step after theirs has brought their first tokens: this engine prepares one ahead."""
    ticks = [10.0, *(10.5, 11.0), *(11.0, 12.0), *(12.0, 13.0), *(13.0, 13.25), *(13.25, 13.5), 14.5]
    now = iter(ticks)  # the start, five steps, the end
    monkeypatch.setattr(steps_module.time, "perf_counter", lambda: next(now))
    steps = steps_module.Steps(lambda: None)
    seconds, _ = steps_module.clocked(lambda: [steps() for _ in range(5)], steps)
    assert seconds == 4.5
    names = ("coming", "starting", "prompts", "decoding", "going")
    assert steps.phases(prompts) == {**dict(zip(names, (*split, 1000.0), strict=True)), "step": 250.0}


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


def test_ops_are_shown_by_the_run_that_proved_that_they_act(run: Any, tmp_path: Path) -> None:
    found = run("noise", "cap", "add", "generated")
    del found["cells"]["cap"]["verified"]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "speed-qwen2.5-3b.json").write_text(json.dumps(found))
    assert "| cap at every layer, one vector per request | +0.4 %" in costs(tmp_path)
    assert ", again" not in speed(tmp_path)
    for cell in found["cells"].values():
        cell["ratio"] |= {"median": 1.015, "interval": [1.01, 1.02]}
    (tmp_path / "gpu" / "speed-qwen2.5-3b-again-32x512-128.json").write_text(json.dumps(found))
    text = costs(tmp_path)
    assert "| cap at every layer, one vector per request (another run) | +1.5 % [+1.0, +2.0] |" in text
    assert text.count("another run") == 1
    assert "| all layers, generated tokens | +0.4 %" in text
    first, second = speed(tmp_path).split("**tiny, 2 × (6 + 4), again**")
    assert "+1.50 %" in second
    assert "+1.50 %" not in first
    assert shapes(tmp_path) == "*No figures yet.*"


def test_a_copy_that_fails_is_an_error_too(run: Any) -> None:
    FakeChild.wrong = {"copies": "no room"}
    assert run("all-layers")["cells"]["all-layers"] == {"error": "no room"}


def test_what_steers_is_verified_and_a_cell_that_drifts_says_so(run: Any) -> None:
    cells = run("add", "all-layers", "zero-layer")["cells"]
    assert cells["add"]["verified"] is True
    assert "verified" not in cells["zero-layer"]
    assert (cells["all-layers"]["drift_holds"], cells["all-layers"]["drift_goal"]) == (True, 0.01)
    assert run("add", noop=True)["cells"]["add"]["verified"] is False  # taps that do nothing
