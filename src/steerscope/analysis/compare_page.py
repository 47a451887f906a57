"""A comparison as one page: heat map of cosines, norms over layers, clusters, agreement of learned and averaged."""

from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from steerscope.analysis.compare import TOGETHER, Comparison
from steerscope.lenses.report import DIVERGING, GRID, div, page, styled
from steerscope.vectors.files import SUFFIXES


def comparison_page(found: Comparison) -> str:
    names, size = _short(found.names), len(found.names)
    shown = "all layers" if found.layers == (None,) else f"{len(found.layers)} layers"
    heat = (
        "<p>Cosine of each pair: the mean over the layers both have, or one layer at a time. Near vectors stand "
        f"together. Blank: no common layer.</p>{div(heat_figure(found, names), 'plot-heat')}"
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
    """Names without the folder that all share and without suffixes, as long as they stay apart."""
    paths = [Path(name) for name in names]
    parts = [(path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).parts for path in paths]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    short = ["/".join(part[common:]) for part in parts]
    return [escape(name) for name in (short if all(short) and len(set(short)) == len(names) else names)]


def heat_figure(found: Comparison, names: list[str]) -> go.Figure:
    """Mean cosines, and those of each layer behind a menu."""
    order, size = list(found.order), len(found.names)
    ticks, labels = list(range(size)), [names[i] for i in order]
    views = [found.mean, *(found.cosine if len(found.layers) > 1 else ())]
    grids = [
        [[None if np.isnan(x) else round(float(x), 4) for x in row] for row in view[order][:, order]] for view in views
    ]
    figure = go.Figure(
        go.Heatmap(
            z=grids[0],
            x=ticks,
            y=ticks,
            customdata=[[f"{a} · {b}" for a in labels] for b in labels],
            colorscale=DIVERGING,
            zmin=-1,
            zmax=1,
            texttemplate="%{z:.2f}" if size <= 14 else None,
            hovertemplate="%{customdata}<br>%{z:+.4f}<extra></extra>",
            colorbar={"thickness": 12, "outlinewidth": 0},
        )
    )
    room = 30 + 7 * max(map(len, labels))
    styled(figure, max(320, 120 + room + 30 * size), margin={"l": room, "r": 8, "t": 60, "b": room})
    figure.update_xaxes(tickvals=ticks, ticktext=labels, tickangle=-45, showgrid=False)
    figure.update_yaxes(tickvals=ticks, ticktext=labels, autorange="reversed", showgrid=False)
    if len(views) > 1:
        titles = ["mean", *(f"layer {layer}" for layer in found.layers)]
        buttons = [
            {"label": title, "method": "restyle", "args": [{"z": [grid]}]}
            for title, grid in zip(titles, grids, strict=True)
        ]
        figure.update_layout(updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}])
    return figure


def norm_figure(found: Comparison, names: list[str]) -> go.Figure:
    figure = go.Figure()
    for i, name in enumerate(names):
        there = ~np.isnan(found.norms[:, i])
        figure.add_trace(
            go.Scatter(
                x=["shared" if found.layers[k] is None else found.layers[k] for k in np.flatnonzero(there)],
                y=found.norms[there, i].round(6).tolist(),
                mode="lines+markers",
                name=name,
                hovertemplate=f"{name}<br>layer %{{x}}<br>%{{y:.4g}}<extra></extra>",
            )
        )
    styled(figure, 420, margin={"l": 64, "r": 16, "t": 12, "b": 48}, showlegend=True)
    figure.update_xaxes(title={"text": "layer"}, gridcolor=GRID, zeroline=False)
    figure.update_yaxes(title={"text": "norm"}, gridcolor=GRID, zeroline=False, type="log", dtick=1)
    return figure


def _clusters(found: Comparison, names: list[str]) -> str:
    groups: dict[int, list[str]] = {}
    for i in found.order:
        groups.setdefault(found.clusters[i], []).append(names[i])
    rows = "".join(f"<tr><td>{number}</td><td>{', '.join(group)}</td></tr>" for number, group in groups.items())
    said = f"<p>Vectors whose mean cosine is at least {TOGETHER:g} on average are put together.</p>"
    return f"{said}<table><tr><th>cluster</th><th>vectors</th></tr>{rows}</table>"


def _agree(found: Comparison, names: list[str]) -> str:
    if not found.agreement:
        return "<p>No learned vector has an averaged one of the same name beside it.</p>"
    short = dict(zip(found.names, names, strict=True))
    head = "".join(f"<th>{name}</th>" for name in ("learned", "averaged", "layer", "cosine", "rank"))
    lines = [
        f"<tr><td>{short[one.learned]}</td><td>{short[one.averaged]}</td>"
        f"<td>{'shared' if one.layer is None else one.layer}</td>"
        f"<td>{one.cosine:+.4f}</td><td>{one.rank} of {one.of}</td></tr>"
        for one in found.agreement
    ]
    said = "<p>Rank 1: of all averaged vectors none is nearer to the learned one than that of the same name.</p>"
    return f"{said}<table><tr>{head}</tr>{''.join(lines)}</table>"
