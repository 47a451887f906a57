"""Plots of analyses: pure functions from a result to a figure."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa

from steerscope.analysis.results import Result
from steerscope.report.colours import AXIS, BAND, INK, PALETTE
from steerscope.report.plots import add_menu, framed, heat_figure, label, lines_figure


def column(table: pa.Table, name: str) -> np.ndarray:
    return table.column(name).to_numpy(zero_copy_only=False)


def pivot(table: pa.Table, rows: str, columns: str, value: str) -> tuple[list, list, np.ndarray]:
    """Return the names of rows and columns in the order they come, and the grid; NaN where a pair is missing."""
    down, along, values = (table.column(name).to_pylist() for name in (rows, columns, value))
    at, to = list(dict.fromkeys(down)), list(dict.fromkeys(along))
    grid = np.full((len(at), len(to)), np.nan)
    places = {name: i for i, name in enumerate(at)}, {name: i for i, name in enumerate(to)}
    for a, b, x in zip(down, along, values, strict=True):
        grid[places[0][a], places[1][b]] = np.nan if x is None else x
    return at, to, grid


def _grids(table: pa.Table, by: str, rows: str, value: str) -> tuple[list, list, dict[str, np.ndarray]]:
    """Return names of rows, layers, and a grid for each value of the column `by`."""
    names = column(table, by)
    found = {name: pivot(table.filter(names == name), rows, "layer", value) for name in dict.fromkeys(names)}
    down, layers, _ = next(iter(found.values()))
    return down, [layer_name(layer) for layer in layers], {name: grid for name, (_, _, grid) in found.items()}


def layer_name(layer: int | None) -> int | str:
    """Return a layer, or what stands for a vector of all layers."""
    return "shared" if layer is None else layer


# --- directions


def variance_figure(result: Result) -> go.Figure:
    """Share of each component over layers; dotted: what random sets reach."""
    table = result.tables["components"]
    layers, parts, shares = pivot(table, "layer", "component", "variance")
    _, _, chance = pivot(table, "layer", "component", "chance_high")
    where = [layer_name(layer) for layer in layers]
    lines = {f"component {k}": (where, shares[:, i]) for i, k in enumerate(parts)}
    figure = lines_figure(lines, across="layer", up="share of variance")
    dots = {"color": INK, "width": 1.5, "dash": "dot"}
    return figure.add_scatter(x=where, y=chance[:, 0].tolist(), mode="lines", line=dots, name="first of random sets")


def plane_figure(result: Result) -> go.Figure:
    """Every vector on the first two components, one layer at a time."""
    rows = result.tables["scores"].to_pylist()
    layers, groups = (list(dict.fromkeys(row[key] for row in rows)) for key in ("layer", "group"))
    views = {layer: [_plane(rows, layer, group) for group in groups] for layer in layers}
    shown = len(layers) // 2
    figure = go.Figure()
    for i, (group, (names, x, y)) in enumerate(zip(groups, views[layers[shown]], strict=True)):
        look = {"marker": {"size": 9, "color": PALETTE[i % len(PALETTE)]}, "textposition": "top center"}
        font = {"size": 11, "color": PALETTE[i % len(PALETTE)]}
        figure.add_scatter(
            x=x, y=y, mode="markers+text", text=names, name=label(group) or "vectors", textfont=font, **look
        )
    margin = {"l": 64, "r": 16, "t": 60, "b": 52}
    framed(figure, "component 1", "component 2", 560, margin=margin, showlegend=len(groups) > 1, legend={})
    figure.update_xaxes(zeroline=True, zerolinecolor=AXIS)
    places = {layer: {"x": [view[1] for view in own], "y": [view[2] for view in own]} for layer, own in views.items()}
    return add_menu(figure, {f"layer {layer}": places[layer] for layer in layers}, shown)


def _plane(rows: Sequence[Mapping], layer: int | None, group: str) -> tuple[list, list, list]:
    """Return names, first and second scores of a group."""
    own = [row for row in rows if row["layer"] == layer and row["group"] == group]
    first, second = ({row["name"]: round(row["score"], 5) for row in own if row["component"] == k} for k in (1, 2))
    return [label(name) for name in first], list(first.values()), list(second.values())


def projection_figure(result: Result) -> go.Figure:
    """Cosines with the named vectors (down, in the order of the strongest), one vector at a time over layers."""
    rows, layers, grids = _grids(result.tables["cosines"], "vector", "onto", "cosine")
    order = np.argsort(-np.max([np.abs(grid).mean(1) for grid in grids.values()], axis=0), kind="stable")
    ordered = {name: grid[order] for name, grid in grids.items()}
    return heat_figure(ordered, [rows[i] for i in order], layers, across="layer", hover="cosine %{z:+.3f}")


# --- susceptibility


def change_figure(result: Result) -> go.Figure:
    """How much each matrix changed, for its size."""
    rows, layers, grid = pivot(result.tables["changes"], "matrix", "layer", "relative")
    return heat_figure({"": grid}, rows, layers, across="layer", hover="‖Δ‖ / ‖W‖ %{z:.3g}", signed=False)


def susceptibility_figure(result: Result, key: str = "z") -> go.Figure:
    """z-scores of every matrix and layer, one direction at a time."""
    rows, layers, grids = _grids(result.tables["cells"], "direction", "matrix", key)
    return heat_figure(grids, rows, layers, across="layer", hover="z %{z:+.1f}")


def profile_figure(result: Result) -> go.Figure:
    """z-scores of whole layers; large dots are peaks."""
    table, peaks = result.tables["profile"], result.tables["peaks"]
    layers, names, grid = pivot(table, "layer", "direction", "z")
    marks = {name: column(peaks.filter(column(peaks, "direction") == name), "layer").tolist() for name in names}
    lines = {name: (layers, grid[:, i]) for i, name in enumerate(names)}
    figure = lines_figure(lines, across="layer", up="z against random directions", marks=marks)
    return figure.add_hrect(y0=-3, y1=3, fillcolor=BAND, line_width=0)
