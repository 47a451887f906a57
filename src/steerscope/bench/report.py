"""A suite's results as one self-contained page."""

import statistics
from typing import Any

import plotly.graph_objects as go

from steerscope.bench.suite import engine_table, ladder, workload
from steerscope.report.colours import PALETTE
from steerscope.report.page import div, page, section, table
from steerscope.report.plots import add_line, framed, label, lines_figure

Engines = dict[str, Any]


def html_report(result: dict[str, Any]) -> str:
    engines = result["engines"]
    sections = {engine: _costs(result, engine) for engine in engines}
    sections["Overhead against the baseline"] = div(_ratios(engines), "plot-ratio")
    sections["Overhead by captured layers"] = div(_layers(engines), "plot-layers")
    sections["Iterations, relative to the first process's median"] = div(_drift(engines), "plot-drift")
    return page("steerscope bench", workload(result), sections)


def _costs(result: dict[str, Any], engine: str) -> str:
    head, rows, notes = engine_table(result, engine)
    return section(table([title.replace("`", "") for title in head], rows), *notes)


def _ratios(engines: Engines) -> go.Figure:
    figure = go.Figure()
    for colour, (engine, found) in zip(PALETTE, engines.items(), strict=False):
        cells = {cell: one["ratio"] for cell, one in found["cells"].items() if one["ratio"] and cell != "baseline"}
        over = [100 * (ratio - 1) for ratio in cells.values()]
        figure.add_bar(x=list(map(label, cells)), y=over, name=label(engine), marker_color=colour)
    return framed(figure, "", "overhead, %").update_xaxes(automargin=True)


def _layers(engines: Engines) -> go.Figure:
    figure = go.Figure()
    for colour, (engine, found) in zip(PALETTE, engines.items(), strict=False):
        if "fit" not in found or "baseline" not in found["cells"]:
            continue
        cells, base = [found["cells"][cell] for cell in ladder(found["cells"])], found["cells"]["baseline"]["median"]
        x = [one["captured_layers"] for one in cells]
        over = [100 * (one["median"] / base - 1) for one in cells]
        add_line(figure, x, over, engine, colour, mode="markers", marker={"color": colour, "size": 9})
        seconds = [found["fit"]["s_at_zero"] + found["fit"]["s_per_layer"] * layers for layers in (0, max(x))]
        fit = [100 * (second / base - 1) for second in seconds]
        add_line(figure, [0, max(x)], fit, f"{engine}, fit", colour, mode="lines")
    return framed(figure, "captured layers", "overhead, %")


def _drift(engines: Engines) -> go.Figure:
    lines = {}
    for engine, found in engines.items():
        for cell in ("baseline", "zero-layer", "all-layers"):
            runs = found["cells"].get(cell, {"seconds": []})["seconds"]
            times = [second / statistics.median(runs[0]) for run in runs for second in run]
            if times:
                lines[f"{engine} {cell}"] = range(len(times)), times
    return lines_figure(lines, across="iteration", up="× median of the first process")
