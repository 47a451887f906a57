"""Plots of the passes through MLPs and attention: pure functions from a result to a figure."""

from typing import cast

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa

from steerscope.analysis.attention_tables import ALL
from steerscope.analysis.layerwise import grid, where
from steerscope.analysis.plots import column, pivot
from steerscope.analysis.results import Result
from steerscope.report.plots import heat_figure, lines_figure

MOST_SHOWN = 24  # directions in a heat map: those that are most extreme somewhere


def written_figure(result: Result, measure: str) -> go.Figure:
    """z of a measure for every direction over layers; a menu has the opposites."""
    table = result.tables["written"]
    views = {title: grid(table, measure, sign) for title, sign in (("v", 1), ("−v", -1))}
    names, layers, shown = views["v"]
    order = _extreme(shown)
    grids = {title: values[order] for title, (_, _, values) in views.items()}
    return heat_figure(grids, [names[i] for i in order], list(layers), across="layer", hover="z %{z:+.1f}")


def profile_figure(result: Result, measure: str) -> go.Figure:
    """Mean of a measure over each group of directions; large dots: the focus layer."""
    table = result.tables["written"]
    groups = dict(zip(column(table, "name"), column(table, "group"), strict=True))
    names, layers, values = grid(table, measure)
    own = np.array([groups[name] for name in names])
    focus = cast("dict[str, int]", result.about["focus"]).get(measure)
    lines = {
        str(group) or "directions": (layers.tolist(), values[own == group].mean(0).tolist())
        for group in dict.fromkeys(own.tolist())
    }
    return lines_figure(lines, across="layer", up=measure, marks={name: [focus] for name in lines})


def pairs_figure(result: Result, z: str, most: int | None = None) -> go.Figure:
    """z of every pair, all heads together, one layer at a time: the one with the most extreme pair first, then the
    others in turn. With `most`, only that number of layers, the most extreme ones first."""
    table = result.tables["pairs"]
    layers = list(dict.fromkeys(column(table, "layer").tolist()))
    names, _, _ = pivot(where(table, "layer", layers[0]), "query", "key", z)
    cube = column(table, z).reshape(len(layers), len(names), len(names))
    kept = np.sort(_extreme(np.moveaxis(cube, 0, 1).reshape(len(names), -1)))
    extreme = np.argsort(-np.abs(cube).max((1, 2)), kind="stable").tolist()
    order = extreme[:most] if most else [extreme[0], *sorted(extreme[1:])]
    grids = {f"layer {layers[i]}": cube[i][np.ix_(kept, kept)] for i in order}
    labels = [names[i] for i in kept]
    return heat_figure(grids, labels, labels, across="looked at", hover="z %{z:+.1f}", slant=-45)


def heads_figure(result: Result) -> go.Figure:
    """How many pairs of directions are extreme in each head, in per cent; a menu has those that changed."""
    table = result.tables["beyond"]
    single = table.filter(pa.array(column(table, "head") != ALL))
    titles = {"z": "affinity", "z_change": "change"}
    titles |= {f"against_{by}": f"{title}, against the vectors given" for by, title in titles.items()}
    views = {
        by: pivot(where(single, "by", by), "head", "layer", "percent") for by in dict.fromkeys(column(table, "by"))
    }
    heads, layers, _ = views["z"]
    grids = {titles[by]: values for by, (_, _, values) in views.items()}
    rows = [f"head {head}" for head in heads]
    return heat_figure(grids, rows, layers, across="layer", hover="%{z:.2f} % of pairs", signed=False)


def own_figure(result: Result) -> go.Figure:
    """z of each direction's affinity for itself, and of what looking at it writes along it, over layers."""
    table = where(result.tables["heads"], "head", ALL)
    measures = {"z_self": "looks at itself", "z_write": "writes itself"}
    measures |= {"z_change_self": "change of looking", "z_change_write": "change of writing"}
    views = {title: grid(table, measure) for measure, title in measures.items() if measure in table.column_names}
    names, layers, _ = next(iter(views.values()))
    order = _extreme(np.concatenate([values for _, _, values in views.values()], axis=1))
    grids = {title: values[order] for title, (_, _, values) in views.items()}
    return heat_figure(grids, [names[i] for i in order], list(layers), across="layer", hover="z %{z:+.1f}")


def components_figure(result: Result) -> go.Figure:
    """Mean |z| over layers by the number of the principal component."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for one in cast("list[dict]", result.about["components"]):
        numbers, means = lines.setdefault(one["measure"], ([], []))
        numbers.append(one["component"])
        means.append(one["mean"])
    return lines_figure(lines, across="component", up="mean |z| over layers").update_xaxes(dtick=1)


def _extreme(values: np.ndarray) -> np.ndarray:
    """Rows with the largest |value| anywhere, the most extreme first."""
    return np.argsort(-np.abs(values).max(1), kind="stable")[:MOST_SHOWN]
