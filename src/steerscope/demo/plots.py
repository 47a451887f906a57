"""The demo's plots. Colours mean the same everywhere: orange is positive, blue negative, grey unsteered."""

from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from steerscope.demo.results import HeatMap, LensMap, Results
from steerscope.report.colours import AXIS, BAND, DIVERGING, INK, NEGATIVE, NEUTRAL, POSITIVE, Colours
from steerscope.report.plots import framed, lines_figure, token_figure, wrapped

_SYMBOLS = {"sentence": "circle", "held out": "circle-open", "answer": "diamond"}


def colour(results: Results, condition: str) -> str:
    known = {results.positive: POSITIVE, results.negative: NEGATIVE, "capped": "#7c4d9e", "ablated": "#2f7d5b"}
    return known.get(condition, NEUTRAL)


def heat_limit(results: Results) -> float:
    """Return one colour range for all heat maps: the 98th percentile, so that few outliers do not pale the others."""
    values = [abs(value) for heat in results.heat for row in heat.values for value in row]
    return float(np.quantile(values, 0.98, method="lower")) or 1.0


def heat_figure(results: Results, heat: HeatMap) -> go.Figure:
    """Tokens from left to right, layers from bottom to top."""
    layers = [f"layer {layer}" for layer in range(results.layers)]
    colours = Colours(heat_limit(results))
    hover = "%{z:+.3f} mean row norms"
    start = heat.answer_start
    figure = token_figure(heat.values, layers, heat.tokens, colours=colours, hover=hover, answer_start=start)
    figure.update_layout(height=238 + figure.layout.margin.b, margin={"l": 46, "t": 8})  # type: ignore[union-attr]
    ticks = _layer_ticks(results)
    figure.update_yaxes(
        title={"text": "layer", "standoff": 6, "font": {"size": 13}}, tickvals=ticks, ticktext=ticks, autorange=True
    )
    if heat.condition != "unsteered":
        first, last = _steered(results)
        figure.add_hrect(y0=first, y1=last, line={"color": INK, "width": 1, "dash": "dot"}, fillcolor="rgba(0,0,0,0)")
    return figure


def lens_figure(found: LensMap) -> go.Figure:
    """Tokens from left to right, concepts from top to bottom."""
    colours = Colours(1.0, signed=False)
    return token_figure(found.values, found.concepts, found.tokens, colours=colours, hover="%{z:.3f}")


def _layer_ticks(results: Results) -> list[int]:
    return sorted({0, *results.steered_layers[:: len(results.steered_layers) - 1 or 1], results.layers - 1})


def _steered(results: Results) -> tuple[float, float]:
    """Return the edges of the steered layers on an axis."""
    return results.steered_layers[0] - 0.5, results.steered_layers[-1] + 0.5


def dose_figure(results: Results) -> go.Figure:
    """Effect, cost and collapse over the scale, one below the other."""
    scales = [dose.scale for dose in results.doses]
    doses = results.doses
    rows = (
        (f"Effect: log-odds of {results.positive} words (nats)", [dose.log_odds for dose in doses], "%{y:+.1f} nats"),
        ("Cost: perplexity, unsteered model", [dose.perplexity for dose in doses], "%{y:.1f}"),
        ("Collapse: distinct tokens (%)", [100 * dose.distinct for dose in doses], "%{y:.0f} %"),
    )
    titles = [title for title, _, _ in rows]
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=titles)
    shade = {"color": scales, "colorscale": DIVERGING, "cmin": -0.6, "cmax": 0.6, "line": {"color": INK, "width": 1}}
    look = {"mode": "lines+markers", "line": {"color": AXIS, "width": 2}, "marker": {"size": 9, **shade}}
    for row, (_, values, form) in enumerate(rows, 1):
        hover = f"scale %{{x:+.2f}}<br>{form}<extra></extra>"
        figure.add_scatter(x=scales, y=values, hovertemplate=hover, row=row, col=1, **look)
    for sign in (-1, 1):
        figure.add_vline(x=sign * results.scale, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13}, yshift=3)
    framed(figure, "", "", 560, margin={"l": 50, "r": 16, "t": 32, "b": 48}, showlegend=False)
    figure.update_xaxes(tickformat=".2~f", range=[min(scales) * 1.06, max(scales) * 1.06])
    figure.update_yaxes(type="log", tickvals=[1, 2, 5, 10, 20, 50, 100, 200, 500], row=2, col=1)
    figure.update_yaxes(range=[0, 105], row=3, col=1)
    figure.update_xaxes(title={"text": "scale (mean row norms, in all)"}, row=3, col=1)
    return figure


def control_figure(results: Results) -> go.Figure:
    """The ± gap of the vector beside the ± gaps of random directions."""
    control = results.control
    figure = go.Figure()
    spread = control.gap / control.z
    count = len(control.random_gaps)
    figure.add_vrect(x0=-spread, x1=spread, fillcolor=BAND, line_width=0)
    beside = "right" if control.gap > 0 else "left"
    for values, name, ink, size, (at, text, anchor) in (
        (control.random_gaps, "random direction", NEUTRAL, 11, (0.0, f"{count} random directions", "center")),
        ([control.gap], "this vector", POSITIVE, 16, (control.gap, f"this vector {control.gap:+.1f}", beside)),
    ):
        marker = {"size": size, "color": ink, "opacity": 0.85, "line": {"color": "#ffffff", "width": 1}}
        hover = f"{name}<br>%{{x:+.2f}} nats<extra></extra>"
        figure.add_scatter(x=values, y=[0] * len(values), mode="markers", marker=marker, hovertemplate=hover)
        words = {
            "text": text,
            "xanchor": anchor,
            "font": {"color": ink, "size": 13},
            "bgcolor": "rgba(255,255,255,0.8)",
        }
        figure.add_annotation(x=at, y=0, yshift=26, showarrow=False, **words)
    margin = {"l": 16, "r": 24, "t": 8, "b": 48}
    framed(figure, "± gap of the log-odds (nats)", "", 170, margin=margin, showlegend=False)
    figure.update_yaxes(visible=False, range=[-1, 1.4])
    return figure.update_xaxes(zeroline=True, zerolinecolor=AXIS)


def layers_figure(results: Results) -> go.Figure:
    """Held-out AUROC at every layer."""
    lines = {"": (range(results.layers), results.auroc)}
    up = "held-out AUROC"
    figure = lines_figure(lines, across="layer", up=up, marks={"": [results.read_layer]}, colours=[INK])
    first, last = _steered(results)
    figure.add_vrect(x0=first, x1=last, fillcolor=BAND, line_width=0)
    figure.add_hline(y=0.5, line={"color": AXIS, "width": 1, "dash": "dot"})
    figure.update_layout(height=470, showlegend=False, margin_t=12)
    figure.update_xaxes(tickvals=_layer_ticks(results))
    return figure.update_yaxes(range=[min(0.45, *results.auroc), 1.03])


def plane_figure(results: Results) -> go.Figure:
    """Sentences and answers on the first two principal components."""
    figure = go.Figure()
    plane = results.plane
    for part, symbol in _SYMBOLS.items():
        for side in (results.positive, results.negative, "unsteered"):
            points = [point for point in plane.points if point.group == f"{side} {part}"]
            if not points:
                continue
            ink = colour(results, side)
            answer = part == "answer"
            edge = {"color": INK if answer else ink, "width": 1.2 if answer else 1.6}
            figure.add_scatter(
                x=[point.x for point in points],
                y=[point.y for point in points],
                mode="markers",
                name=f"{side} {part}",
                marker={"symbol": symbol, "color": ink, "size": 12 if answer else 9, "line": edge},
                customdata=[wrapped(point.text) for point in points],
                hovertemplate=f"<b>{escape(side)} {part}</b><br>%{{customdata}}<extra></extra>",
            )
    first, second = (
        f"component {i} (mean row norms; {part:.0%} of variance)" for i, part in enumerate(plane.explained, 1)
    )
    framed(figure, first, second, 520, margin={"l": 72, "r": 16, "t": 84, "b": 52})
    return figure.update_xaxes(zeroline=True, zerolinecolor=AXIS)
