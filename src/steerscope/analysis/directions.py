"""Named sets of directions: loading, random sets of the same lengths, principal components, projections.

Vectors of any known file take part at the layers that all of them have. The folder a file lies in is its group
(`roles`, `traits`), so that groups can be compared later.

`project` tells what a vector means in terms of named ones: its cosine with each of them, and how much of it they span.
Chance is exact: the cosine c of any fixed direction with a random one in n dimensions makes c·√((n−1)/(1−c²)) a t of
n−1 degrees of freedom, whatever the lengths are, and a span of k dimensions holds k/n of a random direction on average.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from scipy import stats

from steerscope.analysis.compare import load_found, unlike, vector_files
from steerscope.analysis.results import AnalysisResult, long_table
from steerscope.analysis.statistics import benjamini_hochberg
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import Site
from steerscope.vectors.vector import SteeringVector

HIGH = 0.95  # quantile of what chance gives


@dataclass(frozen=True, eq=False)
class Directions:
    """Vectors side by side, at the layers that all of them have."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    layers: tuple[int | None, ...]  # (None,): one direction serves all layers
    rows: np.ndarray  # [layers, vectors, hidden] float32
    site: Site = "resid_post"

    @classmethod
    def of(cls, vectors: dict[str, SteeringVector], groups: Sequence[str] | None = None) -> "Directions":
        """Return the vectors at the layers all of them have."""
        layers = _common_layers(vectors)
        rows = [[vector[layer or 0].float().numpy() for vector in vectors.values()] for layer in layers]
        site = next(iter(vectors.values())).site
        return cls(tuple(vectors), tuple(groups or [""] * len(vectors)), layers, np.array(rows), site)

    @property
    def hidden(self) -> int:
        return self.rows.shape[2]

    @property
    def norms(self) -> np.ndarray:
        """Return the lengths, [layers, vectors]."""
        return np.linalg.norm(self.rows, axis=2)

    def has(self, layer: int | None) -> bool:
        return self.layers == (None,) or layer in self.layers

    def at(self, layer: int | None) -> np.ndarray:
        """Return the vectors of one layer, [vectors, hidden]."""
        if not self.has(layer):
            known = ", ".join(map(str, self.layers))
            raise InvalidRequest([Problem("layer", f"the vectors have no layer {layer}", f"common to all are {known}")])
        return self.rows[0 if self.layers == (None,) else self.layers.index(layer)]

    def random(self, seed: int) -> "Directions":
        """Return random directions, as many and as long at every layer as these."""
        drawn = np.random.default_rng(seed).standard_normal(self.rows.shape)
        drawn *= (self.norms / np.linalg.norm(drawn, axis=2))[..., None]
        names = tuple(f"random {i}" for i in range(len(self.names)))
        return replace(self, names=names, groups=("random",) * len(names), rows=drawn.astype(np.float32))


def load_directions(
    paths: Sequence[str | Path], note: Callable[[str], None] | None = None, layers: Sequence[int] | None = None
) -> Directions:
    """Load files and folders of vectors at these layers, or at all common ones; `note` gets files without a vector."""
    vectors: dict[Path, SteeringVector] = {}
    for file, named in vector_files([Path(path) for path in paths]):
        found = load_found(file, named)
        if not isinstance(found, BadFile):
            vectors[file] = found if layers is None else found.at(list(layers))
        elif note:
            note(f"left out, as no vector was found in it: {found}")
    groups = [file.absolute().parent.name for file in vectors]
    return Directions.of(dict(zip(_names(list(vectors)), vectors.values(), strict=True)), groups)


def _names(files: Sequence[Path]) -> list[str]:
    """Return file names without suffixes, with as many of their folders as make them distinct."""
    parts = [file.absolute().with_suffix("").parts for file in files]
    depth = 1
    while max(Counter(part[-depth:] for part in parts).values(), default=1) > 1 and depth < max(map(len, parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _common_layers(vectors: dict[str, SteeringVector]) -> tuple[int | None, ...]:
    problems = unlike(vectors)
    if not vectors:
        problems.append(Problem("vectors", "there are none", "give files or folders of them"))
    if problems:
        raise InvalidRequest(problems)
    own = {name: set(vector.layers) for name, vector in vectors.items() if vector.layers is not None}
    if not own:
        return (None,)
    common = set.intersection(*own.values())
    if not common:
        fewest = min(own, key=lambda name: len(own[name]))
        what = f"no layer is common to all; {fewest} has only {', '.join(map(str, sorted(own[fewest])))}"
        raise InvalidRequest([Problem("layers", what, "leave such vectors out")])
    return tuple(sorted(common))


@dataclass(frozen=True, eq=False)
class Components:
    """Principal components of a set at every layer."""

    source: Directions
    axes: np.ndarray  # [layers, components, hidden], length 1
    scores: np.ndarray  # [layers, vectors, components]
    variance: np.ndarray  # [layers, components], shares of the whole
    chance: np.ndarray  # the same of random sets: mean
    chance_high: np.ndarray  # and their 95 % quantile
    draws: int

    def vectors(self) -> dict[str, SteeringVector]:
        """Return the components as vectors `pc1`, `pc2`, …"""
        found = {}
        for k in range(self.axes.shape[1]):
            directions = {layer: torch.from_numpy(self.axes[i, k]) for i, layer in enumerate(self.source.layers)}
            origin = {"name": f"pc{k + 1}", "vectors": len(self.source.names)}
            found[f"pc{k + 1}"] = SteeringVector(
                directions, site=self.source.site, method="principal component", provenance=dict(origin)
            )
        return found

    def result(self) -> AnalysisResult:
        source = self.source
        layers = {"layer": pa.array(source.layers, pa.int32())}
        numbers = {"component": np.arange(1, self.variance.shape[1] + 1)}
        names = {"name": source.names, "group": source.groups}
        shares = {"variance": self.variance, "chance": self.chance, "chance_high": self.chance_high}
        tables = {
            "components": long_table([layers, numbers], shares),
            "scores": long_table([layers, names, numbers], {"score": self.scores}),
        }
        size = len(source.names)
        summary = f"{size} directions at {len(source.layers)} layers; random sets of the same lengths: {self.draws}."
        return AnalysisResult(
            "directions", {"summary": summary, "vectors": size, "site": source.site, "draws": self.draws}, tables
        )


def components(
    source: Directions, count: int = 5, *, positive: str | None = None, draws: int = 20, seed: int = 0
) -> Components:
    """Return the components of the centred vectors, and those of `draws` random sets of vectors as long as these.

    A component's sign means nothing by itself. `positive` names a vector that lies on the positive side of all; without
    it the largest score of the first layer is positive, and every further layer agrees with the one before it.
    """
    size = len(source.names)
    problems = []
    if size < 3:
        problems.append(Problem("vectors", f"there are {size}", "components need at least three"))
    if positive is not None and positive not in source.names:
        listed = ", ".join(source.names[:20])
        problems.append(Problem("positive", f"there is no vector {positive!r}", f"names are {listed}"))
    if count < 1 or draws < 1:
        problems.append(Problem("components", f"{count} components, {draws} draws", "ask for at least one of each"))
    if problems:
        raise InvalidRequest(problems)
    count = min(count, size - 1, source.hidden)
    axes, scores, variance = _decompose(source.rows, count)
    signs = _signs(scores, None if positive is None else source.names.index(positive))
    random = np.stack([_decompose(source.random(seed + i).rows, count)[2] for i in range(draws)])
    return Components(
        source,
        (axes * signs[:, :, None]).astype(np.float32),
        scores * signs[:, None],
        variance,
        random.mean(0),
        np.quantile(random, HIGH, axis=0),
        draws,
    )


def _decompose(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    centred = rows.astype(np.float64) - rows.mean(1, keepdims=True, dtype=np.float64)
    left, lengths, right = np.linalg.svd(centred, full_matrices=False)
    whole = (lengths**2).sum(1, keepdims=True)
    variance = np.divide(lengths**2, whole, out=np.zeros_like(lengths), where=whole > 0)
    return right[:, :count], left[:, :, :count] * lengths[:, None, :count], variance[:, :count]


def _signs(scores: np.ndarray, positive: int | None) -> np.ndarray:
    """[layers, components] of ±1."""
    if positive is not None:
        return np.where(scores[:, positive] < 0, -1.0, 1.0)
    largest = np.abs(scores[0]).argmax(0)
    signs = [np.where(scores[0, largest, np.arange(scores.shape[2])] < 0, -1.0, 1.0)]
    for before, after in zip(scores[:-1], scores[1:], strict=True):
        signs.append(signs[-1] * np.where((before * after).sum(0) < 0, -1.0, 1.0))
    return np.stack(signs)


def project(vectors: Directions, onto: Directions) -> AnalysisResult:
    """Return `cosines` with each named vector (p is corrected over the table) and `spans`, at every layer both have."""
    problems = []
    if vectors.hidden != onto.hidden:
        what = f"{vectors.hidden} against {onto.hidden}"
        problems.append(Problem("hidden", what, "project vectors of one model"))
    known = onto.layers if vectors.layers == (None,) else vectors.layers
    layers = [layer for layer in known if vectors.has(layer) and onto.has(layer)]
    if not layers:
        problems.append(Problem("layers", "none is common to the vectors and the named set", "see vectors show"))
    if problems:
        raise InvalidRequest(problems)
    pairs = [(_unit(vectors.at(layer)), _unit(onto.at(layer))) for layer in layers]
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
