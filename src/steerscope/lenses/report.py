"""Readings of one text as a page: concepts over tokens, the tree of concepts, what the lenses' scores mean, firings.

The page is one file with plotly.js inside. Everything that a model or a user wrote is escaped on its way in.
"""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.offline import get_plotlyjs

from steerscope.lenses.bank import calibrate
from steerscope.lenses.colours import Colours
from steerscope.lenses.readings import Firing, Readings

_CONFIG: dict[str, object] = {"displayModeBar": False, "responsive": True, "scrollZoom": False}
INK, GRID = "#1f2430", "#e6e8ec"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
DIVERGING = [[0.0, "#17497c"], [0.25, "#6ea3d4"], [0.5, "#ffffff"], [0.75, "#f0a35e"], [1.0, "#a94606"]]
_HEAT = [[0.0, "#ffffff"], [0.5, "#f0a35e"], [1.0, "#a94606"]]
_MOST_SHOWN = 24  # concepts in the heat map
_MOST_CURVES = 8

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
body { margin: 0; background: #f6f7f9; color: $ink; font: 16px/1.6 $font; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 20px 56px; }
section { background: #fff; border: 1px solid #e1e4e9; border-radius: 10px; padding: 20px 24px; margin-top: 20px; }
h1 { font-size: 1.8rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 0 0 .4rem; }
p { max-width: 82ch; margin: 0 0 .6rem; color: #59606e; } .wide { overflow-x: auto; }
.text { white-space: pre-wrap; color: $ink; max-width: none; } .text b { font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 2px 18px 2px 0; }
</style><script>$plotlyjs</script></head><body><main>
<h1>$title</h1><p>$about</p>
$sections
</main></body></html>
""")


def html_report(
    readings: Readings, texts: Sequence[str], firings: Sequence[Firing], *, prompt_length: int, model: str
) -> str:
    """`texts` are those of all tokens, prompt and generated."""
    pack, best = readings.pack, _best(readings)
    calibrated = pack.calibration is not None
    about = (
        f"{len(readings)} rows of {model}, read by {len(pack)} lenses of {pack.info.name} at layer {pack.info.layer}"
    )
    width = max(700, 19 * len(readings))
    heat = div(heat_figure(readings, texts, best, prompt_length), "plot-heat")
    curves_about = (
        "From what a lens says alone to the score that is shown, for the strongest concepts."
        if calibrated
        else "This pack has no calibration: the scores are what each lens says alone."
    )
    curves = div(curve_figure(readings, best[:_MOST_CURVES]), "plot-curves") if calibrated else ""
    over = f"""<p>How strongly each concept shows in the row of each token. White: not among the top
{readings.values.shape[1]} of that row. The line is where the prompt ends.</p>"""
    tree = "<p>Concepts that were read, under their parents. Size and colour: mean over all rows.</p>"
    text = f"{_plain(texts[:prompt_length])}<b>{_plain(texts[prompt_length:])}</b>"
    return page(
        f"What lenses read in {model}",
        about + ".",
        {
            "Text": f'<p class="text">{text}</p>',
            "Concepts over tokens": over + f'<div class="wide"><div style="min-width:{width}px">{heat}</div></div>',
            "Tree": tree + div(tree_figure(readings), "plot-tree"),
            "What the scores mean": f"<p>{curves_about}</p>{curves}",
            "Rules": _firings(firings, texts),
        },
    )


def page(title: str, about: str, sections: Mapping[str, str]) -> str:
    """One file with plotly.js inside; `sections` maps headings to HTML that is already escaped."""
    parts = [f"<section><h2>{escape(heading)}</h2>{body}</section>" for heading, body in sections.items()]
    return _PAGE.substitute(
        title=escape(title), about=escape(about), ink=INK, font=FONT, plotlyjs=get_plotlyjs(), sections="\n".join(parts)
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """An HTML table of plain texts."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _plain(texts: Sequence[str]) -> str:
    return escape("".join(texts))


def div(figure: go.Figure, name: str) -> str:
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=_CONFIG)


def _best(readings: Readings) -> list[int]:
    """Lenses by the sum of their scores, best first."""
    total = np.zeros(len(readings.pack))
    said = readings.indices >= 0
    np.add.at(total, readings.indices[said], readings.values[said])
    order = np.argsort(-total, kind="stable")
    return [int(lens) for lens in order if total[lens] > 0]


def styled(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """The look of every figure here and in the demo's report."""
    figure.update_layout(
        height=height,
        template="none",
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        font={"family": FONT, "size": 13, "color": INK},
        hoverlabel={"bgcolor": "#ffffff", "font": {"family": FONT, "size": 13, "color": INK}, "align": "left"},
    )
    figure.update_layout(layout)
    return figure


def heat_figure(readings: Readings, texts: Sequence[str], best: Sequence[int], prompt_length: int) -> go.Figure:
    """Tokens from left to right, concepts from top to bottom."""
    shown = list(best[:_MOST_SHOWN])
    pack, columns = readings.pack, list(range(len(readings)))
    values = [readings.of(pack.concepts[lens].id).round(4).tolist() for lens in shown]
    labels = [_label(texts[int(at)]) for at in readings.positions]
    names = [escape(pack.concepts[lens].name) for lens in shown]
    paths = [[escape(" › ".join(pack.path(lens)))] * len(columns) for lens in shown]
    hover = "token <b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{z:.3f}<extra></extra>"
    both = [[[label, path] for label, path in zip(labels, row, strict=True)] for row in paths]
    colours = Colours.of(values, signed=False, least=1.0)
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=columns,
            y=list(range(len(shown))),
            customdata=both,
            **{**colours.keywords(_HEAT), "showscale": False},
            hovertemplate=hover,
        )
    )
    room = 18 + 7 * max(map(len, labels), default=1)
    styled(figure, 60 + 22 * max(1, len(shown)) + room, margin={"l": 190, "r": 8, "t": 8, "b": room})
    colours.explain(figure, _HEAT)
    figure.update_xaxes(tickvals=columns, ticktext=labels, tickangle=-90, tickfont={"size": 12}, showgrid=False)
    figure.update_yaxes(tickvals=list(range(len(shown))), ticktext=names, autorange="reversed", showgrid=False)
    generated = int((readings.positions < prompt_length).sum())
    if 0 < generated < len(columns):
        figure.add_vline(x=generated - 0.5, line={"color": INK, "width": 1.5})
    return figure


def _label(token: str) -> str:
    text = token.strip(" ").replace("\n", "⏎") or "␣"
    return escape(text if len(text) <= 14 else text[:13] + "…", quote=False)  # plotly knows no quotes


def tree_figure(readings: Readings) -> go.Figure:
    """Every concept that was read, and its ancestors by first parents."""
    pack, rows = readings.pack, max(1, len(readings))
    means = {lens: float(readings.of(pack.concepts[lens].id).sum()) / rows for lens in _best(readings)}
    inside = {above for lens in means for above in pack.hierarchy.path(lens)}
    weight = {lens: means.get(lens, 0.0) for lens in inside}
    for lens in sorted(inside, reverse=True):  # children come after their parents
        for parent in pack.hierarchy.parents[lens][:1]:
            weight[parent] += weight[lens]
    order = sorted(inside)
    parents = [pack.hierarchy.parents[lens] for lens in order]
    figure = go.Figure(
        go.Sunburst(
            ids=[str(lens) for lens in order],
            labels=[escape(pack.concepts[lens].name) for lens in order],
            parents=[str(above[0]) if above else "" for above in parents],
            values=[weight[lens] for lens in order],
            customdata=[[means.get(lens, 0.0), escape(pack.concepts[lens].definition)] for lens in order],
            marker={"colors": [means.get(lens, 0.0) for lens in order], "colorscale": _HEAT, "cmin": 0},
            branchvalues="total",
            hovertemplate="<b>%{label}</b><br>mean %{customdata[0]:.3f}<br>%{customdata[1]}<extra></extra>",
        )
    )
    return styled(figure, 560, margin={"l": 8, "r": 8, "t": 8, "b": 8})


def curve_figure(readings: Readings, lenses: Sequence[int]) -> go.Figure:
    """What a probability becomes: noise floor, then calibration."""
    pack, figure = readings.pack, go.Figure()
    said = torch.linspace(0, 1, 201)
    assert pack.calibration is not None
    floor = pack.tensors["floor"] if "floor" in pack.tensors else torch.full((len(pack),), -1.0)
    index = torch.tensor(list(lenses), dtype=torch.long)
    chosen = type(pack.calibration)(*(part[index] for part in pack.calibration))
    curves = calibrate(said[:, None].expand(-1, len(index)), floor[index], chosen)
    for i, lens in enumerate(lenses):
        concept = pack.concepts[lens]
        measured = f" (AUROC {concept.metrics['auroc']:.2f})" if "auroc" in concept.metrics else ""
        name = escape(concept.name) + measured
        hover = f"{name}<br>%{{x:.2f}} → %{{y:.2f}}<extra></extra>"
        line = go.Scatter(x=said.tolist(), y=curves[:, i].tolist(), mode="lines", name=name, hovertemplate=hover)
        figure.add_trace(line)
    styled(figure, 420, margin={"l": 56, "r": 16, "t": 12, "b": 48}, showlegend=True)
    figure.update_xaxes(title={"text": "the lens alone"}, range=[0, 1], gridcolor=GRID, zeroline=False)
    figure.update_yaxes(title={"text": "score"}, range=[0, 1.02], gridcolor=GRID, zeroline=False)
    return figure


def _firings(firings: Sequence[Firing], texts: Sequence[str]) -> str:
    if not firings:
        return "<p>No rule fired.</p>"
    head = "".join(f"<th>{name}</th>" for name in ("rule", "action", "row", "token", "scores"))
    lines = [f"<tr>{head}</tr>"]
    for firing in firings:
        scores = ", ".join(f"{concept} {score:.3f}" for concept, score in firing.scores)
        cells = (firing.rule, firing.action, str(firing.position), repr(texts[firing.position]), scores)
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"
