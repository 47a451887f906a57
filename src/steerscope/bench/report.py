"""A suite's results as one self-contained page."""

import statistics
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from steerscope.bench.suite import ladder, markdown

_CONFIG: dict[str, object] = {"displayModeBar": False, "responsive": True}
_STYLE = (
    "body{font:16px/1.6 system-ui,sans-serif;color:#1f2430;max-width:1100px;margin:0 auto;padding:32px 20px}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "td,th{padding:5px 14px;border-bottom:1px solid #e1e4e9;text-align:left}"
)
_COLOURS = ("#2468a8", "#c2560c", "#2f7d5b", "#7c4d9e", "#6b7280", "#a94606", "#17497c", "#59606e")


def html_report(result: dict[str, Any]) -> str:
    engines = result["engines"]
    plots = "".join(
        f"<h2>{escape(title)}</h2>{_div(figure, name)}"
        for name, title, figure in (
            ("ratio", "Overhead against the baseline", _ratios(engines)),
            ("layers", "Overhead by captured layers", _layers(engines)),
            ("drift", "Iterations, relative to the first process's median", _drift(engines)),
        )
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>steerscope bench</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>steerscope bench</h1>"
        f"{_table(markdown(result))}{plots}</body></html>\n"
    )


def _table(text: str) -> str:
    """The Markdown tables, as HTML; everything else is a paragraph."""
    made, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([escape(part.strip()).replace("`", "") for part in line.strip("|").split("|")])
            continue
        if rows:
            head, _, *body = rows
            cells = "".join(f"<tr>{''.join(f'<td>{part}</td>' for part in row)}</tr>" for row in body)
            made.append(f"<table><tr>{''.join(f'<th>{part}</th>' for part in head)}</tr>{cells}</table>")
            rows = []
        if line:
            made.append(f"<p>{escape(line)}</p>")
    return "".join(made)


def _ratios(engines: dict[str, Any]) -> go.Figure:
    figure = go.Figure()
    for colour, (engine, found) in zip(_COLOURS, engines.items(), strict=False):
        cells = {cell: one for cell, one in found["cells"].items() if one["ratio"] and cell != "baseline"}
        figure.add_bar(
            x=list(cells), y=[100 * (one["ratio"] - 1) for one in cells.values()], name=engine, marker_color=colour
        )
    return _styled(figure, "overhead, %")


def _layers(engines: dict[str, Any]) -> go.Figure:
    figure = go.Figure()
    for colour, (engine, found) in zip(_COLOURS, engines.items(), strict=False):
        cells = [found["cells"][cell] for cell in ladder(found["cells"])]
        if "fit" not in found or "baseline" not in found["cells"]:
            continue
        base = found["cells"]["baseline"]["median"]
        x = [one["captured_layers"] for one in cells]
        mark = {"color": colour, "size": 9}
        over = [100 * (one["median"] / base - 1) for one in cells]
        figure.add_scatter(x=x, y=over, mode="markers", name=engine, marker=mark)
        ends = np.array([0, max(x)])
        fit = (found["fit"]["s_at_zero"] + found["fit"]["s_per_layer"] * ends) / base
        figure.add_scatter(x=ends, y=100 * (fit - 1), mode="lines", name=f"{engine}, fit", line={"color": colour})
    figure.update_xaxes(title="captured layers")
    return _styled(figure, "overhead, %")


def _drift(engines: dict[str, Any]) -> go.Figure:
    figure = go.Figure()
    shown = [(engine, cell, one) for engine, found in engines.items() for cell, one in found["cells"].items()]
    wanted = [item for item in shown if item[1] in ("baseline", "zero-layer", "all-layers")]
    for colour, (engine, cell, one) in zip(_COLOURS, wanted, strict=False):
        times = [second / statistics.median(one["seconds"][0]) for run in one["seconds"] for second in run]
        figure.add_scatter(y=times, mode="lines+markers", name=f"{engine} {cell}", line={"color": colour})
    figure.update_xaxes(title="iteration")
    return _styled(figure, "× median of the first process")


def _styled(figure: go.Figure, title: str) -> go.Figure:
    figure.update_layout(height=380, template="plotly_white", margin={"l": 60, "r": 20, "t": 20, "b": 60})
    figure.update_yaxes(title=title)
    return figure


def _div(figure: go.Figure, name: str) -> str:
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config=_CONFIG)
