"""Tables of the attention pass, made of what each layer's heads do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from steerscope.analysis.layerwise import Inputs, p_by_rank, written, z_by_rank
from steerscope.analysis.results import Columns, column, joined, where
from steerscope.analysis.statistics import benjamini_hochberg

ALL = -1  # in place of a head's number: all heads together
BEYOND = 3.0  # z-scores that few random directions reach
_TOP, _TOP_OF_HEAD = 200, 20


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer of one checkpoint, for n named directions and r others (random ones, then those given).

    The last of the heads is all of them together."""

    pairs: Tensor  # [heads + 1, n, n]: affinity of query and key
    keys: Tensor  # [heads + 1, n, r]: of queries with the others as keys
    queries: Tensor  # [heads + 1, r, n]: of the others as queries with keys
    own: Tensor  # [heads + 1, n + r]: of each with itself
    opposite: Tensor  # [heads + 1, n]: of each with its opposite as key
    write: Tensor  # [heads + 1, n + r]: what looking at each writes along it
    write_norm: Tensor  # [heads + 1, n + r]: length of what is written, before a post-norm
    added: Tensor  # [2n + r, hidden]: what is added to the stream when all heads look at it


def columns(inputs: Inputs, layer: int, seen: Sequence[LayerAttention]) -> dict[str, Columns]:
    """Return one layer's rows of every table; `seen` in the base and, if there is one, the tuned checkpoint."""
    cases = {"affinity": seen[0]}
    if len(seen) > 1:
        cases["change"] = _difference(*seen)
    values = {name: case.pairs for name, case in cases.items()}
    z: dict[str, Tensor] = {}
    p: Columns = {}
    for name, case in cases.items():
        suffix = "_change" if name == "change" else ""
        for prefix, part in inputs.baselines.items():
            z[f"{prefix}z{suffix}"] = _z_pairs(case, part)
        p[f"p{suffix}"] = _p_pairs(case, z[f"z{suffix}"][-1], inputs.baselines[""])
    names = np.array(inputs.names, object)
    n = len(names)
    pairs = {
        "layer": np.full(n * n, layer, np.int32),
        "query": np.repeat(names, n),
        "key": np.tile(names, n),
        **{name: _flat(tensor[-1]) for name, tensor in (values | z).items()},
        **p,
    }
    return {
        "pairs": pairs,
        "heads": _heads(inputs, layer, list(cases.values())),
        "top": joined([_top(names, layer, values | z, by) for by in z]),
        "beyond": joined([_beyond(layer, by, scores) for by, scores in z.items()]),
        "written": written(inputs, layer, [one.added for one in seen]),
    }


def whole_tables(parts: Sequence[Mapping[str, Columns]]) -> dict[str, pa.Table]:
    """Return the tables of all layers.

    p is corrected over all layers (Benjamini and Hochberg): of pairs of different directions, and apart from those of
    directions with themselves, whose p cannot be as small."""
    tables = {name: pa.table(joined([part[name] for part in parts])) for name in parts[0]}
    pairs = tables["pairs"]
    own = column(pairs, "query") == column(pairs, "key")
    for name in {"p", "p_change"}.intersection(pairs.column_names):
        p = column(pairs, name).copy()
        for part in (own, ~own):
            p[part] = benjamini_hochberg(p[part])
        pairs = pairs.set_column(pairs.column_names.index(name), name, pa.array(p))
    return {**tables, "pairs": pairs, "top": _largest(tables["top"])}


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.flatten().cpu().numpy()


def _difference(base: LayerAttention, tuned: LayerAttention) -> LayerAttention:
    return LayerAttention(*(getattr(tuned, one.name) - getattr(base, one.name) for one in fields(LayerAttention)))


def _z_pairs(seen: LayerAttention, part: slice) -> Tensor:
    """Return z of every pair: the weaker of the key among other keys and the query among other queries.

    `part` of the others is compared with. Either alone is large for a whole row or column at once: for all pairs of a
    key at which every query looks. Both baselines are linear in what is random, and so normal. A direction with itself
    is ranked among random ones with themselves.
    """
    n = seen.pairs.shape[1]
    by_key = _z(seen.pairs, seen.keys[:, :, part], 2)
    by_query = _z(seen.pairs, seen.queries[:, part], 1)
    weaker = torch.minimum(by_key.abs(), by_query.abs()) * by_key.sign()
    z = torch.where(by_key.sign() == by_query.sign(), weaker, 0.0)
    z.diagonal(dim1=1, dim2=2).copy_(z_by_rank(seen.own[:, :n], seen.own[:, n:][:, part]))
    return z


def _p_pairs(seen: LayerAttention, z: Tensor, part: slice) -> np.ndarray:
    """Return p of all heads together, before correction. A direction's affinity for itself has tails that no z
    describes: there p counts random directions."""
    n = len(z)
    p = torch.special.erfc(z.abs().double() / 2**0.5)
    p.diagonal().copy_(p_by_rank(seen.own[-1, :n], seen.own[-1, n:][part]))
    return _flat(p)


def _z(values: Tensor, baseline: Tensor, axis: int) -> Tensor:
    spread = baseline.std(axis, keepdim=True)
    return torch.where(spread > 0, (values - baseline.mean(axis, keepdim=True)) / spread, 0.0)


def _heads(inputs: Inputs, layer: int, seen: Sequence[LayerAttention]) -> Columns:
    """Return every direction's rows in every head, of the base checkpoint and of the change, if there is one."""
    heads = len(seen[0].own)
    n = len(inputs)
    found: Columns = {
        "layer": np.full(heads * n, layer, np.int32),
        "head": np.repeat(_numbers(heads), n),
        "name": np.tile(np.array(inputs.names, object), heads),
        "group": np.tile(np.array(inputs.groups, object), heads),
        "opposite": _flat(seen[0].opposite),
    }
    for measure, field in (("self", "own"), ("write", "write"), ("write_norm", "write_norm")):
        for name, one in zip((measure, f"change_{measure}"), seen, strict=False):
            values: Tensor = getattr(one, field)
            found[name] = _flat(values[:, :n])
            for prefix, part in inputs.baselines.items():
                found[f"{prefix}z_{name}"] = _flat(z_by_rank(values[:, :n], values[:, n:][:, part]))
    return found


def _numbers(heads: int) -> np.ndarray:
    return np.array([*range(heads - 1), ALL], np.int32)


def _top(names: np.ndarray, layer: int, values: Mapping[str, Tensor], by: str) -> Columns:
    """Return the pairs of different directions with the largest |z| of every single head."""
    z = values[by][:-1].abs()
    heads, n, _ = z.shape
    z = z.masked_fill(torch.eye(n, dtype=torch.bool, device=z.device), -1.0).flatten(1)
    order = z.sort(dim=1, descending=True, stable=True).indices  # equal ones in their order, on every device
    best = order[:, : min(_TOP_OF_HEAD, n * n - n)]
    at = _flat(best)
    return {
        "by": np.full(len(at), by, object),
        "layer": np.full(len(at), layer, np.int32),
        "head": np.repeat(_numbers(heads + 1)[:-1], best.shape[1]),
        "query": names[at // n],
        "key": names[at % n],
        **{name: _flat(tensor[:-1].flatten(1).gather(1, best)) for name, tensor in values.items()},
    }


def _beyond(layer: int, by: str, z: Tensor) -> Columns:
    """Return the percentage of extreme pairs of different directions; of random ones it is 0.27 at most."""
    heads, n, _ = z.shape
    extreme = z.abs() > BEYOND
    extreme.diagonal(dim1=1, dim2=2).fill_(False)
    return {
        "by": np.full(heads, by, object),
        "layer": np.full(heads, layer, np.int32),
        "head": _numbers(heads),
        "percent": 100 * extreme.sum((1, 2)).cpu().numpy() / max(n * n - n, 1),
    }


def _largest(top: pa.Table) -> pa.Table:
    """Return the pairs with the largest |z| of all layers and heads together, largest first."""
    kept = []
    for by in dict.fromkeys(top["by"].to_pylist()):
        mine = where(top, "by", by)
        kept.append(mine.take(np.argsort(-np.abs(column(mine, by)), kind="stable")[:_TOP]))
    return pa.concat_tables(kept) if kept else top
