"""Readings of one text as a page: concepts over tokens, the tree of concepts, what the lenses' scores mean, firings."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import torch

from steerscope.lenses.readings import Firing, Readings
from steerscope.lenses.stack import calibrate
from steerscope.report.colours import SEQUENTIAL, Colours
from steerscope.report.page import Html, div, fill, page, table
from steerscope.report.plots import label, lines_figure, styled, token_figure

_MOST_SHOWN = 24  # concepts in the heat map
_MOST_CURVES = 8


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
        "What the scores mean": _curves(readings, best[:_MOST_CURVES]),
        "Rules": _firings(firings, texts),
    }
    return page(f"What lenses read in {model}", about, sections)


def _curves(readings: Readings, lenses: Sequence[int]) -> str:
    if readings.pack.calibration is None:
        return "<p>This pack has no calibration: the scores are what each lens says alone.</p>"
    said = "<p>From what a lens says alone to the score that is shown, for the strongest concepts.</p>"
    return said + div(curve_figure(readings, lenses), "plot-curves")


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
        details=[" › ".join(pack.path(lens)) for lens in shown],
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


def curve_figure(readings: Readings, lenses: Sequence[int]) -> go.Figure:
    """What a probability becomes: noise floor, then calibration."""
    pack = readings.pack
    said = torch.linspace(0, 1, 201)
    assert pack.calibration is not None
    floor = pack.tensors["floor"] if "floor" in pack.tensors else torch.full((len(pack),), -1.0)
    index = torch.tensor(list(lenses), dtype=torch.long)
    chosen = type(pack.calibration)(*(part[index] for part in pack.calibration))
    scores = calibrate(said[:, None].expand(-1, len(index)), floor[index], chosen)
    curves = {_measured(readings, lens): (said.tolist(), scores[:, i].tolist()) for i, lens in enumerate(lenses)}
    figure = lines_figure(curves, across="the lens alone", up="score", mode="lines")
    figure.update_xaxes(range=[0, 1])
    return figure.update_yaxes(range=[0, 1.02])


def _measured(readings: Readings, lens: int) -> str:
    concept = readings.pack.concepts[lens]
    return concept.name + (f" (AUROC {concept.metrics['auroc']:.2f})" if "auroc" in concept.metrics else "")


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
