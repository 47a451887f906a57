"""Which weights changed along which directions, between a base checkpoint and a tuned one.

Every matrix of a layer that reads the residual stream (q, k, v, gate, up) or writes to it (o, down) changes by Δ, seen
here as vectors in the stream: rows of Δ where it reads, columns where it writes. Of a unit direction d,

    alignment = ‖Δ d‖ / ‖Δ‖        how much of the change lies along d; 1: all of it, 1/√hidden: chance
    cosine    = mean |cos(δ, d)|    over those vectors δ, each counting the same however little it changed

Both are held against the same numbers of random directions. Per direction, z-scores of all matrices and layers are
compared with the largest one that each random direction reaches anywhere (p): with hundreds of matrices some z is
always large. Weights are read a layer at a time from both checkpoints.
"""

from collections.abc import Mapping
from operator import itemgetter

import numpy as np
import pyarrow as pa
import torch
from scipy import signal
from torch import Tensor

from steerscope.analysis.changes import ChangeSums, layer_changes
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import Progress, checked_layers
from steerscope.analysis.results import AnalysisResult, column, long_table, where
from steerscope.analysis.statistics import z_scores
from steerscope.specs.errors import InvalidRequest, Problem

_FEWEST_RANDOM = 20
PEAK = 3.0  # z-scores, and how far a peak must stand out
_PEAKS = pa.schema(
    [
        ("direction", pa.string()),
        ("layer", pa.int64()),
        ("z", pa.float64()),
        ("prominence", pa.float64()),
        ("matrix", pa.string()),
        ("matrix_z", pa.float64()),
    ]
)


def susceptibility(
    base: Checkpoint,
    tuned: Checkpoint,
    directions: Directions,
    *,
    layer: int | None = None,
    random: int = 200,
    against: Directions | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> AnalysisResult:
    """Tables `cells` (layer, matrix, direction), `changes` (layer, matrix), `profile` (layer, direction), `peaks`.

    Weights of layer i meet the directions of layer i, or those of `layer` everywhere. `against` are directions to
    compare with besides random ones, such as vectors of shuffled labels: they know how activations are spread, which
    random directions do not.
    """
    layers = checked_layers(base, tuned, directions, layer, random, against, _FEWEST_RANDOM)
    measured: dict[tuple[int, str], ChangeSums] = {}
    for done, number in enumerate(layers):
        units = _units(number if layer is None else layer, directions, random, against, seed + 1000 * number, device)
        changes = layer_changes(base, tuned, number, units)
        measured |= {(number, kind): sums for kind, sums in changes.items()}
        if progress:
            progress("layers", done + 1, len(layers))
    if not any(sums.change for sums in measured.values()):
        remedy = f"{tuned.name} and {base.name} hold the same weights"
        raise InvalidRequest([Problem("tuned", "nothing changed at these layers", remedy)])
    about = {
        "base": base.name,
        "tuned": tuned.name,
        "directions": len(directions.names),
        "random": random,
        "against": len(against.names) if against else 0,
        "seed": seed,
        "layer": layer,
        "summary": f"{tuned.name} against {base.name}: {len(directions.names)} directions, {len(measured)} matrices of "
        f"{len(layers)} layers, {random} random directions.",
    }
    return AnalysisResult("susceptibility", about, _tables(measured, directions.names, random))


def _units(
    layer: int, directions: Directions, random: int, against: Directions | None, seed: int, device: str
) -> Tensor:
    """[directions + random + against, hidden], all of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((random, directions.hidden))
    rows = [directions.at(layer), drawn, *([against.at(layer)] if against else [])]
    units = torch.from_numpy(np.concatenate(rows).astype(np.float64)).to(device)
    lengths = units.norm(dim=1, keepdim=True)
    if (lengths == 0).any():
        raise InvalidRequest([Problem("directions", f"one is zero at layer {layer}", "leave it out")])
    return (units / lengths).float()


# --- from sums to tables


def _tables(measured: Mapping[tuple[int, str], ChangeSums], names: tuple[str, ...], random: int) -> dict[str, pa.Table]:
    keys = [key for key, sums in measured.items() if sums.change]
    found = [measured[key] for key in keys]
    change = np.array([sums.change for sums in found])[:, None]
    alignment = np.sqrt(np.stack([sums.along for sums in found]) / change)
    cosine = np.stack([sums.cosines / sums.count for sums in found])
    n = len(names)
    z = _scores(alignment, n, random)
    highest = _among_others(alignment[:, n : n + random]).max(0)
    p = (1 + (highest >= z[:, :n, None]).sum(2)) / (1 + random)
    places = {
        "layer": [layer for layer, _ in keys],
        "matrix": [kind for _, kind in keys],
        "side": [sums.side for sums in found],
    }
    values = {
        "alignment": alignment[:, :n],
        "chance": _chance(alignment, n, random),
        "z": z[:, :n],
        "p": p,
        "cosine": cosine[:, :n],
        "cosine_chance": _chance(cosine, n, random),
        "cosine_z": _scores(cosine, n, random)[:, :n],
        "largest": np.stack([sums.largest[:n] for sums in found]),
        "largest_at": np.stack([sums.where[:n] for sums in found]),
    }
    other = alignment[:, n + random :]
    if other.shape[1]:
        values["against_z"] = z_scores(alignment[:, :n].T, other).T
    cells = long_table([places, {"direction": names}], values)
    profile = _profile(keys, found, names, random)
    return {
        "cells": cells,
        "changes": _changes(measured),
        "profile": profile,
        "peaks": _peaks(profile, cells, names),
    }


def _changes(measured: Mapping[tuple[int, str], ChangeSums]) -> pa.Table:
    return pa.table(
        {
            "layer": [layer for layer, _ in measured],
            "matrix": [kind for _, kind in measured],
            "side": [sums.side for sums in measured.values()],
            "norm": [sums.change**0.5 for sums in measured.values()],
            "relative": [(sums.change / sums.weight) ** 0.5 if sums.weight else None for sums in measured.values()],
        }
    )


def _chance(values: np.ndarray, names: int, random: int) -> np.ndarray:
    """Return the mean over the random columns, row by row, for each named column."""
    return np.repeat(values[:, names : names + random].mean(1, keepdims=True), names, axis=1)


def _scores(values: np.ndarray, names: int, random: int) -> np.ndarray:
    """Return z of every column against the random ones, row by row."""
    return z_scores(values.T, values[:, names : names + random]).T


def _among_others(random: np.ndarray) -> np.ndarray:
    """Return z of every random direction against the others, row by row.

    With itself among them, no z of r could exceed (r − 1) / √r, a bound that named directions do not have."""
    rest = random.shape[1] - 1
    centred = random - random.mean(1, keepdims=True)
    squares = (centred**2).sum(1, keepdims=True) - centred**2 * (rest + 1) / rest
    with np.errstate(divide="ignore", invalid="ignore"):
        return centred * (rest + 1) / rest / np.sqrt(np.maximum(squares, 0) / (rest - 1))


def _profile(keys: list[tuple[int, str]], found: list[ChangeSums], names: tuple[str, ...], random: int) -> pa.Table:
    """Return all matrices of a layer together; the embedding and the head are left out."""
    inside = [(layer, sums) for (layer, kind), sums in zip(keys, found, strict=True) if "." in kind]
    layers = sorted({layer for layer, _ in inside})
    along = np.stack([np.sum([sums.along for at, sums in inside if at == layer], axis=0) for layer in layers])
    change = np.array([sum(sums.change for at, sums in inside if at == layer) for layer in layers])
    alignment = np.sqrt(along / change[:, None])
    n = len(names)
    values = {"alignment": alignment[:, :n], "z": _scores(alignment, n, random)[:, :n]}
    return long_table([{"layer": layers}, {"direction": names}], values)


def _peaks(profile: pa.Table, cells: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """Return the layers whose z stands out among its neighbours, with the matrix of the largest z there."""
    rows = []
    for name in names:
        own = where(profile, "direction", name)
        z = column(own, "z")
        layers = column(own, "layer")
        padded = np.concatenate([[min(0.0, z.min())], z, [min(0.0, z.min())]])  # a peak may be at an end
        at, facts = signal.find_peaks(padded, height=PEAK, prominence=PEAK)
        for i, prominence in zip(at - 1, facts["prominences"], strict=True):
            here = where(where(cells, "direction", name), "layer", layers[i]).to_pylist()
            best = max(here, key=itemgetter("z"))
            rows.append((name, layers[i], z[i], prominence, best["matrix"], best["z"]))
    return pa.table([list(values) for values in zip(*rows, strict=True)] or [[]] * len(_PEAKS), schema=_PEAKS)
