"""Figures of analyses: pure functions from a result to a figure."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa

from steerscope.analysis.attention import ALL
from steerscope.analysis.results import AnalysisResult, column, pivot, where
from steerscope.report.colours import AXIS, BAND, INK, PALETTE
from steerscope.report.plots import add_menu, framed, heat_figure, label, lines_figure

MOST_SHOWN = 24  # directions in a heat map: those with the largest value somewhere
Grid = tuple[list, list, np.ndarray]  # names of rows and columns, values


def layer_name(layer: int | None) -> int | str:
    """Return a layer, or what stands for a vector of all layers."""
    return "shared" if layer is None else layer


def _grids(table: pa.Table, by: str, rows: str, value: str) -> dict[Any, Grid]:
    """Return a grid over layers for each value of the column `by`."""
    return {name: pivot(where(table, by, name), rows, "layer", value) for name in dict.fromkeys(column(table, by))}


def _over_layers(
    grids: Mapping[str, Grid], hover: str, order: Sequence[int] | np.ndarray | None = None, signed: bool = True
) -> go.Figure:
    """Return a heat map over layers with a menu of the grids; `order` chooses rows."""
    rows, layers, _ = next(iter(grids.values()))
    order = range(len(rows)) if order is None else order
    shown = {title: values[list(order)] for title, (_, _, values) in grids.items()}
    across = [layer_name(layer) for layer in layers]
    return heat_figure(shown, [rows[i] for i in order], across, across="layer", hover=hover, signed=signed)


def _extreme(values: np.ndarray) -> np.ndarray:
    """Return the rows with the largest absolute value anywhere, in that order."""
    return np.argsort(-np.abs(values).max(1), kind="stable")[:MOST_SHOWN]


# --- directions


def variance_figure(result: AnalysisResult) -> go.Figure:
    """Share of each component over layers; dotted: what random sets reach."""
    table = result.tables["components"]
    layers, parts, shares = pivot(table, "layer", "component", "variance")
    _, _, chance = pivot(table, "layer", "component", "chance_high")
    across = [layer_name(layer) for layer in layers]
    lines = {f"component {k}": (across, shares[:, i]) for i, k in enumerate(parts)}
    figure = lines_figure(lines, across="layer", up="share of variance")
    dots = {"color": INK, "width": 1.5, "dash": "dot"}
    return figure.add_scatter(x=across, y=chance[:, 0].tolist(), mode="lines", line=dots, name="first of random sets")


def plane_figure(result: AnalysisResult) -> go.Figure:
    """Every vector on the first two components, one layer at a time."""
    rows = result.tables["scores"].to_pylist()
    layers, groups = (list(dict.fromkeys(row[key] for row in rows)) for key in ("layer", "group"))
    views = {layer: [_plane(rows, layer, group) for group in groups] for layer in layers}
    shown = len(layers) // 2
    figure = go.Figure()
    for i, (group, (names, x, y)) in enumerate(zip(groups, views[layers[shown]], strict=True)):
        colour = PALETTE[i % len(PALETTE)]
        look = {"marker": {"size": 9, "color": colour}, "textfont": {"size": 11, "color": colour}}
        name = label(group) or "vectors"
        figure.add_scatter(x=x, y=y, mode="markers+text", text=names, name=name, textposition="top center", **look)
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


def projection_figure(result: AnalysisResult) -> go.Figure:
    """Cosines with the named vectors (down, in the order of the strongest), one vector at a time over layers."""
    grids = _grids(result.tables["cosines"], "vector", "onto", "cosine")
    order = np.argsort(-np.max([np.abs(values).mean(1) for *_, values in grids.values()], axis=0), kind="stable")
    return _over_layers(grids, "cosine %{z:+.3f}", order)


# --- susceptibility


def change_figure(result: AnalysisResult) -> go.Figure:
    """Length of each matrix's change over the length of its weights."""
    grid = pivot(result.tables["changes"], "matrix", "layer", "relative")
    return _over_layers({"": grid}, "‖Δ‖ / ‖W‖ %{z:.3g}", signed=False)


def susceptibility_figure(result: AnalysisResult, key: str = "z") -> go.Figure:
    """z-scores of every matrix and layer, one direction at a time."""
    return _over_layers(_grids(result.tables["cells"], "direction", "matrix", key), "z %{z:+.1f}")


def peaks_figure(result: AnalysisResult) -> go.Figure:
    """z-scores of whole layers; large dots are peaks."""
    peaks = result.tables["peaks"]
    layers, names, grid = pivot(result.tables["profile"], "layer", "direction", "z")
    marks = {name: column(where(peaks, "direction", name), "layer").tolist() for name in names}
    lines = {name: (layers, grid[:, i]) for i, name in enumerate(names)}
    figure = lines_figure(lines, across="layer", up="z against random directions", marks=marks)
    return figure.add_hrect(y0=-3, y1=3, fillcolor=BAND, line_width=0)


# --- MLPs and attention


def written_figure(result: AnalysisResult, measure: str) -> go.Figure:
    """z of a measure for every direction over layers; a menu has the opposites."""
    grids = _grids(result.tables["written"], "sign", "name", measure)
    return _over_layers({"v": grids[1], "−v": grids[-1]}, "z %{z:+.1f}", _extreme(grids[1][2]))


def profile_figure(result: AnalysisResult, measure: str) -> go.Figure:
    """Mean of a measure over each group of directions; large dots: the focus layer."""
    table = where(result.tables["written"], "sign", 1)
    groups = dict(zip(column(table, "name"), column(table, "group"), strict=True))
    names, layers, values = pivot(table, "name", "layer", measure)
    own = np.array([groups[name] for name in names])
    focus = cast("dict[str, int]", result.about["focus"]).get(measure)
    lines = {
        str(group) or "directions": (layers, values[own == group].mean(0).tolist())
        for group in dict.fromkeys(own.tolist())
    }
    return lines_figure(lines, across="layer", up=measure, marks={name: [focus] for name in lines})


def pairs_figure(result: AnalysisResult, z: str, most: int | None = None) -> go.Figure:
    """z of every pair, all heads together, one layer at a time.

    The layer with the most extreme pair comes first, then the others in turn; `most` keeps only that number of layers,
    the most extreme ones first."""
    table = result.tables["pairs"]
    names = list(dict.fromkeys(table["query"].to_pylist()))
    layers = dict.fromkeys(column(table, "layer").tolist())
    grids = {layer: pivot(where(table, "layer", layer), "query", "key", z)[2] for layer in layers}
    kept = np.sort(_extreme(np.concatenate(list(grids.values()), axis=1)))
    extreme = sorted(grids, key=lambda layer: -np.abs(grids[layer]).max())
    order = extreme[:most] if most else [extreme[0], *sorted(extreme[1:])]
    shown = {f"layer {layer}": grids[layer][np.ix_(kept, kept)] for layer in order}
    labels = [names[i] for i in kept]
    return heat_figure(shown, labels, labels, across="looked at", hover="z %{z:+.1f}", slant=-45)


def heads_figure(result: AnalysisResult) -> go.Figure:
    """Percentage of extreme pairs of directions in each head; a menu has those that changed."""
    table = result.tables["beyond"]
    titles = {"z": "affinity", "z_change": "change"}
    titles |= {f"against_{by}": f"{title}, against the vectors given" for by, title in titles.items()}
    grids = {}
    for by, (heads, layers, values) in _grids(table, "by", "head", "percent").items():
        single = [i for i, head in enumerate(heads) if head != ALL]
        grids[titles[by]] = [f"head {heads[i]}" for i in single], layers, values[single]
    return _over_layers(grids, "%{z:.2f} % of pairs", signed=False)
