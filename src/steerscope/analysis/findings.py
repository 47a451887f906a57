"""Findings in the tables of a pass: ranks of directions, groups, components, and the layers where most happens."""

import re
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pyarrow as pa
from scipy import stats

from steerscope.analysis.results import joined, pivot, where
from steerscope.analysis.statistics import holm
from steerscope.vectors.vector import Json

_COMPONENT = re.compile(r"(?:^|/)pc(\d+)$")


def over_layers(table: pa.Table, measure: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return names, layers, and [names, layers] of a measure; opposites are left out."""
    mine = where(table, "sign", 1) if "sign" in table.column_names else table
    names, layers, values = pivot(mine, "name", "layer", measure)
    return names, np.array(layers, np.int32), values


def ranking(table: pa.Table, measures: Sequence[str]) -> pa.Table:
    """Return every direction by its mean over layers, largest first, with std and maximum over layers."""
    groups = dict(zip(table["name"].to_pylist(), table["group"].to_pylist(), strict=True))
    parts = []
    for measure in measures:
        names, layers, values = over_layers(table, measure)
        order = np.argsort(-values.mean(1), kind="stable")
        parts.append(
            {
                "measure": np.full(len(names), measure, object),
                "rank": np.arange(1, len(names) + 1),
                "name": np.array(names, object)[order],
                "group": np.array([groups[name] for name in names], object)[order],
                "mean": values.mean(1)[order],
                "std": values.std(1)[order],
                "max": values.max(1)[order],
                "max_layer": layers[values.argmax(1)][order],
            }
        )
    return pa.table(joined(parts))


def group_tests(ranked: pa.Table) -> list[Json]:
    """Return Welch's t-test of means over layers between every two groups of directions; p by Holm over all tests.

    A group needs two directions. Where neither group varies (nothing was tuned) there is no test."""
    found: list[dict[str, Json]] = []
    for measure in dict.fromkeys(ranked["measure"].to_pylist()):
        mine = where(ranked, "measure", measure)
        means, groups = mine["mean"].to_numpy(), mine["group"].to_pylist()
        of = {group: means[[one == group for one in groups]] for group in sorted(set(groups))}
        for a, b in combinations([group for group, values in of.items() if len(values) > 1], 2):
            if not (np.ptp(of[a]) or np.ptp(of[b])):
                continue
            t, p = np.array(stats.ttest_ind(of[a], of[b], equal_var=False)).tolist()
            one: dict[str, Json] = {"measure": measure, "a": a, "b": b, "t": t}
            found.append({**one, "mean_a": of[a].mean().item(), "mean_b": of[b].mean().item(), "p": p})
    corrected = holm(np.array([one["p"] for one in found]))
    return [{**one, "p": float(p)} for one, p in zip(found, corrected, strict=True)]


def component_ranks(table: pa.Table, measures: Sequence[str]) -> list[Json]:
    """Return the mean |z| over layers of every component, and p: the share of components with as large a mean.

    Components, not layers, are the cases: what one does in a layer it does in the next."""
    found: list[Json] = []
    for measure in measures:
        names, _, z = over_layers(table, measure)
        numbers = {int(match[1]): i for i, name in enumerate(names) if (match := _COMPONENT.search(name))}
        size = {number: float(np.abs(z[i]).mean()) for number, i in sorted(numbers.items())}
        for number, mean in size.items():
            p = sum(other >= mean for other in size.values()) / len(size)
            found.append({"measure": measure, "component": number, "mean": mean, "p": p})
    return found


def peaks(table: pa.Table, measures: Sequence[str]) -> dict[str, Json]:
    """Return the layer where the mean over directions is largest, for each measure."""
    found: dict[str, Json] = {}
    for measure in measures:
        _, layers, values = over_layers(table, measure)
        found[measure] = int(layers[np.abs(values).mean(0).argmax()])
    return found
