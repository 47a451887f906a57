"""Plots of analyses: pure functions from a result to a figure. Names were written by others, so they are escaped."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
from numpy.typing import ArrayLike

from steerscope.analysis.results import Result
from steerscope.lenses.colours import Colours
from steerscope.lenses.report import DIVERGING, GRID, INK, styled

SEQUENTIAL = [[0.0, "#ffffff"], [0.5, "#f0a35e"], [1.0, "#a94606"]]
COLOURS = ("#c2560c", "#2468a8", "#2f7d5b", "#7c4d9e", "#8a6d1d", "#6b7280", "#b03a5b", "#1f7a8c")
_MENU: dict[str, object] = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 8}}


def column(table: pa.Table, name: str) -> np.ndarray:
    return table.column(name).to_numpy(zero_copy_only=False)


def pivot(table: pa.Table, rows: str, columns: str, value: str) -> tuple[list, list, np.ndarray]:
    """Names of rows and columns in the order they come, and the grid; NaN where a pair is missing."""
    down, along, values = (table.column(name).to_pylist() for name in (rows, columns, value))
    at, to = list(dict.fromkeys(down)), list(dict.fromkeys(along))
    grid = np.full((len(at), len(to)), np.nan)
    places = {name: i for i, name in enumerate(at)}, {name: i for i, name in enumerate(to)}
    for a, b, x in zip(down, along, values, strict=True):
        grid[places[0][a], places[1][b]] = np.nan if x is None else x
    return at, to, grid


def heat_figure(
    grids: Mapping[str, np.ndarray],
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    across: str,
    hover: str,
    limit: float | None = None,
    signed: bool = True,
) -> go.Figure:
    """A heat map, one grid at a time with a menu of their names; the first one is shown. All share one scale, up to
    `limit`, or as the values need it."""
    values = np.concatenate([grid.ravel() for grid in grids.values()])
    colours = Colours(limit, signed=signed) if limit else Colours.of(values, signed=signed)
    scale = DIVERGING if signed else SEQUENTIAL
    plain = {
        name: [[None if np.isnan(x) else float(f"{x:.4g}") for x in row] for row in z] for name, z in grids.items()
    }
    labels = [escape(str(row), quote=False) for row in rows]
    figure = go.Figure(
        go.Heatmap(
            z=next(iter(plain.values())),
            x=[escape(str(name), quote=False) for name in columns],
            y=list(range(len(rows))),
            customdata=[[label] * len(columns) for label in labels],
            **colours.keywords(scale),
            hovertemplate=f"%{{customdata}}<br>{across} %{{x}}<br>{hover}<extra></extra>",
            colorbar={"thickness": 12, "outlinewidth": 0},
        )
    )
    left = 24 + 7 * max(map(len, labels))
    top = 56 if len(grids) > 1 else 12
    styled(figure, 74 + top + 24 * len(rows), margin={"l": left, "r": 8, "t": top, "b": 52})
    colours.explain(figure, scale)
    figure.update_xaxes(title={"text": across}, type="category", showgrid=False, zeroline=False)
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=labels, autorange="reversed", showgrid=False)
    if len(grids) > 1:
        buttons = [
            {"label": escape(name, quote=False), "method": "restyle", "args": [{"z": [grid]}, [0]]}
            for name, grid in plain.items()
        ]
        figure.update_layout(updatemenus=[{**_MENU, "buttons": buttons}])
    return figure


def lines_figure(
    lines: Mapping[str, tuple[Sequence, ArrayLike]],
    *,
    across: str,
    up: str,
    marks: Mapping[str, Sequence] | None = None,
) -> go.Figure:
    """Curves by name; `marks` are x values of a curve that are set off."""
    figure = go.Figure()
    for i, (name, (x, y)) in enumerate(lines.items()):
        chosen = set((marks or {}).get(name, ()))
        text, colour = escape(name, quote=False), COLOURS[i % len(COLOURS)]
        figure.add_trace(
            go.Scatter(
                x=list(x),
                y=[float(f"{value:.5g}") for value in np.asarray(y)],
                mode="lines+markers",
                name=text,
                line={"color": colour, "width": 2},
                marker={"size": [12 if at in chosen else 5 for at in x], "color": colour, "opacity": 1},
                hovertemplate=f"{text}<br>{across} %{{x}}<br>%{{y:.4g}}<extra></extra>",
            )
        )
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    styled(figure, 420, margin={"l": 64, "r": 16, "t": 44, "b": 52}, showlegend=True, legend=legend)
    figure.update_xaxes(title={"text": across}, gridcolor=GRID, zeroline=False)
    figure.update_yaxes(title={"text": up}, gridcolor=GRID, zeroline=True, zerolinecolor="#9aa1ac")
    return figure


# --- directions


def variance_figure(result: Result) -> go.Figure:
    """Share of each component over layers; dotted: what random sets reach."""
    table = result.tables["components"]
    layers, parts, shares = pivot(table, "layer", "component", "variance")
    _, _, chance = pivot(table, "layer", "component", "chance_high")
    where = ["shared" if layer is None else layer for layer in layers]
    figure = lines_figure(
        {f"component {k}": (where, shares[:, i]) for i, k in enumerate(parts)}, across="layer", up="share of variance"
    )
    dots = {"color": INK, "width": 1.5, "dash": "dot"}
    figure.add_trace(go.Scatter(x=where, y=chance[:, 0].tolist(), mode="lines", line=dots, name="first of random sets"))
    return figure


def plane_figure(result: Result) -> go.Figure:
    """Every vector on the first two components, one layer at a time."""
    table = result.tables["scores"]
    layers = list(dict.fromkeys(table.column("layer").to_pylist()))
    rows = table.to_pylist()
    groups = list(dict.fromkeys(row["group"] for row in rows))
    views = {layer: _plane(rows, layer, groups) for layer in layers}
    shown = layers[len(layers) // 2]
    figure = go.Figure()
    for i, group in enumerate(groups):
        names, x, y = views[shown][i]
        colour = COLOURS[i % len(COLOURS)]
        trace = go.Scatter(
            x=x, y=y, mode="markers+text", text=names, textposition="top center", name=escape(group) or "vectors"
        )
        figure.add_trace(trace.update(marker={"size": 9, "color": colour}, textfont={"size": 11, "color": colour}))
    styled(figure, 560, margin={"l": 64, "r": 16, "t": 60, "b": 52}, showlegend=len(groups) > 1)
    figure.update_xaxes(title={"text": "component 1"}, gridcolor=GRID, zerolinecolor="#9aa1ac")
    figure.update_yaxes(title={"text": "component 2"}, gridcolor=GRID, zerolinecolor="#9aa1ac")
    if len(layers) > 1:
        args = {layer: [{"x": [v[1] for v in view], "y": [v[2] for v in view]}] for layer, view in views.items()}
        buttons = [{"label": f"layer {layer}", "method": "restyle", "args": args[layer]} for layer in layers]
        figure.update_layout(updatemenus=[{**_MENU, "buttons": buttons, "active": layers.index(shown)}])
    return figure


def _plane(rows: Sequence[Mapping], layer: int | None, groups: Sequence[str]) -> list[tuple[list, list, list]]:
    """Names, first and second scores of each group."""
    found = []
    for group in groups:
        own = [row for row in rows if row["layer"] == layer and row["group"] == group]
        first, second = ({row["name"]: row["score"] for row in own if row["component"] == k} for k in (1, 2))
        names = [escape(name, quote=False) for name in first]
        found.append((names, [round(x, 5) for x in first.values()], [round(x, 5) for x in second.values()]))
    return found


def projection_figure(result: Result) -> go.Figure:
    """Cosines with the named vectors (down, in the order of the strongest), one vector at a time over layers."""
    table = result.tables["cosines"]
    names = column(table, "vector")
    grids = {name: pivot(table.filter(names == name), "onto", "layer", "cosine") for name in dict.fromkeys(names)}
    rows, layers, _ = next(iter(grids.values()))
    order = np.argsort(-np.max([np.abs(grid).mean(1) for _, _, grid in grids.values()], axis=0), kind="stable")
    shown = ["shared" if layer is None else layer for layer in layers]
    ordered = {name: grid[order] for name, (_, _, grid) in grids.items()}
    return heat_figure(ordered, [rows[i] for i in order], shown, across="layer", hover="cosine %{z:+.3f}")


# --- susceptibility


def change_figure(result: Result) -> go.Figure:
    """How much each matrix changed, for its size."""
    rows, layers, grid = pivot(result.tables["changes"], "matrix", "layer", "relative")
    return heat_figure({"": grid}, rows, layers, across="layer", hover="‖Δ‖ / ‖W‖ %{z:.3g}", signed=False)


def susceptibility_figure(result: Result, key: str = "z") -> go.Figure:
    """z-scores of every matrix and layer, one direction at a time."""
    table = result.tables["cells"]
    names = column(table, "direction")
    grids = {name: pivot(table.filter(names == name), "matrix", "layer", key) for name in dict.fromkeys(names)}
    rows, layers, _ = next(iter(grids.values()))
    return heat_figure(
        {name: grid for name, (_, _, grid) in grids.items()}, rows, layers, across="layer", hover="z %{z:+.1f}"
    )


def profile_figure(result: Result) -> go.Figure:
    """z-scores of whole layers; large dots are peaks."""
    table, peaks = result.tables["profile"], result.tables["peaks"]
    layers, names, grid = pivot(table, "layer", "direction", "z")
    marks = {name: column(peaks.filter(column(peaks, "direction") == name), "layer").tolist() for name in names}
    lines = {name: (layers, grid[:, i]) for i, name in enumerate(names)}
    figure = lines_figure(lines, across="layer", up="z against random directions", marks=marks)
    figure.add_hrect(y0=-3, y1=3, fillcolor="rgba(31,36,48,0.06)", line_width=0)
    return figure
