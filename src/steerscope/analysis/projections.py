"""What does a vector mean in terms of named ones? Its cosine with each of them, and how much of it they span.

Chance is exact: the cosine c of any fixed direction with a random one in n dimensions makes c·√((n−1)/(1−c²)) a t of
n−1 degrees of freedom, whatever the lengths are, and a span of k dimensions holds k/n of a random direction on average.
"""

import numpy as np
import pyarrow as pa
from scipy import stats

from steerscope.analysis.directions import Directions
from steerscope.analysis.results import AnalysisResult, long_table
from steerscope.analysis.statistics import benjamini_hochberg
from steerscope.specs.errors import InvalidRequest, Problem


def project(vectors: Directions, onto: Directions) -> AnalysisResult:
    """Return `cosines` with each named vector (p is corrected over the table) and `spans`, at every layer both have."""
    layers = _common(vectors, onto)
    pairs = [(_unit(_rows(vectors, layer)), _unit(_rows(onto, layer))) for layer in layers]
    cosine = np.stack([a @ b.T for a, b in pairs])
    share, chance = np.stack([_inside(a, b) for a, b in pairs], axis=1)
    freedom = vectors.hidden - 1
    t = cosine * np.sqrt(freedom / np.maximum(1 - cosine**2, 1e-15))
    p = benjamini_hochberg(2 * stats.t.sf(np.abs(t.ravel()), freedom))
    at = {"layer": pa.array(layers, pa.int32())}
    names = {"vector": vectors.names}
    named = {"onto": onto.names, "group": onto.groups}
    values = {"cosine": cosine, "z": cosine * np.sqrt(vectors.hidden), "p": p}
    tables = {
        "cosines": long_table([at, names, named], values),
        "spans": long_table([at, names], {"share": share, "chance": chance}),
    }
    summary = f"{len(vectors.names)} vectors projected on {len(onto.names)} named ones at {len(layers)} layers."
    return AnalysisResult("projections", {"summary": summary}, tables)


def _common(vectors: Directions, onto: Directions) -> tuple[int | None, ...]:
    problems = []
    if vectors.hidden != onto.hidden:
        what = f"{vectors.hidden} against {onto.hidden}"
        problems.append(Problem("hidden", what, "project vectors of one model"))
    shared = [one.layers == (None,) for one in (vectors, onto)]
    layers = onto.layers if shared[0] else vectors.layers
    if not any(shared):
        layers = tuple(layer for layer in vectors.layers if layer in onto.layers)
    if not layers:
        problems.append(Problem("layers", "none is common to the vectors and the named set", "see vectors show"))
    if problems:
        raise InvalidRequest(problems)
    return layers


def _rows(source: Directions, layer: int | None) -> np.ndarray:
    return source.rows[0] if layer is None else source.at(layer)


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return rows of length 1 in float64; zero stays zero, and its cosine with anything is 0."""
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return exact / np.where(lengths == 0, 1.0, lengths)


def _inside(units: np.ndarray, named: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of each unit vector's squared length in the span of the named ones, and what chance gives."""
    _, lengths, basis = np.linalg.svd(named, full_matrices=False)
    basis = basis[lengths > 1e-6 * lengths.max(initial=0.0)]
    return ((units @ basis.T) ** 2).sum(1), np.full(len(units), len(basis) / units.shape[1])
