"""A comparison as one page: heat map of cosines, norms over layers, clusters, agreement of learned and averaged."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from steerscope.analysis.compare import TOGETHER, Comparison
from steerscope.analysis.figures import layer_name
from steerscope.report.colours import Colours
from steerscope.report.page import Html, div, page, section, table
from steerscope.report.plots import heat_figure, lines_figure
from steerscope.vectors.files import SUFFIXES


def comparison_page(found: Comparison) -> str:
    names = _short(found.names)
    shown = "all layers" if found.layers == (None,) else f"{len(found.layers)} layers"
    sections = {
        "Cosines": section(
            "Cosine of each pair: the mean over the layers both have, or one layer at a time. Near vectors stand "
            "together. Blank: no common layer.",
            div(cosine_figure(found, names), "plot-heat"),
        ),
        "Norms": section("Length of each direction.", div(norm_figure(found, names), "plot-norms")),
        "Clusters": section(
            f"Vectors whose mean cosine is at least {TOGETHER:g} on average are put together.", _clusters(found, names)
        ),
        "Learned and averaged": _agree(found, names),
    }
    about = f"{len(names)} vectors at {shown}, in {len(set(found.clusters))} clusters."
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
    views = {"mean": found.mean}
    if len(found.layers) > 1:
        views |= {f"layer {layer}": view for layer, view in zip(found.layers, found.cosine, strict=True)}
    grids = {title: view[np.ix_(found.order, found.order)] for title, view in views.items()}
    labels = [names[i] for i in found.order]
    figure = heat_figure(grids, labels, labels, across="with", hover="%{z:+.4f}", colours=Colours(1.0), slant=-45)
    return figure.update_traces(texttemplate="%{z:.2f}" if len(names) <= 14 else None)


def norm_figure(found: Comparison, names: list[str]) -> go.Figure:
    lines = {}
    for i, name in enumerate(names):
        there = np.flatnonzero(~np.isnan(found.norms[:, i]))
        lines[name] = [layer_name(found.layers[k]) for k in there], found.norms[there, i]
    return lines_figure(lines, across="layer", up="norm").update_yaxes(type="log", dtick="D2")


def _clusters(found: Comparison, names: list[str]) -> Html:
    groups: dict[int, list[str]] = {}
    for i in found.order:
        groups.setdefault(found.clusters[i], []).append(names[i])
    return table(("cluster", "vectors"), [(number, ", ".join(group)) for number, group in groups.items()])


def _agree(found: Comparison, names: list[str]) -> Html:
    if not found.agreement:
        return section("No learned vector has an averaged one of the same name beside it.")
    short = dict(zip(found.names, names, strict=True))
    rows = [
        (short[one.learned], short[one.averaged], layer_name(one.layer), one.cosine, f"{one.rank} of {one.of}")
        for one in found.agreement
    ]
    said = "Rank 1: of all averaged vectors none is nearer to the learned one than that of the same name."
    return section(said, table(("learned", "averaged", "layer", ("cosine", "+.4f"), "rank"), rows))
