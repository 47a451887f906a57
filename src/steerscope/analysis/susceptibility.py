"""Which weights changed along which directions, between a base checkpoint and a tuned one.

Every matrix of a layer that reads the residual stream (q, k, v, gate, up) or writes to it (o, down) changes by Δ, seen
here as vectors in the stream: rows of Δ where it reads, columns where it writes. Of a unit direction d,

    alignment = ‖Δ d‖ / ‖Δ‖        how much of the change lies along d; 1: all of it, 1/√hidden: chance
    cosine    = mean |cos(δ, d)|    over those vectors δ, each counting the same however little it changed

Both are held against the same numbers of random directions. Per direction, z-scores of all matrices and layers are
compared with the largest one that each random direction reaches anywhere (p): with hundreds of matrices some z is
always large. Weights are read a layer at a time from both checkpoints, and changes are summed up a part at a time.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from scipy import signal
from torch import Tensor

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import LayerPass
from steerscope.analysis.results import AnalysisResult, column, long_table, where
from steerscope.analysis.statistics import z_scores
from steerscope.specs.errors import BadFile, InvalidRequest, Problem

_FEWEST_RANDOM = 20
PEAK = 3.0  # z-scores, and how far a peak must stand out
_NUMBER = pa.float64()
_TEXT = pa.string()
_PEAKS = pa.schema(
    {"direction": _TEXT, "layer": pa.int64(), "z": _NUMBER, "prominence": _NUMBER, "matrix": _TEXT, "matrix_z": _NUMBER}
)
Side = Literal["reads", "writes"]
_WRITERS = ("o_proj", "out_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "wo", "w2")


def facing(weights: Mapping[str, Tensor], hidden: int) -> Iterator[tuple[str, Side, Tensor]]:
    """Yield the matrices that face the stream as vectors in it [n, hidden]; experts of one kind share a name.

    Shapes tell whether a matrix reads or writes; for square ones the name decides.
    """
    of_gpt2 = [w for name, w in weights.items() if name.endswith(".c_fc.weight") and w.shape[0] == hidden]
    stored_by_input = any(w.shape[1] != hidden for w in of_gpt2)  # Conv1D keeps [in, out], Linear [out, in]
    for name, weight in weights.items():
        if weight.dim() != 2 or hidden not in weight.shape:
            continue
        module = name.removesuffix(".weight")
        linear = weight.T if stored_by_input else weight
        square = linear.shape[0] == linear.shape[1]
        writes = module.rsplit(".", 1)[-1] in _WRITERS if square else linear.shape[0] == hidden
        yield re.sub(r"\.\d+\.", ".", module), "writes" if writes else "reads", linear.T if writes else linear


@dataclass(slots=True)
class ChangeSums:
    """Sums over the change of one matrix's vectors; `along` and `cosines` have an entry per direction."""

    side: Side
    change: float = 0.0
    weight: float = 0.0
    count: int = 0
    seen: int = 0
    along: np.ndarray = field(default_factory=lambda: np.zeros(1))
    cosines: np.ndarray = field(default_factory=lambda: np.zeros(1))
    largest: np.ndarray = field(default_factory=lambda: np.zeros(1))
    where: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def add(self, before: Tensor, after: Tensor, units: Tensor) -> None:
        """Add vectors [n, hidden] of both checkpoints."""
        before = before.to(units.device, torch.float32)
        delta = after.to(units.device, torch.float32) - before
        along = delta @ units.T
        lengths = delta.norm(dim=1)
        changed = lengths > 0
        cosines = along[changed].abs() / lengths[changed, None]
        self.change += float(lengths.double().square().sum())
        self.weight += float(before.norm(dim=1).double().square().sum())
        self.count += int(changed.sum())
        self.along = self.along + along.double().square().sum(0).cpu().numpy()
        self.cosines = self.cosines + cosines.double().sum(0).cpu().numpy()
        if len(cosines):
            best, at = (one.cpu().numpy() for one in cosines.max(0))
            at = self.seen + changed.nonzero()[:, 0].cpu().numpy()[at]
            self.where = np.where(best > self.largest, at, self.where)
            self.largest = np.maximum(best, self.largest)
        self.seen += len(delta)


def layer_changes(base: Checkpoint, tuned: Checkpoint, number: int, units: Tensor) -> dict[str, ChangeSums]:
    """Return the sums of every matrix; the embedding counts with the first layer, the head with the last."""
    before = base.layer(number)
    after = tuned.layer(number)
    shapes = [{name: tensor.shape for name, tensor in weights.items()} for weights in (before, after)]
    if other := {name for name, _ in shapes[0].items() ^ shapes[1].items()}:
        raise BadFile(f"layer {number} of {tuned.name} differs in the shape of {', '.join(sorted(other)[:4])}")
    found: dict[str, ChangeSums] = {}
    for (kind, side, a), (_, _, b) in zip(
        facing(before, base.hidden), facing({name: after[name] for name in before}, base.hidden), strict=True
    ):
        found.setdefault(kind, ChangeSums(side)).add(a, b, units)
    if number == 0:
        found["embedding"] = _vocabulary("writes", base.rows(base.embedding), tuned.rows(tuned.embedding), units)
    if number == base.layers - 1:
        found["head"] = _vocabulary("reads", base.rows(base.head), tuned.rows(tuned.head), units)
    return found


def _vocabulary(side: Side, before: Iterator[Tensor], after: Iterator[Tensor], units: Tensor) -> ChangeSums:
    """Return the sums over the tokens that both vocabularies have; one may have grown."""
    sums = ChangeSums(side)
    for a, b in zip(before, after, strict=False):
        rows = min(len(a), len(b))
        sums.add(a[:rows], b[:rows], units)
    return sums


def susceptibility(base: Checkpoint, tuned: Checkpoint, directions: Directions, **options: Any) -> AnalysisResult:
    """Return the tables `cells` (layer, matrix, direction), `changes` (layer, matrix), `profile` and `peaks`.

    Weights of layer i are compared with directions of layer i, or with those of `layer` everywhere. `against` is a
    second baseline, such as vectors of shuffled labels: they share the spread of activations, random ones do not. See
    `LayerPass` for all options; `random` is 200.
    """
    run = LayerPass(base=base, tuned=tuned, directions=directions, **{"random": 200, **options})
    layers = run.checked_layers(_FEWEST_RANDOM)
    measured: dict[tuple[int, str], ChangeSums] = {}
    for done, number in enumerate(layers, 1):
        changes = layer_changes(base, tuned, number, _units(run, number))
        measured |= {(number, kind): sums for kind, sums in changes.items()}
        if run.progress:
            run.progress("layers", done, len(layers))
    if not any(sums.change for sums in measured.values()):
        remedy = f"{tuned.name} and {base.name} hold the same weights"
        raise InvalidRequest([Problem("tuned", "nothing changed at these layers", remedy)])
    n = len(directions.names)
    summary = f"{tuned.name} against {base.name}: {n} directions, {len(measured)} matrices of {len(layers)} layers, "
    about = run.about | {"directions": n, "summary": f"{summary}{run.random} random directions."}
    return AnalysisResult("susceptibility", about, _tables(measured, directions.names, run.random))


def _units(run: LayerPass, number: int) -> Tensor:
    """Return the directions for a layer, [directions + random + against, hidden], all of length 1."""
    layer = number if run.layer is None else run.layer
    drawn = np.random.default_rng(run.seed + 1000 * number).standard_normal((run.random, run.directions.hidden))
    rows = [run.directions.at(layer), drawn, *([run.against.at(layer)] if run.against else [])]
    units = torch.from_numpy(np.concatenate(rows).astype(np.float64)).to(run.device)
    lengths = units.norm(dim=1, keepdim=True)
    if (lengths == 0).any():
        raise InvalidRequest([Problem("directions", f"one is zero at layer {layer}", "leave it out")])
    return (units / lengths).float()


# --- from sums to tables


def _tables(measured: Mapping[tuple[int, str], ChangeSums], names: tuple[str, ...], random: int) -> dict[str, pa.Table]:
    changed = {key: sums for key, sums in measured.items() if sums.change}
    found = list(changed.values())
    change = np.array([sums.change for sums in found])[:, None]
    alignment = np.sqrt(np.stack([sums.along for sums in found]) / change)
    cosine = np.stack([sums.cosines / sums.count for sums in found])
    n = len(names)
    drawn = slice(n, n + random)
    z = z_scores(alignment[:, :n].T, alignment[:, drawn]).T
    highest = _among_others(alignment[:, drawn]).max(0)
    values = {
        "alignment": alignment[:, :n],
        "chance": np.repeat(alignment[:, drawn].mean(1, keepdims=True), n, axis=1),
        "z": z,
        "p": (1 + (highest >= z[:, :, None]).sum(2)) / (1 + random),
        "cosine": cosine[:, :n],
        "cosine_chance": np.repeat(cosine[:, drawn].mean(1, keepdims=True), n, axis=1),
        "cosine_z": z_scores(cosine[:, :n].T, cosine[:, drawn]).T,
        "largest": np.stack([sums.largest[:n] for sums in found]),
        "largest_at": np.stack([sums.where[:n] for sums in found]),
    }
    other = alignment[:, n + random :]
    if other.shape[1]:
        values["against_z"] = z_scores(alignment[:, :n].T, other).T
    cells = long_table([_places(changed), {"direction": names}], values)
    norms = {
        "norm": [sums.change**0.5 for sums in measured.values()],
        "relative": [(sums.change / sums.weight) ** 0.5 if sums.weight else None for sums in measured.values()],
    }
    profile = _profile(changed, names, drawn)
    changes = pa.table(_places(measured) | norms)
    return {"cells": cells, "changes": changes, "profile": profile, "peaks": _peaks(profile, cells, names)}


def _places(measured: Mapping[tuple[int, str], ChangeSums]) -> dict[str, list]:
    layers, matrices = zip(*measured, strict=True)
    return {"layer": list(layers), "matrix": list(matrices), "side": [sums.side for sums in measured.values()]}


def _among_others(random: np.ndarray) -> np.ndarray:
    """Return z of every random direction against the others, row by row.

    With itself among them, no z of r could exceed (r − 1) / √r, a bound that named directions do not have."""
    rest = random.shape[1] - 1
    centred = random - random.mean(1, keepdims=True)
    squares = (centred**2).sum(1, keepdims=True) - centred**2 * (rest + 1) / rest
    with np.errstate(divide="ignore", invalid="ignore"):
        return centred * (rest + 1) / rest / np.sqrt(np.maximum(squares, 0) / (rest - 1))


def _profile(found: Mapping[tuple[int, str], ChangeSums], names: tuple[str, ...], drawn: slice) -> pa.Table:
    """Return all matrices of a layer together; the embedding and the head are left out."""
    inside: dict[int, list[ChangeSums]] = {}
    for (layer, kind), sums in found.items():
        if "." in kind:
            inside.setdefault(layer, []).append(sums)
    layers = sorted(inside)
    along = np.stack([np.sum([sums.along for sums in inside[layer]], axis=0) for layer in layers])
    change = np.array([sum(sums.change for sums in inside[layer]) for layer in layers])
    alignment = np.sqrt(along / change[:, None])
    named = alignment[:, : len(names)]
    values = {"alignment": named, "z": z_scores(named.T, alignment[:, drawn]).T}
    return long_table([{"layer": layers}, {"direction": names}], values)


def _peaks(profile: pa.Table, cells: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """Return the layers whose z stands out among its neighbours, with the matrix of the largest z there."""
    rows = []
    for name in names:
        own = where(profile, "direction", name)
        z = column(own, "z")
        layers = column(own, "layer")
        padded = np.pad(z, 1, constant_values=min(0.0, z.min()))  # a peak may be at an end
        at, facts = signal.find_peaks(padded, height=PEAK, prominence=PEAK)
        for i, prominence in zip(at - 1, facts["prominences"], strict=True):
            here = where(where(cells, "direction", name), "layer", layers[i]).to_pylist()
            best = max(here, key=itemgetter("z"))
            rows.append((name, layers[i], z[i], prominence, best["matrix"], best["z"]))
    return pa.Table.from_pylist([dict(zip(_PEAKS.names, row, strict=True)) for row in rows], schema=_PEAKS)
