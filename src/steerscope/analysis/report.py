"""All results in a folder as one page. Each kind has a function from its result to sections, heading → HTML."""

import statistics
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import cast

from steerscope.analysis import plots
from steerscope.analysis.layer_report import attention, given, mlp
from steerscope.analysis.results import Result
from steerscope.report.page import div, page, table

Sections = Mapping[str, str]
_SHOWN, _LEVEL = 3, 0.05  # cells of a direction; of p


def analysis_page(results: Mapping[str, Result]) -> str:
    """Sections in the order of `SECTIONS`; the functions that make them escape what others wrote."""
    sections: dict[str, str] = {}
    for kind, make in SECTIONS.items():
        if kind in results:
            sections |= make(results[kind])
    about = " ".join(str(results[kind].about["summary"]) for kind in SECTIONS if kind in results)
    return page("How directions meet weights", about, sections)


def directions(result: Result) -> Sections:
    rows = extremes(result)
    layer = rows[0]["layer"] if rows else None
    head = ("component", ("share", ".1%"), ("chance", ".1%"), "lowest", "highest")
    listed = map(itemgetter("component", "variance", "chance_high", "lowest", "highest"), rows)
    where = "" if layer is None else f" at layer {layer}"
    return {
        "Components": "<p>How much of the spread of the vectors each principal component holds. Dotted: what the first "
        "component of random sets of the same lengths reaches (95 % of them stay below). A component near that line "
        f"means nothing.</p>{div(plots.variance_figure(result), 'plot-variance')}",
        f"Who lies at the ends{where}": "<p>The vectors with the lowest and the highest scores, the outermost first. "
        "Signs agree from layer to layer.</p>" + table(head, listed) + div(plots.plane_figure(result), "plot-plane"),
    }


def extremes(result: Result, count: int = 4) -> list[dict]:
    """Every component at the middle layer, with its share and the names at its ends."""
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


def projections(result: Result) -> Sections:
    said = (
        "<p>Cosine of a vector with each of the named ones, the strongest on top. In this many dimensions a random "
        "direction stays within a few hundredths of 0; p-values in the table of results are corrected over all "
        "cells.</p>"
    )
    return {"What the vectors mean in named ones": said + div(plots.projection_figure(result), "plot-projections")}


def susceptibility(result: Result) -> Sections:
    best = strongest(result)
    against = "against_z" in best[0]
    more = [("z, given vectors", "+.1f")] if against else []
    head = ("direction", "layer", "matrix", "", ("alignment", ".3f"), ("× chance", ".1f"), ("z", "+.1f"), ("p", ".3f"))
    place = itemgetter("direction", "layer", "matrix", "side")
    rows = [
        (*place(row), row["alignment"], row["alignment"] / row["chance"], row["z"], row["p"], row.get("against_z"))
        for row in best
    ]
    sides_head = ("direction", "", "p ≤ 0.05", ("median z", "+.1f"))
    sides = [
        (row["direction"], row["side"], f"{row['significant']} of {row['matrices']}", row["z"], row.get("against_z"))
        for row in by_side(result)
    ]
    said = (
        "<p>Alignment is the part of a matrix's change that lies along a direction (1: all of it), z says how far that "
        "is from what random directions give, in their standard deviations. p is the chance that a random direction "
        f"reaches as large a z anywhere; with {result.about['random']} of them it is {_least(result):.2g} or more. "
        "First all matrices that read the stream, or write to it; then the three "
        "strongest ones of each direction.</p>"
    )
    found = {
        "How much each matrix changed": "<p>Length of the change over the length of the weights. The embedding stands "
        f"at the first layer, the head at the last.</p>{div(plots.change_figure(result), 'plot-change')}",
        "Along which directions": said
        + table((*sides_head, *(("median z, given vectors", form) for _, form in more)), sides)
        + f"{table((*head, *more), rows)}{div(plots.susceptibility_figure(result), 'plot-cells')}",
        "Over layers": "<p>All matrices of a layer together. Grey: |z| below 3. Large dots: peaks.</p>"
        + div(plots.profile_figure(result), "plot-profile"),
    }
    if against:
        drawn = div(plots.susceptibility_figure(result, "against_z"), "plot-against")
        found["Against the vectors given for that"] = given("vectors that were given", drawn)
    return found


def _least(result: Result) -> float:
    """The least p that counting random directions can give."""
    return 1 / (1 + cast("int", result.about["random"]))


def strongest(result: Result, count: int = _SHOWN) -> list[dict]:
    """Of each direction the matrices with the largest z, directions in the order they were given."""
    cells = result.tables["cells"]
    rows = cells.sort_by([("z", "descending")]).to_pylist()
    names = dict.fromkeys(cells.column("direction").to_pylist())
    return [row for name in names for row in [one for one in rows if one["direction"] == name][:count]]


def by_side(result: Result) -> list[dict]:
    """Of each direction, the matrices that read and those that write: how many are significant, and their median z."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in result.tables["cells"].to_pylist():
        found.setdefault((row["direction"], row["side"]), []).append(row)
    return [
        {
            "direction": direction,
            "side": side,
            "matrices": len(rows),
            "significant": sum(row["p"] <= _LEVEL for row in rows),
            **{key: statistics.median(row[key] for row in rows) for key in ("z", "against_z") if key in rows[0]},
        }
        for (direction, side), rows in sorted(found.items())
    ]


SECTIONS: dict[str, Callable[[Result], Sections]] = {
    "directions": directions,
    "projections": projections,
    "susceptibility": susceptibility,
    "mlp": mlp,
    "attention": attention,
}
