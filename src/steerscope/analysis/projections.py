"""What does a vector mean in terms of named ones? Its cosine with each of them, and how much of it they span.

Chance is exact: the cosine c of any fixed direction with a random one in n dimensions makes c·√((n−1)/(1−c²)) a t of
n−1 degrees of freedom, whatever the lengths are, and a span of k dimensions holds k/n of a random direction on average.
"""

import numpy as np
import pyarrow as pa
from scipy import stats

from steerscope.analysis.directions import Directions
from steerscope.analysis.results import AnalysisResult
from steerscope.analysis.statistics import benjamini_hochberg
from steerscope.specs.errors import InvalidRequest, Problem


def project(vectors: Directions, onto: Directions) -> AnalysisResult:
    """At every layer both have: `cosines` with each named vector (p is corrected over the table), and `spans`."""
    layers = _common(vectors, onto)
    cosines, spans = [], []
    for layer in layers:
        a, b = (one.rows[0] if layer is None else one.at(layer) for one in (vectors, onto))
        cosines.append(_unit(a) @ _unit(b).T)
        spans.append(_inside(_unit(a), b))
    cosine, (share, chance) = np.stack(cosines), (np.stack([one[i] for one in spans]) for i in (0, 1))
    freedom = vectors.hidden - 1
    t = cosine * np.sqrt(freedom / np.maximum(1 - cosine**2, 1e-15))
    n, m, depth = len(vectors.names), len(onto.names), len(layers)
    table = {
        "layer": pa.array([layer for layer in layers for _ in range(n * m)], pa.int32()),
        "vector": np.tile(np.repeat(vectors.names, m), depth),
        "onto": np.tile(onto.names, depth * n),
        "group": np.tile(onto.groups, depth * n),
        "cosine": cosine.ravel(),
        "z": cosine.ravel() * np.sqrt(vectors.hidden),
        "p": benjamini_hochberg(2 * stats.t.sf(np.abs(t.ravel()), freedom)),
    }
    span = {
        "layer": pa.array([layer for layer in layers for _ in range(n)], pa.int32()),
        "vector": np.tile(vectors.names, depth),
        "share": share.ravel(),
        "chance": chance.ravel(),
    }
    summary = f"{n} vectors projected on {m} named ones at {depth} layers."
    return AnalysisResult("projections", {"summary": summary}, {"cosines": pa.table(table), "spans": pa.table(span)})


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


def _unit(rows: np.ndarray) -> np.ndarray:
    """In float64; zero stays zero, whose cosine with anything is 0."""
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return exact / np.where(lengths == 0, 1.0, lengths)


def _inside(units: np.ndarray, named: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of each unit vector's squared length that lies in the span of the named ones, and what chance gives."""
    _, lengths, basis = np.linalg.svd(_unit(named), full_matrices=False)
    basis = basis[lengths > 1e-6 * lengths.max(initial=0.0)]
    return ((units @ basis.T) ** 2).sum(1), np.full(len(units), len(basis) / units.shape[1])
