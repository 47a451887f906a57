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

import numpy as np
import pyarrow as pa
import torch
from scipy import signal
from torch import Tensor

from steerscope.analysis.changes import Tally, layer_changes
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import Progress, checked_layers
from steerscope.analysis.results import AnalysisResult
from steerscope.analysis.statistics import z_scores
from steerscope.specs.errors import InvalidRequest, Problem

_FEWEST_RANDOM = 20
PEAK = 3.0  # z-scores, and how far a peak must stand out


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
    measured: dict[tuple[int, str], Tally] = {}
    for done, number in enumerate(layers):
        units = _units(number if layer is None else layer, directions, random, against, seed + 1000 * number, device)
        for kind, tally in layer_changes(base, tuned, number, units).items():
            measured[number, kind] = tally
        if progress:
            progress("layers", done + 1, len(layers))
    if not any(tally.change for tally in measured.values()):
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


def _tables(measured: Mapping[tuple[int, str], Tally], names: tuple[str, ...], random: int) -> dict[str, pa.Table]:
    keys = [key for key, tally in measured.items() if tally.change]
    tallies = [measured[key] for key in keys]
    change = np.array([tally.change for tally in tallies])[:, None]
    alignment = np.sqrt(np.stack([tally.along for tally in tallies]) / change)
    cosine = np.stack([tally.cosines / tally.count for tally in tallies])
    n = len(names)
    scores = {"z": _scores(alignment, n, random), "cosine_z": _scores(cosine, n, random)}
    highest = _among_others(alignment[:, n : n + random]).max(0)
    p = (1 + (highest >= scores["z"][:, :n, None]).sum(2)) / (1 + random)
    chance = alignment[:, n : n + random]
    cells = {
        "layer": np.repeat([layer for layer, _ in keys], n),
        "matrix": np.repeat([kind for _, kind in keys], n),
        "side": np.repeat([tally.side for tally in tallies], n),
        "direction": np.tile(names, len(keys)),
        "alignment": alignment[:, :n].ravel(),
        "chance": np.repeat(chance.mean(1), n),
        "z": scores["z"][:, :n].ravel(),
        "p": p.ravel(),
        "cosine": cosine[:, :n].ravel(),
        "cosine_chance": np.repeat(cosine[:, n : n + random].mean(1), n),
        "cosine_z": scores["cosine_z"][:, :n].ravel(),
        "largest": np.stack([tally.largest[:n] for tally in tallies]).ravel(),
        "largest_at": np.stack([tally.where[:n] for tally in tallies]).ravel(),
    }
    other = alignment[:, n + random :]
    if other.shape[1]:
        cells["against_z"] = z_scores(alignment[:, :n].T, other).T.ravel()
    changes = {
        "layer": [layer for layer, _ in measured],
        "matrix": [kind for _, kind in measured],
        "side": [tally.side for tally in measured.values()],
        "norm": [tally.change**0.5 for tally in measured.values()],
        "relative": [(tally.change / tally.weight) ** 0.5 if tally.weight else None for tally in measured.values()],
    }
    profile = _profile(keys, tallies, names, random)
    return {
        "cells": pa.table(cells),
        "changes": pa.table(changes),
        "profile": pa.table(profile),
        "peaks": pa.table(_peaks(profile, cells, names)),
    }


def _scores(values: np.ndarray, names: int, random: int) -> np.ndarray:
    """Of every column against the random ones, row by row."""
    return z_scores(values.T, values[:, names : names + random]).T


def _among_others(random: np.ndarray) -> np.ndarray:
    """z of every random direction against the rest, row by row. With itself among them no z of r could exceed
    (r − 1) / √r, a bound that named directions do not have."""
    rest = random.shape[1] - 1
    centred = random - random.mean(1, keepdims=True)
    squares = (centred**2).sum(1, keepdims=True) - centred**2 * (rest + 1) / rest
    with np.errstate(divide="ignore", invalid="ignore"):
        return centred * (rest + 1) / rest / np.sqrt(np.maximum(squares, 0) / (rest - 1))


def _profile(
    keys: list[tuple[int, str]], tallies: list[Tally], names: tuple[str, ...], random: int
) -> dict[str, np.ndarray]:
    """All matrices of a layer together, the layer's embedding or head left out."""
    inside = [(layer, tally) for (layer, kind), tally in zip(keys, tallies, strict=True) if "." in kind]
    layers = sorted({layer for layer, _ in inside})
    along = np.stack([sum(t.along for at, t in inside if at == layer) for layer in layers])  # type: ignore[arg-type]
    change = np.array([sum(t.change for at, t in inside if at == layer) for layer in layers])
    alignment, n = np.sqrt(along / change[:, None]), len(names)
    return {
        "layer": np.repeat(layers, n),
        "direction": np.tile(names, len(layers)),
        "alignment": alignment[:, :n].ravel(),
        "z": _scores(alignment, n, random)[:, :n].ravel(),
    }


def _peaks(profile: Mapping[str, np.ndarray], cells: Mapping[str, np.ndarray], names: tuple[str, ...]) -> dict:
    """Layers whose z stands out among its neighbours, with the matrix of the largest z there."""
    found: dict[str, list] = {"direction": [], "layer": [], "z": [], "prominence": [], "matrix": [], "matrix_z": []}
    for name in names:
        own = profile["direction"] == name
        z, layers = profile["z"][own], profile["layer"][own]
        padded = np.concatenate([[min(0.0, z.min())], z, [min(0.0, z.min())]])  # a peak may be at an end
        at, facts = signal.find_peaks(padded, height=PEAK, prominence=PEAK)
        for i, prominence in zip(at - 1, facts["prominences"], strict=True):
            here = (cells["direction"] == name) & (cells["layer"] == layers[i])
            best = cells["z"][here].argmax()
            row = (name, layers[i], z[i], prominence, cells["matrix"][here][best], cells["z"][here][best])
            for column, value in zip(found.values(), row, strict=True):
                column.append(value)
    return {**found, "layer": pa.array([int(layer) for layer in found["layer"]], pa.int64())}
