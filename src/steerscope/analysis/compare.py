"""Many vectors side by side: cosines and norms per layer, clusters, and whether learned ones agree with averaged ones.

A vector takes part at the layers it has; one that is the same on every layer takes part at all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy.cluster import hierarchy

from steerscope.analysis.results import save_table
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.vectors.files import SUFFIXES, load
from steerscope.vectors.vector import SteeringVector

# Methods that fit weights to a loss. All others, means and principal components, count as averaged.
LEARNED = ("learned", "chatspace", "logistic_probe")
TOGETHER = 0.5  # two clusters become one where their vectors have at least this mean cosine
_CHATSPACE = "steering_vector.pt"
_NO_VECTORS = ("default_vectors.pt", "capping_config.pt")  # what lies beside vectors in the folders of prior systems


@dataclass(frozen=True, slots=True)
class Agreement:
    """A learned vector and the averaged one of the same name; with `rank` 1 no averaged one is nearer to it."""

    learned: str
    averaged: str
    layer: int | None
    cosine: float
    rank: int
    of: int


@dataclass(frozen=True, eq=False)
class Comparison:
    names: tuple[str, ...]
    methods: tuple[str | None, ...]
    layers: tuple[int | None, ...]  # those that at least two vectors have; None: all vectors are shared
    cosine: np.ndarray  # [layers, vectors, vectors]; NaN where a vector lacks the layer
    norms: np.ndarray  # [layers, vectors], likewise
    clusters: tuple[int, ...]  # number of each vector's cluster
    order: tuple[int, ...]  # of vectors, such that near ones stand together
    agreement: tuple[Agreement, ...]

    @property
    def mean(self) -> np.ndarray:
        """Return the mean cosine [vectors, vectors] over the layers both have, NaN where there is none."""
        return _mean(self.cosine)


def vector_files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Return the files, and possible vector files below folders; with each, whether it was named itself."""
    found: list[tuple[Path, bool]] = []
    for path in paths:
        if not path.is_dir() or (path / _CHATSPACE).is_file():
            found.append((path, True))
            continue
        below = [file for file in sorted(path.rglob("[!.]*")) if file.suffix.lower() in SUFFIXES]
        files = [file.parent if file.name == _CHATSPACE else file for file in below if file.name not in _NO_VECTORS]
        if not files:
            remedy = f"known are {', '.join(SUFFIXES)} and chatspace folders"
            raise InvalidRequest([Problem(str(path), "holds no vector files", remedy)])
        found += [(file, False) for file in files]
    return found


def load_found(path: Path, named: bool) -> SteeringVector | BadFile:
    """Return the vector of a file. The error of a file that was found in a folder is returned, not raised."""
    try:
        return load(path)
    except BadFile as error:
        if named:
            raise
        return error


def compare(names: Sequence[str], vectors: Sequence[SteeringVector]) -> Comparison:
    """Return vectors side by side; those whose names have the same last part (without suffix) are of one concept."""
    layers = _layers(names, vectors)
    norms = np.array([[np.linalg.norm(_row(vector, layer)) for vector in vectors] for layer in layers])
    cosine = np.stack([_cosines(vectors, layer) for layer in layers])
    order, clusters = _cluster(_mean(cosine))
    methods = tuple(vector.method for vector in vectors)
    agreement = _agreement(names, methods, layers, cosine)
    return Comparison(tuple(names), methods, layers, cosine, norms, clusters, order, agreement)


def save_tables(found: Comparison, folder: Path) -> list[Path]:
    """Write `cosine.parquet` (a, b, layer, cosine) and `vectors.parquet` (name, method, cluster, layer, norm)."""
    names = np.array(found.names, object)
    layers = pa.array(found.layers, pa.int32())
    k, b, a = np.nonzero(~np.isnan(found.cosine) & np.tri(len(names), k=-1, dtype=bool))
    cosine = {"a": names[a], "b": names[b], "layer": layers.take(k), "cosine": found.cosine[k, b, a]}
    i, k = np.nonzero(~np.isnan(found.norms.T))
    vectors = {
        "name": names[i],
        "method": pa.array(found.methods, pa.string()).take(i),
        "cluster": np.array(found.clusters)[i],
        "layer": layers.take(k),
        "norm": found.norms[k, i],
    }
    tables = {"cosine": cosine, "vectors": vectors}
    return [save_table(pa.table(columns), folder / f"{name}.parquet") for name, columns in tables.items()]


def _layers(names: Sequence[str], vectors: Sequence[SteeringVector]) -> tuple[int | None, ...]:
    problems = []
    if len(vectors) < 2:
        problems.append(Problem("compare", f"there are {len(vectors)} vectors", "give at least two"))
    problems += unlike(dict(zip(names, vectors, strict=True)))
    if problems:
        raise InvalidRequest(problems)
    own = [layer for vector in vectors for layer in vector.layers or ()]
    shared = sum(vector.layers is None for vector in vectors)
    if not own:
        return (None,)
    common = tuple(sorted(layer for layer in set(own) if own.count(layer) + shared > 1))
    if not common:
        what = "no two vectors have a layer in common"
        raise InvalidRequest([Problem("compare", what, "see their layers with vectors show")])
    return common


def unlike(vectors: Mapping[str, SteeringVector]) -> list[Problem]:
    """Return the problems that keep vectors from being compared."""
    problems = []
    for field in ("hidden", "site"):
        found = {getattr(vector, field): name for name, vector in vectors.items()}
        if len(found) > 1:
            what = ", ".join(f"{value} ({name})" for value, name in found.items())
            problems.append(Problem(field, f"differs: {what}", f"give vectors of one {field}"))
    return problems


def _cosines(vectors: Sequence[SteeringVector], layer: int | None) -> np.ndarray:
    rows = np.stack([_row(vector, layer) for vector in vectors])
    lengths = np.linalg.norm(rows, axis=1)
    lengths[lengths == 0] = 1.0
    return (rows @ rows.T) / lengths[:, None] / lengths


def _row(vector: SteeringVector, layer: int | None) -> np.ndarray:
    """Return the direction at a layer, NaN where there is none."""
    key = None if None in vector.directions else layer
    found = vector.directions.get(key)
    return np.full(vector.hidden, np.nan) if found is None else found.double().numpy()


def _mean(cosine: np.ndarray) -> np.ndarray:
    return np.ma.masked_invalid(cosine).mean(0).filled(np.nan)


def _cluster(mean: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order of the vectors along the tree of clusters, and the cluster of each, numbered in that order."""
    distance = 1 - np.nan_to_num(mean)
    tree = hierarchy.linkage(distance[np.triu_indices(len(mean), 1)], "average")
    order = hierarchy.leaves_list(tree).tolist()
    labels = hierarchy.fcluster(tree, 1 - TOGETHER, "distance").tolist()
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels[i] for i in order))}
    return tuple(order), tuple(numbers[label] for label in labels)


def _agreement(
    names: Sequence[str], methods: Sequence[str | None], layers: Sequence[int | None], cosine: np.ndarray
) -> tuple[Agreement, ...]:
    learned, averaged = ([i for i, one in enumerate(methods) if (one in LEARNED) == yes] for yes in (True, False))
    found = []
    for i, j in product(learned, averaged):
        for k, layer in enumerate(layers if Path(names[j]).stem == Path(names[i]).stem else ()):
            near = cosine[k, i, averaged][~np.isnan(cosine[k, i, averaged])]
            own = cosine[k, i, j]
            if not np.isnan(own):
                rank = 1 + int((near > own).sum())
                found.append(Agreement(names[i], names[j], layer, float(own), rank, len(near)))
    return tuple(found)
