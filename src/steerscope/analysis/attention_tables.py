"""From what was seen of attention, layer by layer, to tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from steerscope.analysis.layerwise import (
    Columns,
    Inputs,
    component_ranks,
    group_tests,
    p_by_rank,
    peaks,
    ranking,
    table_of,
    where,
    written,
    z_by_rank,
)
from steerscope.analysis.statistics import benjamini_hochberg
from steerscope.vectors.vector import Json

ALL = -1  # in place of a head's number: all heads together
BEYOND = 3.0  # z-scores that few random directions reach
_TOP, _TOP_OF_HEAD = 200, 20


@dataclass(frozen=True, slots=True)
class Seen:
    """One layer of one checkpoint. n named directions and r to compare with (random ones, those given); the last of the
    heads is all of them together."""

    pairs: Tensor  # [heads + 1, n, n]: affinity of query and key
    keys: Tensor  # [heads + 1, n, r]: of queries with those as keys
    queries: Tensor  # [heads + 1, r, n]: of those as queries with keys
    own: Tensor  # [heads + 1, n + r]: of each with itself
    opposite: Tensor  # [heads + 1, n]: of each with its opposite as key
    write: Tensor  # [heads + 1, n + r]: what looking at each writes along it
    write_norm: Tensor  # [heads + 1, n + r]: length of what is written, before a post-norm
    added: Tensor  # [2n + r, hidden]: what is added to the stream when all heads look at it


def columns(inputs: Inputs, layer: int, seen: Sequence[Seen]) -> dict[str, Columns]:
    """Rows of one layer for every table; `seen` in the base and, if there is one, the tuned checkpoint."""
    cases = {"affinity": seen[0], **({"change": _difference(*seen)} if len(seen) > 1 else {})}
    values, z, p = {name: one.pairs for name, one in cases.items()}, {}, {}
    for name, one in cases.items():
        suffix = "_change" if name == "change" else ""
        for prefix, part in inputs.baselines.items():
            z[f"{prefix}z{suffix}"] = _z_pairs(one, part)
        p[f"p{suffix}"] = _p_pairs(one, z[f"z{suffix}"][-1], inputs.baselines[""])
    names, n = np.array(inputs.names, object), len(inputs)
    together = {name: tensor[-1].flatten().cpu().numpy() for name, tensor in (values | z).items()}
    pairs = {
        "layer": np.full(n * n, layer, np.int32),
        "query": np.repeat(names, n),
        "key": np.tile(names, n),
        **together,
        **p,
    }
    return {
        "pairs": pairs,
        "heads": _heads(inputs, layer, list(cases.values())),
        "top": _joined([_top(names, layer, values | z, by) for by in z]),
        "beyond": _joined([_beyond(layer, by, scores) for by, scores in z.items()]),
        "written": written(inputs, layer, [one.added for one in seen]),
    }


def finished(parts: Mapping[str, Sequence[Columns]]) -> tuple[dict[str, pa.Table], dict[str, Json]]:
    """Whole tables, and what is found in them. p is corrected over all layers (Benjamini and Hochberg): of pairs of
    different directions, and apart from those of directions with themselves, whose p cannot be as small."""
    tables = {name: table_of(columns) for name, columns in parts.items()}
    pairs = tables["pairs"]
    own = pairs["query"].to_numpy(zero_copy_only=False) == pairs["key"].to_numpy(zero_copy_only=False)
    for name in (name for name in ("p", "p_change") if name in pairs.column_names):
        p = pairs[name].to_numpy().copy()
        for part in (own, ~own):
            p[part] = benjamini_hochberg(p[part])
        pairs = pairs.set_column(pairs.column_names.index(name), name, pa.array(p))
    tables["pairs"] = pairs
    tables["top"] = _largest(tables["top"])
    tuned = "change" in pairs.column_names
    together = where(tables["heads"], "head", ALL)
    tables["ranking"] = ranking(together, ("self", "write", *(("change_self", "change_write") if tuned else ())))
    return tables, {
        "focus": peaks(tables["written"], ("change", "turn") if tuned else ("norm", "parallel")),
        "groups": group_tests(tables["ranking"]),
        "components": component_ranks(together, ("z_self", "z_write")),
    }


def _difference(base: Seen, tuned: Seen) -> Seen:
    return Seen(*(getattr(tuned, field.name) - getattr(base, field.name) for field in fields(Seen)))


def _z_pairs(seen: Seen, part: slice) -> Tensor:
    """Of different directions the weaker of two: the key among other keys, the query among other queries, `part` of
    those to compare with.

    Either alone is large for a whole row or column at once: whatever a key that everybody looks at is paired with. Both
    baselines are linear in what is random, and so normal. A direction with itself is ranked among random ones with
    themselves.
    """
    n = seen.pairs.shape[1]
    by_key, by_query = _z(seen.pairs, seen.keys[:, :, part], 2), _z(seen.pairs, seen.queries[:, part], 1)
    weaker = torch.minimum(by_key.abs(), by_query.abs()) * by_key.sign()
    z = torch.where(by_key.sign() == by_query.sign(), weaker, 0.0)
    z.diagonal(dim1=1, dim2=2).copy_(z_by_rank(seen.own[:, :n], seen.own[:, n:][:, part]))
    return z


def _p_pairs(seen: Seen, z: Tensor, part: slice) -> np.ndarray:
    """Of all heads together, before correction. A direction's affinity for itself has tails that no z tells: there p
    counts random directions."""
    p, n = torch.special.erfc(z.abs().double() / 2**0.5), len(z)
    p.diagonal().copy_(p_by_rank(seen.own[-1, :n], seen.own[-1, n:][part]))
    return p.flatten().cpu().numpy()


def _z(values: Tensor, baseline: Tensor, axis: int) -> Tensor:
    spread = baseline.std(axis, keepdim=True)
    return torch.where(spread > 0, (values - baseline.mean(axis, keepdim=True)) / spread, 0.0)


def _heads(inputs: Inputs, layer: int, seen: Sequence[Seen]) -> Columns:
    """Of the base checkpoint, and of the change, if there is one."""
    heads, n = len(seen[0].own), len(inputs)
    found: Columns = {
        "layer": np.full(heads * n, layer, np.int32),
        "head": np.repeat(_numbers(heads), n),
        "name": np.tile(np.array(inputs.names, object), heads),
        "group": np.tile(np.array(inputs.groups, object), heads),
        "opposite": seen[0].opposite.flatten().cpu().numpy(),
    }
    for measure, field in (("self", "own"), ("write", "write"), ("write_norm", "write_norm")):
        for name, one in zip((measure, f"change_{measure}"), seen, strict=False):
            values: Tensor = getattr(one, field)
            found[name] = values[:, :n].flatten().cpu().numpy()
            for prefix, part in inputs.baselines.items():
                z = z_by_rank(values[:, :n], values[:, n:][:, part])
                found[f"{prefix}z_{name}"] = z.flatten().cpu().numpy()
    return found


def _numbers(heads: int) -> np.ndarray:
    return np.array([*range(heads - 1), ALL], np.int32)


def _top(names: np.ndarray, layer: int, values: Mapping[str, Tensor], by: str) -> Columns:
    """The pairs of different directions with the largest |z| of every single head."""
    z = values[by][:-1].abs()
    heads, n, _ = z.shape
    z = z.masked_fill(torch.eye(n, dtype=torch.bool, device=z.device), -1.0).flatten(1)
    order = z.sort(dim=1, descending=True, stable=True).indices  # equal ones in their order, on every device
    best = order[:, : min(_TOP_OF_HEAD, n * n - n)]
    at = best.flatten().cpu().numpy()
    return {
        "by": np.full(len(at), by, object),
        "layer": np.full(len(at), layer, np.int32),
        "head": np.repeat(_numbers(heads + 1)[:-1], best.shape[1]),
        "query": names[at // n],
        "key": names[at % n],
        **{name: tensor[:-1].flatten(1).gather(1, best).flatten().cpu().numpy() for name, tensor in values.items()},
    }


def _beyond(layer: int, by: str, z: Tensor) -> Columns:
    """How many of the pairs of different directions are extreme, in per cent; of random ones, 0.27 at most."""
    heads, n, _ = z.shape
    extreme = z.abs() > BEYOND
    extreme.diagonal(dim1=1, dim2=2).fill_(False)
    return {
        "by": np.full(heads, by, object),
        "layer": np.full(heads, layer, np.int32),
        "head": _numbers(heads),
        "percent": 100 * extreme.sum((1, 2)).cpu().numpy() / max(n * n - n, 1),
    }


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _largest(top: pa.Table) -> pa.Table:
    """Of all layers and heads together, largest |z| first."""
    kept = []
    for by in dict.fromkeys(top["by"].to_pylist()):
        mine = where(top, "by", by)
        kept.append(mine.take(np.argsort(-np.abs(mine[by].to_numpy()), kind="stable")[:_TOP]))
    return pa.concat_tables(kept) if kept else top
