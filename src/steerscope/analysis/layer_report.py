"""Sections of the page about MLPs and attention."""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import cast

import numpy as np
import plotly.graph_objects as go

from steerscope.analysis import layer_plots as plots
from steerscope.analysis.layerwise import where
from steerscope.analysis.results import Result
from steerscope.report.page import div, table

_SHOWN = 10
_LEVEL = 0.05  # of p
_MEASURES = {
    "change": "length of the change",
    "turn": "1 − cosine of before and after",
    "norm": "length of what is written",
    "parallel": "part along the direction",
    "self": "affinity for itself",
    "write": "what is written along it",
    "change_self": "change of the affinity for itself",
    "change_write": "change of what is written along it",
    "z_parallel": "part along the direction",
    "z_norm": "length of what is written",
    "z_self": "affinity for itself",
    "z_write": "what is written along it",
}


def mlp(result: Result) -> Mapping[str, str]:
    heading = "What MLPs make of directions"
    return {
        heading: "<p>Each direction goes through the norm and MLP of every layer. z of the part "
        "of the output that lies along it, against random directions: above 0 the layer reinforces it, below 0 it "
        "opposes it, more than others. The menu has the opposite direction, for which an MLP may do something else."
        f"</p>{div(plots.written_figure(result, 'z_parallel'), 'plot-mlp-parallel')}",
        **_given(result, heading, plots.written_figure, "against_z_parallel"),
        **_passed(result, "MLPs"),
    }


def given(vectors: str, drawn: str) -> str:
    """Return a plot of z against vectors that were given, and what it says."""
    return (
        f"<p>The same z, not against random directions but against {vectors}. Where those were made of similar data, "
        f"they share the spread of activations, and what still stands out is more than that.</p>{drawn}"
    )


def _given(result: Result, heading: str, figure: Callable[[Result, str], go.Figure], z: str) -> Mapping[str, str]:
    if not result.about.get("against"):
        return {}
    drawn = div(figure(result, z), f"plot-{result.kind}-against")
    return {f"{heading}, against the vectors given": given("vectors that were given and their opposites", drawn)}


def attention(result: Result) -> Mapping[str, str]:
    tuned = result.about["tuned"] is not None
    heading = "Which directions look at which"
    far = f"at a distance of {result.about['distance']}" if result.about["distance"] else "without RoPE"
    sections = {
        heading: f"<p>Logits of attention between directions, all heads together, {far}: "
        "rows look at columns. z is the weaker of two: the column among random keys, the row among random queries. "
        f"{_significant(result, 'p')}</p>{div(plots.pairs_figure(result, 'z'), 'plot-pairs')}",
        **_given(result, heading, plots.pairs_figure, "against_z"),
        "Single heads": "<p>How many of the pairs are beyond |z| = 3 in each head; of random directions 0.27 % are at "
        f"most. Below, the most extreme pairs.</p>{div(plots.heads_figure(result), 'plot-heads')}{_top(result, 'z')}",
        "Directions that keep themselves": "<p>z of each direction's affinity for itself, and of what a token writes "
        "along it when all heads look at a token that has it; all heads together, among random directions. "
        f"{self_significance(result)}</p>" + div(plots.own_figure(result), "plot-own"),
    }
    if tuned:
        sections["Where looking changed"] = (
            f"<p>The same of the change from one checkpoint to the other. {_significant(result, 'p_change')}</p>"
            f"{div(plots.pairs_figure(result, 'z_change'), 'plot-pairs-change')}{_top(result, 'z_change')}"
        )
    return {**sections, **_passed(result, "attention")}


def _passed(result: Result, what: str) -> Mapping[str, str]:
    """What both passes have: profiles over layers, ranks of directions, groups and components."""
    tuned, focus = result.about["tuned"] is not None, cast("dict[str, int]", result.about["focus"])
    first, second = focus
    places = f"largest at layer {focus[first]} ({_MEASURES[first]}) and layer {focus[second]} ({_MEASURES[second]})"
    said = f"<p>Mean over directions of what the {what} add to the stream, {places}.</p>"
    drawn = "".join(
        f"<h3>{_MEASURES[name]}</h3>{div(plots.profile_figure(result, name), f'plot-{result.kind}-{name}')}"
        for name in focus
    )
    ranked = result.tables["ranking"]
    measure = ranked["measure"][0].as_py()
    rows = where(ranked, "measure", measure).slice(0, _SHOWN).to_pylist()
    ranks = f"<p>By the mean over layers of: {_MEASURES[measure]}.</p>"
    head = ("rank", "direction", "group", ("mean", ".3g"), ("std", ".3g"), ("max", ".3g"), "at layer")
    ranks += table(head, map(itemgetter("rank", "name", "group", "mean", "std", "max", "max_layer"), rows))
    sections = {
        f"{what[:1].upper()}{what[1:]} over layers{' between the checkpoints' if tuned else ''}": said + drawn,
        f"Directions by what {what} do": ranks + _groups(result),
    }
    if result.about["components"]:
        sections[f"Is the first component special for {what}?"] = _components(result)
    return sections


def _significant(result: Result, p: str) -> str:
    found = np.count_nonzero(result.tables["pairs"][p].to_numpy() < 0.05)
    count = result.tables["pairs"].num_rows
    return f"{found} of {count} pairs and layers have p < 0.05 after correction for that many (Benjamini and Hochberg)."


def self_significance(result: Result) -> str:
    """How many directions with themselves are significant, and how many could be."""
    pairs, known = result.tables["pairs"], cast("dict[str, float]", result.about.get("self_p"))
    if not known:  # results of an older version
        return ""
    own = [row for row in pairs.to_pylist() if row["query"] == row["key"]]
    columns = [name for name in ("p", "p_change") if name in pairs.schema.names]
    found = {name: sum(row[name] < _LEVEL for row in own) for name in columns}
    changed = f" ({found['p_change']} of the change)" if "p_change" in found else ""
    said = (
        f"{found['p']} of {known['tests']} directions and layers{changed} have p < {_LEVEL} for themselves after "
        "correction. With "
        f"{result.about['random']} random directions a p is {known['least']:.2g} or more before correction"
    )
    if known["least_corrected"] < _LEVEL:
        return f"{said} and {known['least_corrected']:.2g} or more after it."
    return (
        f"{said}: a single direction cannot get below {known['least_corrected']:.2g} after it, only "
        f"{known['together']} of them together below {_LEVEL}. For single ones take --random {known['random_needed']}."
    )


def _top(result: Result, by: str) -> str:
    value = "affinity" if by == "z" else "change"
    rows = where(result.tables["top"], "by", by).slice(0, _SHOWN).to_pylist()
    head = ("layer", "head", "looks", "at", (value, "+.2f"), ("z", "+.1f"))
    return table(head, map(itemgetter("layer", "head", "query", "key", value, by), rows))


def _groups(result: Result) -> str:
    tests = cast("list[dict]", result.about["groups"])
    if not tests:
        return ""
    said = (
        f"<p>Groups compared by the means of their directions, the smallest p of {len(tests)} tests first (Welch's "
        "t-test, p corrected by Holm for all of them):</p>"
    )
    smallest = sorted(tests, key=itemgetter("p"))[:_SHOWN]
    head = ("measure", "group", ("mean", ".3g"), "group", ("mean", ".3g"), ("t", "+.2f"), ("p", ".3g"))
    values = map(itemgetter("a", "mean_a", "b", "mean_b", "t", "p"), smallest)
    return said + table(head, [(_MEASURES[t["measure"]], *row) for t, row in zip(smallest, values, strict=True)])


def _components(result: Result) -> str:
    ones = cast("list[dict]", result.about["components"])
    numbers = {one["component"] for one in ones}
    first = [
        f"{_MEASURES[one['measure']]}: mean |z| {one['mean']:.2f}, and {one['p']:.0%} of the components have as much"
        for one in ones
        if one["component"] == min(numbers)
    ]
    least = f"Of {len(numbers)} components no share is below {1 / len(numbers):.0%}."
    drawn = div(plots.components_figure(result), f"plot-{result.kind}-pc")
    return f"<p>The first one: {'; '.join(first)}. {least}</p>{drawn}"
