"""The demo's plots. Colours mean the same everywhere: orange is positive, blue negative, grey unsteered."""

import textwrap
from html import escape
from typing import Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from steerscope.demo.results import HeatMap, LensMap, Results
from steerscope.lenses.report import DIVERGING, GRID, INK, styled

POSITIVE, NEGATIVE, NEUTRAL = "#c2560c", "#2468a8", "#6b7280"
_BAND = "rgba(31,36,48,0.06)"


def _styled(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    styled(figure, height, **{"showlegend": False, **layout})
    for axes in (figure.update_xaxes, figure.update_yaxes):
        axes(title_font_size=13, gridcolor=GRID, zeroline=False)
    return figure


def colour(results: Results, condition: str) -> str:
    known = {results.positive: POSITIVE, results.negative: NEGATIVE, "capped": "#7c4d9e", "ablated": "#2f7d5b"}
    return known.get(condition, NEUTRAL)


def heat_limit(results: Results) -> float:
    """One colour range for all heat maps: up to the 98th percentile, so that a few outliers do not pale the rest."""
    values = sorted(abs(value) for heat in results.heat for row in heat.values for value in row)
    return values[int(0.98 * (len(values) - 1))] or 1.0


def heat_figure(results: Results, heat: HeatMap) -> go.Figure:
    """Tokens from left to right, layers from bottom to top."""
    limit, columns = heat_limit(results), list(range(len(heat.tokens)))
    shown = [_visible(token) for token in heat.tokens]
    figure = go.Figure(
        go.Heatmap(
            z=[[round(value, 4) for value in row] for row in heat.values],
            x=columns,
            y=list(range(results.layers)),
            customdata=[shown] * results.layers,
            colorscale=DIVERGING,
            zmin=-limit,
            zmax=limit,
            showscale=False,
            hovertemplate="token <b>%{customdata}</b><br>layer %{y}<br>%{z:+.3f} mean row norms<extra></extra>",
        )
    )
    room = 18 + 7 * max(map(len, shown), default=1)  # for the vertical labels
    _styled(figure, 238 + room, margin={"l": 46, "r": 8, "t": 8, "b": room})
    figure.update_xaxes(tickvals=columns, ticktext=shown, tickangle=-90, tickfont={"size": 12}, showgrid=False)
    figure.update_yaxes(title={"text": "layer", "standoff": 6}, tickvals=_layer_ticks(results), showgrid=False)
    figure.add_vline(x=heat.answer_start - 0.5, line={"color": INK, "width": 1.5})
    if heat.condition != "unsteered":
        first, last = results.steered_layers[0] - 0.5, results.steered_layers[-1] + 0.5
        figure.add_hrect(y0=first, y1=last, line={"color": INK, "width": 1, "dash": "dot"}, fillcolor="rgba(0,0,0,0)")
    return figure


def lens_figure(found: LensMap) -> go.Figure:
    """Tokens from left to right, concepts from top to bottom."""
    columns, rows = list(range(len(found.tokens))), list(range(len(found.concepts)))
    shown = [_visible(token) for token in found.tokens]
    figure = go.Figure(
        go.Heatmap(
            z=[[round(value, 4) for value in row] for row in found.values],
            x=columns,
            y=rows,
            customdata=[shown] * len(rows),
            colorscale=[[0.0, "#ffffff"], [0.5, "#f0a35e"], [1.0, "#a94606"]],
            zmin=0,
            zmax=1,
            showscale=False,
            hovertemplate="token <b>%{customdata}</b><br>%{z:.3f}<extra></extra>",
        )
    )
    room = 18 + 7 * max(map(len, shown), default=1)
    names = [escape(name) for name in found.concepts]
    left = 24 + 7 * max(map(len, found.concepts), default=1)
    _styled(figure, 30 + 22 * len(rows) + room, margin={"l": left, "r": 8, "t": 8, "b": room})
    figure.update_xaxes(tickvals=columns, ticktext=shown, tickangle=-90, tickfont={"size": 12}, showgrid=False)
    figure.update_yaxes(tickvals=rows, ticktext=names, autorange="reversed", showgrid=False)
    return figure


def _visible(token: str) -> str:
    """A token as an axis label; plotly reads a little HTML, so its brackets are escaped."""
    text = token.strip(" ").replace("\n", "⏎") or "␣"
    text = text if len(text) <= 14 else text[:13] + "…"
    return escape(text, quote=False)


def _layer_ticks(results: Results) -> list[int]:
    return sorted({0, *results.steered_layers[:: len(results.steered_layers) - 1 or 1], results.layers - 1})


def dose_figure(results: Results) -> go.Figure:
    """Effect, cost and collapse over the scale, one below the other."""
    scales = [dose.scale for dose in results.doses]
    titles = (
        f"Effect: log-odds of {results.positive} words (nats)",
        "Cost: perplexity, unsteered model",
        "Collapse: distinct tokens (%)",
    )
    columns = (
        [dose.log_odds for dose in results.doses],
        [dose.perplexity for dose in results.doses],
        [100 * dose.distinct for dose in results.doses],
    )
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=titles)
    for row, (values, form) in enumerate(zip(columns, ("%{y:+.1f} nats", "%{y:.1f}", "%{y:.0f} %"), strict=True), 1):
        line = go.Scatter(
            x=scales,
            y=values,
            mode="lines+markers",
            line={"color": "#9aa1ac", "width": 2},
            marker={
                "size": 9,
                "color": scales,
                "colorscale": DIVERGING,
                "cmin": -0.6,
                "cmax": 0.6,
                "line": {"color": INK, "width": 1},
            },
            hovertemplate=f"scale %{{x:+.2f}}<br>{form}<extra></extra>",
        )
        figure.add_trace(line, row=row, col=1)
    for sign in (-1, 1):
        figure.add_vline(x=sign * results.scale, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13}, yshift=3)
    _styled(figure, 560, margin={"l": 50, "r": 16, "t": 32, "b": 48})
    figure.update_xaxes(tickformat=".2~f", range=[min(scales) * 1.06, max(scales) * 1.06])
    figure.update_yaxes(type="log", tickvals=[1, 2, 5, 10, 20, 50, 100, 200, 500], row=2, col=1)
    figure.update_yaxes(range=[0, 105], row=3, col=1)
    figure.update_xaxes(title={"text": "scale (mean row norms, in all)"}, row=3, col=1)
    return figure


def control_figure(results: Results) -> go.Figure:
    """The ± gap of the vector beside the ± gaps of random directions."""
    control = results.control
    spread = control.gap / control.z
    figure = go.Figure()
    figure.add_vrect(x0=-spread, x1=spread, fillcolor=_BAND, line_width=0)
    for values, name, fill, size in (
        (control.random_gaps, "random direction", NEUTRAL, 11),
        ([control.gap], "this vector", POSITIVE, 16),
    ):
        marker = {"size": size, "color": fill, "opacity": 0.85, "line": {"color": "#ffffff", "width": 1}}
        hover = f"{name}<br>%{{x:+.2f}} nats<extra></extra>"
        figure.add_trace(go.Scatter(x=values, y=[0] * len(values), mode="markers", marker=marker, hovertemplate=hover))
    below = [
        (control.gap, "right" if control.gap > 0 else "left", f"this vector {control.gap:+.1f}", POSITIVE),
        (0.0, "center", f"{len(control.random_gaps)} random directions", NEUTRAL),
    ]
    for x, anchor, text, ink in below:
        figure.add_annotation(
            x=x,
            y=0,
            yshift=26,
            text=text,
            showarrow=False,
            xanchor=anchor,
            font={"color": ink, "size": 13},
            bgcolor="rgba(255,255,255,0.8)",
        )
    _styled(figure, 170, margin={"l": 16, "r": 24, "t": 8, "b": 48})
    figure.update_yaxes(visible=False, range=[-1, 1.4])
    figure.update_xaxes(zeroline=True, zerolinecolor="#9aa1ac", title={"text": "± gap of the log-odds (nats)"})
    return figure


def layers_figure(results: Results) -> go.Figure:
    """Held-out AUROC at every layer."""
    figure = go.Figure()
    first, last = results.steered_layers[0] - 0.5, results.steered_layers[-1] + 0.5
    figure.add_vrect(x0=first, x1=last, fillcolor=_BAND, line_width=0)
    figure.add_hline(y=0.5, line={"color": "#9aa1ac", "width": 1, "dash": "dot"})
    sizes = [12 if layer == results.read_layer else 6 for layer in range(results.layers)]
    figure.add_trace(
        go.Scatter(
            x=list(range(results.layers)),
            y=results.auroc,
            mode="lines+markers",
            line={"color": INK, "width": 2},
            marker={"size": sizes, "color": INK, "opacity": 1},
            hovertemplate="layer %{x}<br>AUROC %{y:.3f}<extra></extra>",
        )
    )
    _styled(figure, 470, margin={"l": 56, "r": 16, "t": 12, "b": 48})
    figure.update_xaxes(title={"text": "layer"}, tickvals=_layer_ticks(results))
    figure.update_yaxes(title={"text": "held-out AUROC"}, range=[min(0.45, *results.auroc), 1.03])
    return figure


def plane_figure(results: Results) -> go.Figure:
    """Sentences and answers on the first two principal components."""
    figure = go.Figure()
    symbols: dict[str, Literal["circle", "circle-open", "diamond"]] = {
        "sentence": "circle",
        "held out": "circle-open",
        "answer": "diamond",
    }
    for part, symbol in symbols.items():
        for side in (results.positive, results.negative, "unsteered"):
            points = [point for point in results.plane.points if point.group == f"{side} {part}"]
            if points:
                ink = colour(results, side)
                edge = {"color": INK if symbol == "diamond" else ink, "width": 1.2 if symbol == "diamond" else 1.6}
                figure.add_trace(
                    go.Scatter(
                        x=[point.x for point in points],
                        y=[point.y for point in points],
                        mode="markers",
                        name=f"{side} {part}",
                        marker={"symbol": symbol, "color": ink, "size": 12 if symbol == "diamond" else 9, "line": edge},
                        customdata=[_wrapped(point.text) for point in points],
                        hovertemplate=f"<b>{side} {part}</b><br>%{{customdata}}<extra></extra>",
                    )
                )
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}, "itemwidth": 30}
    _styled(figure, 520, showlegend=True, legend=legend, margin={"l": 72, "r": 16, "t": 84, "b": 52})
    shares = [
        f"component {i} (mean row norms; {share:.0%} of variance)" for i, share in enumerate(results.plane.explained, 1)
    ]
    figure.update_xaxes(title={"text": shares[0]}, zeroline=True, zerolinecolor="#9aa1ac")
    figure.update_yaxes(title={"text": shares[1], "standoff": 8}, zeroline=True, zerolinecolor="#9aa1ac")
    return figure


def _wrapped(text: str, width: int = 46) -> str:
    """Hover text in short lines, escaped for plotly's HTML."""
    return "<br>".join(escape(line) for line in textwrap.wrap(text, width))
