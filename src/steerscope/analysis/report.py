"""All results in a folder as one page. Each kind has a function from its result to sections, heading → HTML.

`comparison_page` shows vectors side by side: heat map of cosines, norms over layers, clusters, agreement of learned and
averaged ones.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import cast

import numpy as np
import plotly.graph_objects as go

from steerscope.analysis import figures
from steerscope.analysis.compare import TOGETHER, Comparison
from steerscope.analysis.figures import layer_name
from steerscope.analysis.results import AnalysisResult, where
from steerscope.report.colours import Colours
from steerscope.report.page import Html, div, fill, page, section, table
from steerscope.report.plots import heat_figure, lines_figure
from steerscope.vectors.files import SUFFIXES

Sections = Mapping[str, str]
_STRONGEST = 3  # cells of a direction
_SHOWN = 10  # rows of a table
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
}


def analysis_page(results: Mapping[str, AnalysisResult]) -> str:
    """Return one page about all results, in the order of `SECTIONS`."""
    sections: dict[str, str] = {}
    for kind, make in SECTIONS.items():
        if kind in results:
            sections |= make(results[kind])
    about = " ".join(str(results[kind].about["summary"]) for kind in SECTIONS if kind in results)
    return page("How directions meet weights", about, sections)


def _records(columns: Mapping[str, str | tuple[str, str]], rows: Iterable[Mapping]) -> Html:
    """Return a table of some fields of records: field → title of its column, or (title, format)."""
    return table(list(columns.values()), ([row.get(field) for field in columns] for row in rows))


# --- directions


def directions(result: AnalysisResult) -> Sections:
    rows = extremes(result)
    layer = rows[0]["layer"] if rows else None
    columns = {"component": "component", "variance": ("share", ".1%"), "chance_high": ("chance", ".1%")}
    ends = "Who lies at the ends" if layer is None else f"Who lies at the ends at layer {layer}"
    return {
        "Components": section(
            "How much of the spread of the vectors each principal component holds. Dotted: what the first component "
            "of random sets of the same lengths reaches (95 % of them stay below). A component near that line means "
            "nothing.",
            div(figures.variance_figure(result), "plot-variance"),
        ),
        ends: section(
            "The vectors with the lowest and the highest scores, the outermost first. Signs agree from layer to layer.",
            _records({**columns, "lowest": "lowest", "highest": "highest"}, rows),
            div(figures.plane_figure(result), "plot-plane"),
        ),
    }


def extremes(result: AnalysisResult, count: int = 4) -> list[dict]:
    """Return every component at the middle layer, with its share and the names at its ends."""
    parts = result.tables["components"].to_pylist()
    layers = list(dict.fromkeys(row["layer"] for row in parts))
    layer = layers[len(layers) // 2]
    scores = [row for row in result.tables["scores"].to_pylist() if row["layer"] == layer]
    found = []
    for part in (row for row in parts if row["layer"] == layer):
        own = sorted((row["score"], row["name"]) for row in scores if row["component"] == part["component"])
        names = [name for _, name in own]
        found.append({**part, "lowest": ", ".join(names[:count]), "highest": ", ".join(names[::-1][:count])})
    return found


def projections(result: AnalysisResult) -> Sections:
    said = (
        "Cosine of a vector with each of the named ones, the strongest on top. In this many dimensions a random "
        "direction stays within a few hundredths of 0; p-values in the table of results are corrected over all cells."
    )
    drawn = div(figures.projection_figure(result), "plot-projections")
    return {"What the vectors mean in named ones": section(said, drawn)}


# --- susceptibility


def susceptibility(result: AnalysisResult) -> Sections:
    z, baseline = _best_z(result)
    least = 1 / (1 + cast("int", result.about["random"]))
    given = {z: ("z, given vectors", "+.1f")} if z != "z" else {}
    sides = {"direction": "direction", "side": "", "counted": "p ≤ 0.05", "z": ("median z", "+.1f")}
    sides |= {field: (f"median {title}", form) for field, (title, form) in given.items()}
    cells = {"direction": "direction", "layer": "layer", "matrix": "matrix", "side": ""}
    cells |= {"alignment": ("alignment", ".3f"), "ratio": ("× chance", ".1f"), "z": ("z", "+.1f"), "p": ("p", ".3f")}
    cells |= given
    return {
        "How much each matrix changed": section(
            "Length of the change over the length of the weights. The embedding stands at the first layer, the head at "
            "the last.",
            div(figures.change_figure(result), "plot-change"),
        ),
        "Along which directions": section(
            "Alignment is the part of a matrix's change that lies along a direction (1: all of it), z says how far "
            "that is from what random directions give, in their standard deviations. p is the chance that a random "
            f"direction reaches as large a z anywhere; with {result.about['random']} of them it is {least:.2g} or "
            "more. First all matrices that read the stream, or write to it; then the three strongest ones of each "
            f"direction; then z {baseline} everywhere.",
            _records(sides, by_side(result)),
            _records(cells, [{**row, "ratio": row["alignment"] / row["chance"]} for row in strongest(result)]),
            div(figures.susceptibility_figure(result, z), "plot-cells"),
        ),
        "Over layers": section(
            "All matrices of a layer together. Grey: |z| below 3. Large dots: peaks.",
            div(figures.peaks_figure(result), "plot-profile"),
        ),
    }


def _best_z(result: AnalysisResult) -> tuple[str, str]:
    """Return the column of z against the better baseline, and its name: vectors that were given share the spread of
    activations with those that are measured, random directions do not."""
    if result.about["against"]:
        return "against_z", "against the vectors that were given for comparison"
    return "z", "against random directions"


def strongest(result: AnalysisResult, count: int = _STRONGEST) -> list[dict]:
    """Return the matrices with the largest z of each direction, directions in the order they were given."""
    cells = result.tables["cells"].sort_by([("z", "descending")])
    names = dict.fromkeys(result.tables["cells"]["direction"].to_pylist())
    return [row for name in names for row in where(cells, "direction", name).slice(0, count).to_pylist()]


def by_side(result: AnalysisResult) -> list[dict]:
    """Return how many matrices that read, and that write, are significant for each direction, and their median z."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in result.tables["cells"].to_pylist():
        found.setdefault((row["direction"], row["side"]), []).append(row)
    sides = []
    for (direction, side), rows in sorted(found.items()):
        n_significant = sum(row["p"] <= _LEVEL for row in rows)
        medians = {key: statistics.median(row[key] for row in rows) for key in ("z", "against_z") if key in rows[0]}
        counts = {"matrices": len(rows), "significant": n_significant, "counted": f"{n_significant} of {len(rows)}"}
        sides.append({"direction": direction, "side": side, **counts, **medians})
    return sides


# --- MLPs and attention


def mlp(result: AnalysisResult) -> Sections:
    z, baseline = _best_z(result)
    said = (
        "Each direction goes through the norm and MLP of every layer. z of the part of the output that lies along it, "
        f"{baseline}: above 0 the layer reinforces it, below 0 it opposes it, more than others. The menu has the "
        "opposite direction, for which an MLP may do something else."
    )
    drawn = div(figures.written_figure(result, f"{z}_parallel"), "plot-mlp-parallel")
    return {"What MLPs make of directions": section(said, drawn), **_passed(result, "MLPs")}


def attention(result: AnalysisResult) -> Sections:
    z, baseline = _best_z(result)
    far = f"at a distance of {result.about['distance']}" if result.about["distance"] else "without RoPE"
    sections = {
        "Which directions look at which": section(
            f"Logits of attention between directions, all heads together, {far}: rows look at columns. z, {baseline}, "
            "is the weaker of two: the column among keys, the row among queries. " + _significant(result, "p"),
            div(figures.pairs_figure(result, z), "plot-pairs"),
        ),
        "Single heads": section(
            "How many of the pairs are beyond |z| = 3 in each head; of random directions 0.27 % are at most. Below, "
            "the most extreme pairs.",
            div(figures.heads_figure(result), "plot-heads"),
            _top(result, z),
        ),
    }
    if result.about["tuned"] is not None:
        sections["Where looking changed"] = section(
            f"The same of the change from one checkpoint to the other. {_significant(result, 'p_change')}",
            div(figures.pairs_figure(result, f"{z}_change"), "plot-pairs-change"),
            _top(result, f"{z}_change"),
        )
    return {**sections, **_passed(result, "attention")}


def _passed(result: AnalysisResult, what: str) -> Sections:
    """Return what both passes have: profiles over layers, ranks of directions, and groups."""
    focus = cast("dict[str, int]", result.about["focus"])
    places = " and ".join(f"layer {layer} ({_MEASURES[name]})" for name, layer in focus.items())
    title = what[:1].upper() + what[1:] + " over layers"
    if result.about["tuned"] is not None:
        title += " between the checkpoints"
    profiles = [
        fill("<h3>{}</h3>{}", _MEASURES[name], div(figures.profile_figure(result, name), f"plot-{result.kind}-{name}"))
        for name in focus
    ]
    said = f"Mean over directions of what the {what} add to the stream, largest at {places}."
    return {
        title: section(said, *profiles),
        f"Directions by what {what} do": section(*_ranks(result), *_groups(result)),
    }


def _ranks(result: AnalysisResult) -> tuple[str, Html]:
    ranked = result.tables["ranking"]
    measure = ranked["measure"][0].as_py()
    rows = where(ranked, "measure", measure).slice(0, _SHOWN).to_pylist()
    columns = {"rank": "rank", "name": "direction", "group": "group"}
    columns |= {name: (name, ".3g") for name in ("mean", "std", "max")} | {"max_layer": "at layer"}
    return f"By the mean over layers of: {_MEASURES[measure]}.", _records(columns, rows)


def _significant(result: AnalysisResult, p: str) -> str:
    found = np.count_nonzero(result.tables["pairs"][p].to_numpy() < _LEVEL)
    count = result.tables["pairs"].num_rows
    return f"{found} of {count} pairs and layers have p < 0.05 after correction for that many (Benjamini and Hochberg)."


def _top(result: AnalysisResult, by: str) -> Html:
    value = "change" if by.endswith("change") else "affinity"
    rows = where(result.tables["top"], "by", by).slice(0, _SHOWN).to_pylist()
    columns = {"layer": "layer", "head": "head", "query": "looks", "key": "at"}
    return _records({**columns, value: (value, "+.2f"), by: ("z", "+.1f")}, rows)


def _groups(result: AnalysisResult) -> tuple[str, ...]:
    tests = cast("list[dict]", result.about["groups"])
    if not tests:
        return ()
    said = (
        f"Groups compared by the means of their directions, the smallest p of {len(tests)} tests first (Welch's "
        "t-test, p corrected by Holm for all of them):"
    )
    smallest = sorted(tests, key=itemgetter("p"))[:_SHOWN]
    columns = {"measure": "measure", "a": "group", "mean_a": ("mean", ".3g"), "b": "group", "mean_b": ("mean", ".3g")}
    columns |= {"t": ("t", "+.2f"), "p": ("p", ".3g")}
    return said, _records(columns, [{**one, "measure": _MEASURES[one["measure"]]} for one in smallest])


SECTIONS: dict[str, Callable[[AnalysisResult], Sections]] = {
    "directions": directions,
    "projections": projections,
    "susceptibility": susceptibility,
    "mlp": mlp,
    "attention": attention,
}


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
