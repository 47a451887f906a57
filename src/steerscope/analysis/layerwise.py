"""Passes of directions through layers: what goes in, what comes out along it, random baselines, findings over layers.

Every direction goes in at a length of √hidden (root mean square 1): the norm in front of an MLP or attention takes the
length away, and at this one its epsilon does not count. The opposite of each direction goes in, too, and so do random
directions and those given to compare with, against which every measure gets a z-score by its rank among them.

The MLP pass is here. What the MLP adds to the stream is split into its part along the direction (positive: the layer
reinforces it) and across it. Between two checkpoints the absolute (L2) and angular (1 − cosine) changes are measured,
and the layers where they are largest come out as focus layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from scipy import stats
from scipy.special import ndtri
from torch import Tensor

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.onelayer import OneLayer
from steerscope.analysis.results import AnalysisResult, long_table, pivot, where
from steerscope.analysis.statistics import holm
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.vectors.vector import Json

FEWEST_RANDOM = 100
FEWEST_GIVEN = 8
Progress = Callable[[str, int, int], None]
T = TypeVar("T")


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
        """Return the inputs of one layer; the random directions are the same for all layers."""
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
        """Return the prefix of columns of z → the part of `others` that serves as baseline."""
        found = {"": slice(0, self.drawn), "against_": slice(self.drawn, None)}
        return found if len(self.others) > self.drawn else {"": found[""]}


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerPass:
    """A pass of directions through the layers of a checkpoint, or of two."""

    base: Checkpoint
    directions: Directions
    tuned: Checkpoint | None
    layer: int | None = None  # directions of this layer go through all layers, not each through its own
    random: int = 1024  # number of random directions for the baseline
    against: Directions | None = None  # directions for a second baseline
    seed: int = 0
    device: str = "cpu"
    progress: Progress | None = None

    def checked_layers(self, fewest: int = FEWEST_RANDOM) -> list[int]:
        """Return the layers of the pass: those all directions have, or all if directions of one `layer` go through."""
        base = self.base
        tuned = self.tuned
        layer = self.layer
        sets = {"directions": self.directions} | ({"against": self.against} if self.against else {})
        problems = []
        if tuned and (tuned.layers, tuned.hidden) != (base.layers, base.hidden):
            what = f"has {tuned.layers} layers of {tuned.hidden} against {base.layers} of {base.hidden} in {base.name}"
            problems.append(Problem("tuned", f"{tuned.name} {what}", "give two checkpoints of one model"))
        if tuned and tuned.path == base.path:
            problems.append(Problem("tuned", f"{tuned.name} is the base itself", "give the checkpoint after training"))
        for name, found in sets.items():
            if found.hidden != base.hidden:
                what = f"have {found.hidden} numbers, {base.name} has {base.hidden}"
                problems.append(Problem(name, what, "make them with this model"))
            if layer is not None and not found.has(layer):
                known = ", ".join(map(str, found.layers))
                problems.append(Problem(name, f"have no layer {layer}", f"they have {known}"))
        counts = [("random", self.random, fewest, "take")]
        counts += [("against", len(self.against.names), FEWEST_GIVEN, "give")] if self.against else []
        for name, count, least, verb in counts:
            if count < least:
                problems.append(Problem(name, f"{count} are too few for a baseline", f"{verb} {least} or more"))
        layers = [i for i in range(base.layers) if layer is not None or all(one.has(i) for one in sets.values())]
        if not layers:
            problems.append(Problem("directions", f"have no layer of {base.name}", f"it has 0-{base.layers - 1}"))
        if problems:
            raise InvalidRequest(problems)
        return layers

    @property
    def about(self) -> dict[str, Json]:
        return {
            "base": self.base.name,
            "tuned": self.tuned.name if self.tuned else None,
            "against": len(self.against.names) if self.against else 0,
            "layer": self.layer,
            "random": self.random,
            "seed": self.seed,
        }

    def layers(self, what: str, measure: Callable[[OneLayer, Inputs], T]) -> Iterator[tuple[int, Inputs, list[T]]]:
        """Yield the number and the inputs of every layer, and what `measure` finds in each checkpoint."""
        layers = self.checked_layers()
        models = [OneLayer(checkpoint, self.device) for checkpoint in (self.base, self.tuned) if checkpoint]
        for done, number in enumerate(layers, 1):
            source = number if self.layer is None else self.layer
            inputs = Inputs.of(self.directions, source, self.random, self.seed, self.against)
            found = []
            for model in models:
                with model.at(number):
                    found.append(measure(model, inputs))
            yield number, inputs, found
            if self.progress:
                self.progress(what, done, len(layers))

    def result(
        self,
        kind: str,
        what: str,
        tables: Mapping[str, pa.Table],
        measured: pa.Table,
        ranked: Sequence[str],
        **more: Json,
    ) -> AnalysisResult:
        """Return the tables, a ranking of directions by the columns `ranked` of `measured`, and what is found there."""
        second = f", and of {self.tuned.name}" if self.tuned else ""
        ranks = ranking(measured, ranked)
        found: dict[str, Json] = {
            "summary": f"{len(self.directions.names)} directions through the {what} of {self.base.name}{second}.",
            "focus": peaks(tables["written"], ("change", "turn") if self.tuned else ("norm", "parallel")),
            "groups": group_tests(ranks),
        }
        return AnalysisResult(kind, self.about | found | more, {**tables, "ranking": ranks})


def mlp_pass(
    base: Checkpoint, directions: Directions, tuned: Checkpoint | None = None, **options: Any
) -> AnalysisResult:
    """Return the tables `written` (layer, direction, sign) and `ranking` (direction).

    Directions of layer i go through layer i, or those of `layer` through all. z is against `random` random directions,
    and against those of `against`, if given; see `LayerPass` for all options.
    """
    run = LayerPass(base=base, directions=directions, tuned=tuned, **options)
    layers = run.layers("MLP", lambda model, inputs: model.mlp(inputs.rows))
    table = pa.concat_tables([written(inputs, number, outs) for number, inputs, outs in layers])
    ranked = ("change", "turn", "parallel", "norm") if tuned else ("parallel", "norm")
    return run.result("mlp", "MLPs", {"written": table}, table, ranked)


# --- measures


def z_by_rank(values: Tensor, baseline: Tensor) -> Tensor:
    """Return normal scores of values [..., m] among a baseline [..., r]; beyond its ends, in standard deviations.

    Forms such as ⟨v, Mv⟩ have heavy tails where few dimensions dominate: (x − mean) / std calls 2-3 % of random
    directions extreme (|z| > 3) in some layers of real models, ranks call 0.3 % so whatever the shape is.
    """
    count = baseline.shape[-1]
    scores = torch.as_tensor(ndtri((np.arange(count) + 0.5) / count), dtype=torch.float32, device=values.device)
    null = baseline.sort(-1).values.contiguous()
    right = torch.searchsorted(null, values.contiguous()).clamp(1, count - 1)
    low = null.gather(-1, right - 1)
    high = null.gather(-1, right)
    share = ((values - low) / (high - low).clamp_min(torch.finfo(null.dtype).tiny)).clamp(0, 1)
    inside = scores[right - 1] + (scores[right] - scores[right - 1]) * share
    spread = null.std(-1, keepdim=True)
    out = (values - null[..., -1:]).clamp_min(0) + (values - null[..., :1]).clamp_max(0)
    # No spread: nothing differs between directions, as in a layer that was not tuned.
    return torch.where(spread > 0, inside + out / spread.clamp_min(torch.finfo(null.dtype).tiny), 0.0)


def p_by_rank(values: Tensor, baseline: Tensor) -> Tensor:
    """Return two-sided p of values [m] among a baseline [r], by counting; it is 2 / (r + 1) or more for any tails."""
    above, below = ((order(baseline, values[:, None])).sum(1) for order in (torch.ge, torch.le))
    return (2 * (1 + torch.minimum(above, below)) / (1 + len(baseline))).clamp_max(1)


def along(units: Tensor, out: Tensor, tuned: Tensor | None = None) -> dict[str, Tensor]:
    """Return what is written for each unit direction: its length and its parts along and across the direction.

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


def with_z(inputs: Inputs, name: str, values: Tensor, n: int) -> dict[str, np.ndarray]:
    """Return the first n of the last axis of values, and their z among the others for each baseline."""
    found = {name: values[..., :n].cpu().numpy()}
    for prefix, part in inputs.baselines.items():
        found[f"{prefix}z_{name}"] = z_by_rank(values[..., :n], values[..., n:][..., part]).cpu().numpy()
    return found


def written(inputs: Inputs, layer: int, outs: Sequence[Tensor]) -> pa.Table:
    """Return the columns `along` of every named direction and its opposite (sign −1), with z-scores."""
    columns: dict[str, np.ndarray] = {}
    for name, values in along(inputs.units.to(outs[0].device), *outs).items():
        columns |= with_z(inputs, name, values, 2 * len(inputs))
    axes = [{"layer": np.array([layer], np.int32)}, {"sign": np.array([1, -1], np.int8)}]
    return long_table([*axes, {"name": inputs.names, "group": inputs.groups}], columns)


# --- findings


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
        columns = {
            "name": np.array(names, object),
            "group": np.array([groups[name] for name in names], object),
            "mean": values.mean(1),
            "std": values.std(1),
            "max": values.max(1),
            "max_layer": layers[values.argmax(1)],
        }
        first = {"measure": [measure] * len(names), "rank": np.arange(1, len(names) + 1)}
        parts.append(pa.table(first | {name: column[order] for name, column in columns.items()}))
    return pa.concat_tables(parts)


def group_tests(ranked: pa.Table) -> list[Json]:
    """Return Welch's t-test of means over layers between every two groups of directions; p by Holm over all tests.

    A group needs two directions. Where neither group varies (nothing was tuned) there is no test."""
    found: list[dict[str, Json]] = []
    for measure in dict.fromkeys(ranked["measure"].to_pylist()):
        mine = where(ranked, "measure", measure)
        of = {group: where(mine, "group", group)["mean"].to_numpy() for group in sorted(set(mine["group"].to_pylist()))}
        for a, b in combinations([group for group, values in of.items() if len(values) > 1], 2):
            if np.ptp(of[a]) or np.ptp(of[b]):
                t, p = np.array(stats.ttest_ind(of[a], of[b], equal_var=False)).tolist()
                one: dict[str, Json] = {"measure": measure, "a": a, "b": b, "t": t}
                found.append({**one, "mean_a": of[a].mean().item(), "mean_b": of[b].mean().item(), "p": p})
    corrected = holm(np.array([one["p"] for one in found]))
    return [{**one, "p": float(p)} for one, p in zip(found, corrected, strict=True)]


def peaks(table: pa.Table, measures: Sequence[str]) -> dict[str, Json]:
    """Return the layer where the mean over directions is largest, for each measure."""
    found: dict[str, Json] = {}
    for measure in measures:
        _, layers, values = over_layers(table, measure)
        found[measure] = int(layers[np.abs(values).mean(0).argmax()])
    return found
