"""Readings of one text as a page: concepts over tokens, the tree of concepts, firings."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from steerscope.lenses.pack import Pack
from steerscope.lenses.readings import Firing, Readings
from steerscope.report.colours import SEQUENTIAL, Colours
from steerscope.report.page import Html, div, fill, page, table
from steerscope.report.plots import label, styled, token_figure

_MOST_SHOWN = 24  # concepts in the heat map


def html_report(
    readings: Readings, texts: Sequence[str], firings: Sequence[Firing], *, prompt_length: int, model: str
) -> str:
    """Return the page; `texts` are those of all tokens, prompt and generated."""
    pack = readings.pack
    best = _best(readings)
    rows = f"{len(readings)} rows of {model}"
    about = f"{rows}, read by {len(pack)} lenses of {pack.info.name} at layer {pack.info.layer}."
    heat = div(heat_figure(readings, texts, best, prompt_length), "plot-heat", max(700, 19 * len(readings)))
    over = f"""<p>How strongly each concept shows in the row of each token. White: not among the top
{readings.values.shape[1]} of that row. The line is where the prompt ends.</p>"""
    tree = "<p>Concepts that were read, under their parents. Size and colour: mean over all rows.</p>"
    prompt = "".join(texts[:prompt_length])
    generated = "".join(texts[prompt_length:])
    sections = {
        "Text": fill('<p class="text">{}<b>{}</b></p>', prompt, generated),
        "Concepts over tokens": over + heat,
        "Tree": tree + div(tree_figure(readings), "plot-tree"),
        "Rules": _firings(firings, texts),
    }
    return page(f"What lenses read in {model}", about, sections)


def _best(readings: Readings) -> list[int]:
    """Return lenses by the sum of their scores, best first."""
    total = np.zeros(len(readings.pack))
    said = readings.indices >= 0
    np.add.at(total, readings.indices[said], readings.values[said])
    order = np.argsort(-total, kind="stable")
    return [int(lens) for lens in order if total[lens] > 0]


def heat_figure(readings: Readings, texts: Sequence[str], best: Sequence[int], prompt_length: int) -> go.Figure:
    """Tokens from left to right, concepts from top to bottom."""
    pack = readings.pack
    shown = list(best[:_MOST_SHOWN])
    values = np.array([readings.of(pack.concepts[lens].id) for lens in shown]).reshape(len(shown), len(readings))
    return token_figure(
        values,
        [pack.concepts[lens].name for lens in shown],
        [texts[int(at)] for at in readings.positions],
        colours=Colours.of(values, signed=False, least=1.0),
        hover="%{z:.3f}",
        answer_start=int((readings.positions < prompt_length).sum()),
        details=[_measured(pack, lens) for lens in shown],
    )


def tree_figure(readings: Readings) -> go.Figure:
    """Every concept that was read, and its ancestors by first parents."""
    pack = readings.pack
    rows = max(1, len(readings))
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
            labels=[label(pack.concepts[lens].name) for lens in order],
            parents=[str(above[0]) if above else "" for above in parents],
            values=[weight[lens] for lens in order],
            customdata=[[means.get(lens, 0.0), label(pack.concepts[lens].definition)] for lens in order],
            marker={"colors": [means.get(lens, 0.0) for lens in order], "colorscale": SEQUENTIAL, "cmin": 0},
            branchvalues="total",
            hovertemplate="<b>%{label}</b><br>mean %{customdata[0]:.3f}<br>%{customdata[1]}<extra></extra>",
        )
    )
    return styled(figure, 560, margin={"l": 8, "r": 8, "t": 8, "b": 8})


def _measured(pack: Pack, lens: int) -> str:
    """Return the path of a concept, and how well its lens separates held-out rows."""
    metrics = pack.concepts[lens].metrics
    auroc = f" (AUROC {metrics['auroc']:.2f})" if "auroc" in metrics else ""
    return " › ".join(pack.path(lens)) + auroc


def _firings(firings: Sequence[Firing], texts: Sequence[str]) -> str:
    rows = [
        (
            one.rule,
            one.action,
            one.position,
            repr(texts[one.position]),
            ", ".join(f"{c} {s:.3f}" for c, s in one.scores),
        )
        for one in firings
    ]
    return table(("rule", "action", "row", "token", "scores"), rows) if rows else Html("<p>No rule fired.</p>")
