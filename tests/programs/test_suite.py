"""The suite's order, its arithmetic and its report, with processes that are not started."""

from pathlib import Path
from typing import Any

import pytest

from steerscope.bench import suite
from steerscope.bench.suite import command, markdown, run_suite, suite_cells
from steerscope.bench.workload import Setup

SETUP = Setup(model="tiny", batch=2, prefill=6, decode=4)
BASE, IDLE, PER_LAYER = 1.0, 1.1, 0.05


def figures(name: str, seconds: float) -> dict[str, Any]:
    return {name: {"median": seconds, "min": seconds, "spread": 0.0, "drift": 0.01}}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every process pretends: the machine slows down, and each captured layer costs the same."""
    started: list[str] = []

    def fake(words: list[str], _output: Path) -> dict[str, Any]:
        slow = 1 + 0.5 * (len(started) >= 2 * len(suite_cells(4)))  # the second repeat
        started.append(" ".join(words))
        about = {"hardware": {"gpu": None, "processor": "x", "cores": 2}, "versions": {"torch": "2"}}
        if words[1] == "stream":
            row = {"first_token_s": 0.1, "last_first_token_s": 0.1, "total_s": 1.0, "tokens_per_s": 8.0}
            return about | {"iterations": [row], "summary": figures("total_s", 1.0)}
        seconds = BASE if "baseline" in words else IDLE
        if "--mode" in words and "baseline" not in words:
            layers = words[words.index("--layers") + 1].split(",") if "--layers" in words else []
            seconds += PER_LAYER * (4 if "all-layers" in words else len(layers))
        row = {"generation_s": slow * seconds, "steps": 4}
        summary = figures("generation", slow * seconds) | {"fetch_gb_per_s": 2.0}
        return about | {"iterations": [row], "summary": summary, "verified": {"bytes": 10**6 * ("last" not in words)}}

    monkeypatch.setattr(suite, "_run", fake)
    return started


def test_cells_climb_the_layers() -> None:
    assert list(suite_cells(16).values())[:6] == [0, 0, 1, 4, 8, 16]
    assert "layers=0,4,8,12" in suite_cells(16)
    assert list(suite_cells(4))[:5] == ["baseline", "zero-layer", "layers=0", "layers=0,2", "all-layers"]


def test_processes_take_turns_and_ratios_stay_within_a_repeat(order: list[str]) -> None:
    found = run_suite(SETUP, ["hf", "vllm"], 2, 1)
    assert len(order) == 2 * 2 * len(suite_cells(4))
    half = len(order) // 2
    assert order[:half] == order[half:][::-1]
    assert [words.split("--engine ")[1][:2] for words in order[:4]] == ["hf", "vl", "hf", "vl"]
    cells = found["engines"]["vllm"]["cells"]
    assert cells["zero-layer"]["ratio"] == pytest.approx(IDLE)  # though the second repeat was slower
    assert cells["all-layers"]["ratio"] == pytest.approx(IDLE + 4 * PER_LAYER)
    assert found["engines"]["hf"]["fit"]["s_per_layer"] == pytest.approx(1.25 * PER_LAYER)
    assert found["engines"]["hf"]["stream"]["tokens_per_s"]["median"] == 8.0


def test_the_table_has_costs_against_the_baseline(order: list[str]) -> None:
    del order
    found = run_suite(SETUP, ["hf"], 1, 1)
    text = markdown(found)
    assert "| zero-layer | 1.100 | 1.100 | +1.0 % | 2.00 |" in text
    assert "| last | 1.100 | 1.100 | +1.0 % |  |" in text  # too little to tell
    assert "A captured layer costs 50.00 ms of a round, +4.55 %." in text


@pytest.mark.parametrize("cell", suite_cells(4))
def test_commands_are_those_of_the_command_line(cell: str) -> None:
    """Every option exists; nothing is run."""
    from typer.main import get_command

    from steerscope.cli.main import app

    group: Any = get_command(app)
    _, name, *words = command(SETUP, cell, 3, Path("x.json"))
    bench = group.commands["bench"].commands[name]
    context = bench.make_context(name, list(words), resilient_parsing=False)
    assert context.params["iterations"] == 3
    assert context.params["model"] == "tiny"
