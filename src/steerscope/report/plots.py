"""Figures of one look: heat maps, curves and points. Texts that a model or a user wrote are escaped here."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from steerscope.report.colours import AXIS, GRID, INK, PALETTE, Colours

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_NOTE_HEIGHT = 34  # pixels above a heat map
_LETTER = 7  # pixels
_MOST_TICKS = 12


def label(text: object) -> str:
    """Return a text for plotly, which reads a little HTML but no quotes."""
    return escape(str(text), quote=False)


def styled(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """Give a figure the look of all figures."""
    font = {"family": FONT, "size": 13, "color": INK}
    figure.update_layout(height=height, template="none", paper_bgcolor="#ffffff", plot_bgcolor="#ffffff", font=font)
    figure.update_layout(hoverlabel={"bgcolor": "#ffffff", "font": font, "align": "left"})
    return figure.update_layout(layout)


def framed(figure: go.Figure, across: str, up: str, height: int = 420, **layout: object) -> go.Figure:
    """Style a figure with two axes and name them; the legend stands above."""
    margin = {"l": 64, "r": 16, "t": 44, "b": 52}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    styled(figure, height, **{"margin": margin, "showlegend": True, "legend": legend, **layout})
    figure.update_xaxes(title=_title(across), gridcolor=GRID, zeroline=False, dtick=1 if _few_numbers(figure) else None)
    return figure.update_yaxes(title=_title(up), gridcolor=GRID, zeroline=True, zerolinecolor=AXIS)


def _few_numbers(figure: go.Figure) -> bool:
    """Return whether all x are whole numbers close together, such as layers; plotly would put ticks between them."""
    columns: list[Any] = [trace.x for trace in figure.data if trace.x is not None]  # type: ignore[attr-defined]
    places = [x for column in columns for x in column]
    return bool(places) and all(isinstance(x, int) for x in places) and max(places) - min(places) <= _MOST_TICKS


def _title(text: str) -> dict[str, object]:
    return {"text": label(text), "standoff": 8, "font": {"size": 13}}


def add_menu(figure: go.Figure, views: Mapping[str, Mapping[str, object]], active: int = 0) -> go.Figure:
    """Add a menu of views: title → data of all traces, or nothing where there is one view."""
    if len(views) < 2:
        return figure
    buttons = [{"label": label(title), "method": "restyle", "args": [data]} for title, data in views.items()]
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 8}}
    return figure.update_layout(updatemenus=[{**place, "buttons": buttons, "active": active}])


def heat_figure(
    grids: Mapping[str, np.ndarray],
    rows: Sequence[object],
    columns: Sequence[object],
    *,
    across: str,
    hover: str,
    colours: Colours | None = None,
    signed: bool = True,
    slant: int = 0,
) -> go.Figure:
    """Return a heat map of one grid at a time with a menu of their names; all share one colour scale. Names of columns
    are turned by `slant` degrees."""
    colours = colours or Colours.of(np.concatenate([grid.ravel() for grid in grids.values()]), signed=signed)
    shown = {name: [[_rounded(value) for value in row] for row in grid] for name, grid in grids.items()}
    labels = [label(row) for row in rows]
    names = [label(column) for column in columns]
    figure = go.Figure(
        go.Heatmap(
            z=next(iter(shown.values())),
            x=names,
            y=list(range(len(labels))),
            customdata=[[name] * len(names) for name in labels],
            hovertemplate=f"%{{customdata}}<br>{across} %{{x}}<br>{hover}<extra></extra>",
            colorbar={"thickness": 12, "outlinewidth": 0},
            **colours.keywords(),
        )
    )
    top = 56 if len(grids) > 1 else 12
    bottom = _room(names) + 20 if slant else 52
    styled(figure, 22 + top + bottom + 24 * len(labels), margin={"l": _room(labels), "r": 8, "t": top, "b": bottom})
    _explain(figure, colours.note)
    figure.update_xaxes(title=_title(across), type="category", tickangle=slant, showgrid=False, zeroline=False)
    figure.update_yaxes(tickvals=list(range(len(labels))), ticktext=labels, autorange="reversed", showgrid=False)
    return add_menu(figure, {name: {"z": [grid]} for name, grid in shown.items()})


def token_figure(
    values: ArrayLike,
    rows: Sequence[str],
    tokens: Sequence[str],
    *,
    colours: Colours,
    hover: str,
    answer_start: int = 0,
    details: Sequence[str] | None = None,
) -> go.Figure:
    """Return a heat map over tokens. A line stands before token `answer_start`; `details` are what hovering shows of
    each row, by default its name."""
    at = list(range(len(tokens)))
    names = [_shortened(token.strip(" ").replace("\n", "⏎") or "␣") for token in tokens]
    figure = heat_figure({"": np.asarray(values)}, rows, at, across="", hover="", colours=colours)
    shown = [[[name, escape(row)] for name in names] for row in details or rows]
    template = f"token <b>%{{customdata[0]}}</b><br>%{{customdata[1]}}<br>{hover}<extra></extra>"
    heat = {"customdata": shown, "hovertemplate": template, "showscale": False}
    figure.update_traces(heat, selector={"type": "heatmap"})
    figure.update_xaxes(type="linear", tickvals=at, ticktext=names, tickangle=-90, tickfont={"size": 12})
    layout: Any = figure.layout  # plotly makes its attributes at run time
    bottom = _room(names) - 6
    figure.update_layout(height=layout.height + bottom - layout.margin.b, margin_b=bottom)
    if 0 < answer_start < len(names):
        figure.add_vline(x=answer_start - 0.5, line={"color": INK, "width": 1.5})
    return figure


def _shortened(text: str) -> str:
    return label(text if len(text) <= 14 else text[:13] + "…")


def _room(labels: Sequence[str]) -> int:
    """Return the pixels that the longest label takes."""
    return 24 + _LETTER * max(map(len, labels), default=1)


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else float(f"{value:.4g}")


def _explain(figure: go.Figure, note: str) -> None:
    """Add a note above a heat map."""
    if not note:
        return
    about = {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom"}
    figure.add_annotation(text=note, showarrow=False, font={"size": 11}, yshift=6, **about)
    layout: Any = figure.layout
    above = layout.margin.t or 0
    layout.update(margin_t=max(above, _NOTE_HEIGHT), height=layout.height + max(0, _NOTE_HEIGHT - above))


def lines_figure(
    lines: Mapping[str, tuple[Sequence, ArrayLike]],
    *,
    across: str,
    up: str,
    marks: Mapping[str, Sequence] | None = None,
) -> go.Figure:
    """Return curves by name; `marks` are x values of a curve that have large dots."""
    figure = go.Figure()
    for i, (name, (x, y)) in enumerate(lines.items()):
        add_line(figure, x, y, name, PALETTE[i % len(PALETTE)], marks=(marks or {}).get(name, ()))
    figure.update_traces(hovertemplate=f"%{{fullData.name}}<br>{across} %{{x}}<br>%{{y:.4g}}<extra></extra>")
    return framed(figure, across, up)


def add_line(
    figure: go.Figure,
    x: Sequence,
    y: ArrayLike,
    name: str,
    colour: str,
    *,
    marks: Sequence = (),
    dash: str = "solid",
    hover: str | None = None,
    **trace: object,
) -> None:
    """Add a curve with a dot at every point, or in another `mode`."""
    sizes = [12 if at in marks else 5 for at in x]
    given: dict[str, Any] = {
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": sizes, "color": colour, "opacity": 1},
        "hovertemplate": hover,
        **trace,
    }
    figure.add_scatter(x=list(x), y=[float(f"{value:.5g}") for value in np.asarray(y)], name=label(name), **given)


def add_band(figure: go.Figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> None:
    """Fill the area between two curves."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    figure.add_scatter(
        x=[*x, *reversed(x)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},0.14)",
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )
