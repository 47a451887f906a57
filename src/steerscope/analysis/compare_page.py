"""A comparison as one page: heat map of cosines, norms over layers, clusters, agreement of learned and averaged."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from steerscope.analysis.compare import TOGETHER, Comparison
from steerscope.analysis.figures import layer_name
from steerscope.report.colours import Colours
from steerscope.report.page import div, page, table
from steerscope.report.plots import heat_figure, lines_figure
from steerscope.vectors.files import SUFFIXES


def comparison_page(found: Comparison) -> str:
    names, size = _short(found.names), len(found.names)
    shown = "all layers" if found.layers == (None,) else f"{len(found.layers)} layers"
    heat = (
        "<p>Cosine of each pair: the mean over the layers both have, or one layer at a time. Near vectors stand "
        f"together. Blank: no common layer.</p>{div(cosine_figure(found, names), 'plot-heat')}"
    )
    norms = f"<p>Length of each direction.</p>{div(norm_figure(found, names), 'plot-norms')}"
    about = f"{size} vectors at {shown}, in {len(set(found.clusters))} clusters."
    sections = {
        "Cosines": heat,
        "Norms": norms,
        "Clusters": _clusters(found, names),
        "Learned and averaged": _agree(found, names),
    }
    return page("Steering vectors compared", about, sections)


def _short(names: tuple[str, ...]) -> list[str]:
    """Return names without the folder that all share and without suffixes, where they stay distinct."""
    paths = [Path(name) for name in names]
    parts = [(path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).parts for path in paths]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    short = ["/".join(part[common:]) for part in parts]
    if all(short) and len(set(short)) == len(names):
        return short
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def cosine_figure(found: Comparison, names: list[str]) -> go.Figure:
    """Mean cosines, and those of each layer behind a menu."""
    order, size = list(found.order), len(found.names)
    views = {"mean": found.mean}
    if len(found.layers) > 1:
        views |= {f"layer {layer}": view for layer, view in zip(found.layers, found.cosine, strict=True)}
    grids = {title: view[order][:, order] for title, view in views.items()}
    labels = [names[i] for i in order]
    colours, hover = Colours(1.0), "%{z:+.4f}"
    figure = heat_figure(grids, labels, labels, across="with", hover=hover, colours=colours, slant=-45)
    return figure.update_traces(texttemplate="%{z:.2f}" if size <= 14 else None)


def norm_figure(found: Comparison, names: list[str]) -> go.Figure:
    lines = {}
    for i, name in enumerate(names):
        there = np.flatnonzero(~np.isnan(found.norms[:, i]))
        lines[name] = [layer_name(found.layers[k]) for k in there], found.norms[there, i]
    return lines_figure(lines, across="layer", up="norm").update_yaxes(type="log", dtick=1)


def _clusters(found: Comparison, names: list[str]) -> str:
    groups: dict[int, list[str]] = {}
    for i in found.order:
        groups.setdefault(found.clusters[i], []).append(names[i])
    said = f"<p>Vectors whose mean cosine is at least {TOGETHER:g} on average are put together.</p>"
    return said + table(("cluster", "vectors"), [(number, ", ".join(group)) for number, group in groups.items()])


def _agree(found: Comparison, names: list[str]) -> str:
    if not found.agreement:
        return "<p>No learned vector has an averaged one of the same name beside it.</p>"
    short = dict(zip(found.names, names, strict=True))
    rows = [
        (short[one.learned], short[one.averaged], layer_name(one.layer), one.cosine, f"{one.rank} of {one.of}")
        for one in found.agreement
    ]
    said = "<p>Rank 1: of all averaged vectors none is nearer to the learned one than that of the same name.</p>"
    return said + table(("learned", "averaged", "layer", ("cosine", "+.4f"), "rank"), rows)
