"""The three rows of speed in the README, and the plots of the performance pages."""

import json
from collections.abc import Sequence
from pathlib import Path

from bench.tables import gpu
from steerscope.report.colours import GRID, INK, NEUTRAL, POSITIVE, SOFT
from steerscope.report.svg import drawing, line, text

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 760, 330, 730, 26, 44
_HEADLINE = ("zero-layer", "all-layers", "add")
_CELLS = {"plain": NEUTRAL, "capture": POSITIVE, "steer": INK}

_Interval = tuple[str, float, float, float]  # label, median, low, high


def headline(results: Path) -> str:
    """Return the table of the README."""
    data = gpu.main_run(results)
    work = data["configuration"]
    size = f"{work['batch']} requests of {work['prefill']} + {work['decode']} tokens"
    where = f"{work['model']}, one {data['hardware']['gpu']}, vLLM {data['versions']['vllm']}"
    lines = [f"| {size} ({where}) | time beside unmodified vLLM, 95 % interval |", "|---|---|"]
    cells = gpu.proven_cells(results)
    lines += [f"| {gpu.REQUESTS[name]} | {gpu.interval(cells[name][0], 1)} |" for name in _HEADLINE]
    return "\n".join(lines)


def gpu_plot(results: Path) -> str:
    """Return a plot of the overhead of each kind of request, with its 95 % interval."""
    rows: list[_Interval] = []
    for name, (cell, _) in gpu.proven_cells(results).items():
        middle, low, high = (100 * (x - 1) for x in (cell["ratio"]["median"], *cell["ratio"]["interval"]))
        rows.append((gpu.REQUESTS[name], middle, low, high))
    return _intervals("Time beside unmodified vLLM, %; the line is the 95 % interval", rows, [-1, -0.5, 0, 0.5, 1, 1.5])


def _intervals(title: str, rows: Sequence[_Interval], ticks: Sequence[float]) -> str:
    height = _TOP + _ROW * len(rows) + 34
    bottom = height - 30
    parts = [text(_LEFT, 22, title, "start")]
    for tick in ticks:
        x = _across(tick, ticks)
        parts += [line(x, _TOP - 8, x, bottom, SOFT if tick == 0 else GRID), text(x, bottom + 18, f"{tick:+g}")]
    for i, (label, middle, low, high) in enumerate(rows):
        y = _TOP + _ROW * (i + 0.5)
        parts += [
            text(_LEFT - 14, y + 4, label, "end"),
            line(_across(low, ticks), y, _across(high, ticks), y, POSITIVE),
            _dot(_across(middle, ticks), y, POSITIVE),
        ]
    return drawing("".join(parts), _WIDTH, height)


def cpu_plot(results: Path) -> str:
    """Return a plot of the best times of libraries on the transformers engine's workload."""
    peers = json.loads((results / "hf.json").read_text())["peers"]
    ticks = [4, 5, 6, 7, 8, 9, 10]
    height = _TOP + _ROW * len(peers) + 34
    bottom = height - 30
    parts = [text(_LEFT, 22, "Best of all runs, seconds: ", "start")]
    for i, (cell, colour) in enumerate(_CELLS.items()):
        parts += [_dot(_LEFT + 170 + 80 * i, 18, colour), text(_LEFT + 180 + 80 * i, 22, cell, "start")]
    for tick in ticks:
        x = _across(tick, ticks)
        parts += [line(x, _TOP - 8, x, bottom, GRID), text(x, bottom + 18, f"{tick:g}")]
    for i, (name, found) in enumerate(peers.items()):
        y = _TOP + _ROW * (i + 0.5)
        parts.append(text(_LEFT - 14, y + 4, name.replace("transformers_hooks", "plain hooks"), "end"))
        for cell, colour in _CELLS.items():
            if "seconds" in found.get("cells", {}).get(cell, {}):
                parts.append(_dot(_across(min(found["cells"][cell]["seconds"]), ticks), y, colour))
    return drawing("".join(parts), _WIDTH, height)


def _across(value: float, ticks: Sequence[float]) -> float:
    part = (value - ticks[0]) / (ticks[-1] - ticks[0])
    return _LEFT + part * (_RIGHT - _LEFT)


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'


PLOTS = {"speed-gpu.svg": gpu_plot, "speed-cpu.svg": cpu_plot}
