"""What the passes through MLPs and attention share: directions put in, what comes out along them, random baselines.

Every direction goes in at a length of √hidden (root mean square 1): the norm in front of an MLP or attention takes the
length away, and at this one its epsilon does not count. The opposite of each direction goes in, too, and so do random
directions and those given to compare with, against which every measure gets a z-score by its rank among them.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pyarrow as pa
import torch
from scipy import stats
from scipy.special import ndtri
from torch import Tensor

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.statistics import holm
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.vectors.vector import Json

FEWEST_RANDOM, FEWEST_GIVEN = 100, 8
_COMPONENT = re.compile(r"(?:^|/)pc(\d+)$")
Progress = Callable[[str, int, int], None]
Columns = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Inputs:
    """`rows` at root mean square 1: n named directions, their opposites, `drawn` random ones, then those given to
    compare with and their opposites: which side of exchanged labels is positive means nothing."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    rows: Tensor
    drawn: int

    @classmethod
    def of(
        cls, directions: Directions, layer: int, random: int, seed: int, against: Directions | None = None
    ) -> "Inputs":
        """Directions of one layer; the random ones are the same for all layers."""
        named = torch.from_numpy(directions.at(layer))
        drawn = torch.randn(random, named.shape[1], generator=torch.Generator().manual_seed(seed))
        given = torch.from_numpy(against.at(layer)) if against else named[:0]
        names = [*directions.names, *(against.names if against else ())]
        zero = [name for name, row in zip(names, torch.cat([named, given]), strict=True) if not row.any()]
        if zero:
            what = f"zero at layer {layer}: {', '.join(zero)}"
            raise InvalidRequest([Problem("directions", what, "leave them out")])
        whole = torch.cat([named, -named, drawn, given, -given])
        rows = torch.nn.functional.normalize(whole, dim=1) * whole.shape[1] ** 0.5
        return cls(directions.names, directions.groups, rows, random)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def units(self) -> Tensor:
        return self.rows / self.rows.shape[1] ** 0.5

    @property
    def named(self) -> Tensor:
        return self.rows[: len(self)]

    @property
    def opposite(self) -> Tensor:
        return self.rows[len(self) : 2 * len(self)]

    @property
    def others(self) -> Tensor:
        return self.rows[2 * len(self) :]

    @property
    def baselines(self) -> dict[str, slice]:
        """What columns of z begin with, and the part of `others` that z is against."""
        found = {"": slice(0, self.drawn), "against_": slice(self.drawn, None)}
        return found if len(self.others) > self.drawn else {"": found[""]}


def checked_layers(
    base: Checkpoint,
    tuned: Checkpoint | None,
    directions: Directions,
    layer: int | None,
    random: int,
    against: Directions | None = None,
    fewest: int = FEWEST_RANDOM,
) -> list[int]:
    """The layers to go through: those all directions have, or all where directions of one `layer` go everywhere."""
    problems = []
    if tuned and (tuned.layers, tuned.hidden) != (base.layers, base.hidden):
        what = f"has {tuned.layers} layers of {tuned.hidden} against {base.layers} of {base.hidden} in {base.name}"
        problems.append(Problem("tuned", f"{tuned.name} {what}", "give two checkpoints of one model"))
    if tuned and tuned.path == base.path:
        problems.append(Problem("tuned", f"{tuned.name} is the base itself", "give the checkpoint after training"))
    every = {"directions": directions} if against is None else {"directions": directions, "against": against}
    for name, found in every.items():
        if found.hidden != base.hidden:
            what = f"have {found.hidden} numbers, {base.name} has {base.hidden}"
            problems.append(Problem(name, what, "make them with this model"))
        if layer is not None and not found.has(layer):
            problems.append(Problem(name, f"have no layer {layer}", f"they have {', '.join(map(str, found.layers))}"))
    if random < fewest:
        problems.append(Problem("random", f"{random} are too few for a baseline", f"take {fewest} or more"))
    if against is not None and len(against.names) < FEWEST_GIVEN:
        what = f"{len(against.names)} are too few for a baseline"
        problems.append(Problem("against", what, f"give {FEWEST_GIVEN} or more"))
    layers = [i for i in range(base.layers) if layer is not None or all(one.has(i) for one in every.values())]
    if not layers:
        problems.append(Problem("directions", f"have no layer of {base.name}", f"it has 0-{base.layers - 1}"))
    if problems:
        raise InvalidRequest(problems)
    return layers


def about(
    what: str,
    base: Checkpoint,
    tuned: Checkpoint | None,
    directions: Directions,
    against: Directions | None,
    **options: int | None,
) -> dict[str, Json]:
    second = f", and of {tuned.name}" if tuned else ""
    summary = f"{len(directions.names)} directions through the {what} of {base.name}{second}."
    given = len(against.names) if against else 0
    return {"summary": summary, "base": base.name, "tuned": tuned.name if tuned else None, "against": given, **options}


def z_by_rank(values: Tensor, baseline: Tensor) -> Tensor:
    """Normal scores of values [..., m] among a baseline [..., r]; beyond its ends, standard deviations are added.

    Forms such as ⟨v, Mv⟩ have heavy tails where few dimensions dominate: (x − mean) / std calls 2-3 % of random
    directions extreme (|z| > 3) in some layers of real models, ranks call 0.3 % so whatever the shape is.
    """
    count = baseline.shape[-1]
    scores = torch.as_tensor(ndtri((np.arange(count) + 0.5) / count), dtype=torch.float32, device=values.device)
    null = baseline.sort(-1).values.contiguous()
    right = torch.searchsorted(null, values.contiguous()).clamp(1, count - 1)
    low, high = null.gather(-1, right - 1), null.gather(-1, right)
    share = ((values - low) / (high - low).clamp_min(torch.finfo(null.dtype).tiny)).clamp(0, 1)
    inside = scores[right - 1] + (scores[right] - scores[right - 1]) * share
    spread = null.std(-1, keepdim=True)
    out = (values - null[..., -1:]).clamp_min(0) + (values - null[..., :1]).clamp_max(0)
    # No spread: nothing differs between directions, as in a layer that was not tuned.
    return torch.where(spread > 0, inside + out / spread.clamp_min(torch.finfo(null.dtype).tiny), 0.0)


def p_by_rank(values: Tensor, baseline: Tensor) -> Tensor:
    """Two-sided p of values [m] among a baseline [r], by counting: never below 2 / (r + 1), whatever the tails are."""
    above, below = ((order(baseline, values[:, None])).sum(1) for order in (torch.ge, torch.le))
    return (2 * (1 + torch.minimum(above, below)) / (1 + len(baseline))).clamp_max(1)


def least_p(tests: int, random: int, level: float = 0.05) -> dict[str, Json]:
    """How small `p_by_rank` can be against `random` directions: of one test, and of one among `tests` after correction
    (Benjamini and Hochberg); how many tests must reach the former together to be below `level`, and how many random
    directions let a single one be."""
    least = 2 / (random + 1)
    return {
        "tests": tests,
        "least": least,
        "least_corrected": min(1.0, least * tests),
        "together": math.floor(least * tests / level) + 1,
        "random_needed": math.ceil(2 * tests / level),
    }


def along(units: Tensor, out: Tensor, tuned: Tensor | None = None) -> dict[str, Tensor]:
    """What is written for each unit direction: its length and its parts along and across the direction.

    With the output of a tuned checkpoint: `change` is the length of the difference, `turn` 1 − cosine of the two."""
    parallel = (out * units).sum(-1)
    norm = out.norm(dim=-1)
    found = {
        "norm": norm,
        "parallel": parallel,
        "orthogonal": (out - parallel.unsqueeze(-1) * units).norm(dim=-1),
        "cosine": parallel / norm.clamp_min(torch.finfo(norm.dtype).tiny),
    }
    if tuned is not None:
        found["change"] = (tuned - out).norm(dim=-1)
        found["turn"] = 1 - torch.nn.functional.cosine_similarity(tuned.double(), out.double(), dim=-1).float()
        found["change_parallel"] = ((tuned - out) * units).sum(-1)
    return found


def written(inputs: Inputs, layer: int, outs: Sequence[Tensor]) -> Columns:
    """Rows of a table: `along` of every named direction and its opposite (sign −1), with z-scores."""
    n = len(inputs)
    measures = along(inputs.units.to(outs[0].device), outs[0], outs[1] if len(outs) > 1 else None)
    columns: Columns = {
        "layer": np.full(2 * n, layer, np.int32),
        "name": np.array([*inputs.names, *inputs.names], object),
        "group": np.array([*inputs.groups, *inputs.groups], object),
        "sign": np.repeat(np.array([1, -1], np.int8), n),
    }
    for name, values in measures.items():
        columns[name] = values[: 2 * n].cpu().numpy()
        for prefix, part in inputs.baselines.items():
            columns[f"{prefix}z_{name}"] = z_by_rank(values[: 2 * n], values[2 * n :][part]).cpu().numpy()
    return columns


def table_of(parts: Sequence[Columns]) -> pa.Table:
    return pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def where(table: pa.Table, column: str, value: object) -> pa.Table:
    """The rows of a table that have this value."""
    return table.filter(pa.array(table[column].to_numpy(zero_copy_only=False) == value))


def grid(table: pa.Table, measure: str, sign: int = 1) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, layers, and [names, layers] of a measure; where opposites are in the table, of one sign."""
    mine = where(table, "sign", sign) if "sign" in table.column_names else table
    layers = np.unique(mine["layer"].to_numpy())
    names = list(dict.fromkeys(mine["name"].to_pylist()))
    return names, layers, mine[measure].to_numpy().reshape(len(layers), len(names)).T


def ranking(table: pa.Table, measures: Sequence[str]) -> pa.Table:
    """Every direction by its mean over layers, largest first; std and maximum over layers, and where that is."""
    groups = dict(zip(table["name"].to_pylist(), table["group"].to_pylist(), strict=True))
    parts = []
    for measure in measures:
        names, layers, values = grid(table, measure)
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
    return table_of(parts)


def group_tests(ranked: pa.Table) -> list[Json]:
    """Welch's t-test of means over layers between every two groups of at least two directions; p by Holm over all.

    Where neither group varies (nothing was tuned) there is no test."""
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
    """Is pc1 special? Mean |z| over layers of every component, and the share of components that have as large a one.

    Components, not layers, are the cases: what one does in a layer it does in the next, so that share is p."""
    found: list[Json] = []
    for measure in measures:
        names, _, z = grid(table, measure)
        numbers = {int(match[1]): i for i, name in enumerate(names) if (match := _COMPONENT.search(name))}
        size = {number: float(np.abs(z[i]).mean()) for number, i in sorted(numbers.items())}
        for number, mean in size.items():
            p = sum(other >= mean for other in size.values()) / len(size)
            found.append({"measure": measure, "component": number, "mean": mean, "p": p})
    return found


def peaks(table: pa.Table, measures: Sequence[str]) -> dict[str, Json]:
    """The layer where the mean over directions is largest, for each measure."""
    found: dict[str, Json] = {}
    for measure in measures:
        _, layers, values = grid(table, measure)
        found[measure] = int(layers[np.abs(values).mean(0).argmax()])
    return found
