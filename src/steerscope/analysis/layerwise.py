"""What the passes through MLPs and attention share: directions in, what comes out along them, random baselines.

Every direction goes in at a length of √hidden (root mean square 1): the norm in front of an MLP or attention takes the
length away, and at this one its epsilon does not count. The opposite of each direction goes in, too, and so do random
directions and those given to compare with, against which every measure gets a z-score by its rank among them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import numpy as np
import pyarrow as pa
import torch
from scipy.special import ndtri
from torch import Tensor

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.findings import component_ranks, group_tests, peaks, ranking
from steerscope.analysis.onelayer import OneLayer
from steerscope.analysis.results import AnalysisResult, Columns
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.vectors.vector import Json

FEWEST_RANDOM, FEWEST_GIVEN = 100, 8
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


class PassOptions(TypedDict, total=False):
    """Options of every pass; see `LayerPass`."""

    layer: int | None
    random: int
    against: Directions | None
    seed: int
    device: str
    progress: Progress | None


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

    def layers(self, what: str, measure: Callable[[OneLayer, Inputs], T]) -> Iterator[tuple[int, Inputs, list[T]]]:
        """Yield the number and the inputs of every layer, and what `measure` finds in each checkpoint."""
        layers = checked_layers(self.base, self.tuned, self.directions, self.layer, self.random, self.against)
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
        measures: Sequence[str],
        **more: Json,
    ) -> AnalysisResult:
        """Return the tables, a ranking of directions by the columns `ranked` of `measured`, and what is found there;
        principal components are compared by `measures`."""
        second = f", and of {self.tuned.name}" if self.tuned else ""
        ranks = ranking(measured, ranked)
        about = {
            "summary": f"{len(self.directions.names)} directions through the {what} of {self.base.name}{second}.",
            "base": self.base.name,
            "tuned": self.tuned.name if self.tuned else None,
            "against": len(self.against.names) if self.against else 0,
            "layer": self.layer,
            "random": self.random,
            "seed": self.seed,
            "focus": peaks(tables["written"], ("change", "turn") if self.tuned else ("norm", "parallel")),
            "groups": group_tests(ranks),
            "components": component_ranks(measured, [f"z_{name}" for name in measures]),
        }
        return AnalysisResult(kind, about | more, {**tables, "ranking": ranks})


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
