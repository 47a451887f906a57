"""Attention: which directions look at which (QK), and what looking at a direction writes (VO), head by head.

The affinity of directions a and b is the logit with which a token whose stream is a, `distance` positions behind one
whose stream is b, looks at that token: behind norms, q/k norms and RoPE, with scaling and soft cap. Distance 0 is
without RoPE, which rotates both alike then. An affinity is extreme when it is so both among those of a with random keys
and among those of random queries with b; a's own is held against that of random directions with themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import Inputs, LayerPass, along, p_by_rank, with_z, written, z_by_rank
from steerscope.analysis.onelayer import Heads, OneLayer
from steerscope.analysis.results import AnalysisResult, column, long_table, where
from steerscope.analysis.statistics import benjamini_hochberg
from steerscope.specs.errors import InvalidRequest, Problem

ALL = -1  # in place of a head's number: all heads together
BEYOND = 3.0  # z-scores that few random directions reach
_TOP = 200
_TOP_OF_HEAD = 20


def attention_pass(
    base: Checkpoint, directions: Directions, tuned: Checkpoint | None = None, *, distance: int = 0, **options: Any
) -> AnalysisResult:
    """Return the tables `pairs` (all heads together), `heads`, `top` (pairs of single heads), `beyond`, `written`,
    `ranking`.

    Directions of layer i go through layer i, or those of `layer` through all. z is against `random` random directions,
    and against those of `against`, if given; see `LayerPass` for all options.
    """
    longest = getattr(base.config, "max_position_embeddings", None)
    if distance < 0 or (longest and distance >= longest):
        what = f"{distance} is out of range"
        raise InvalidRequest([Problem("distance", what, f"{base.name} reaches from 0 to {(longest or 0) - 1}")])
    run = LayerPass(base=base, directions=directions, tuned=tuned, **options)
    parts = [
        layer_tables(inputs, number, seen)
        for number, inputs, seen in run.layers("attention", lambda model, inputs: see(model, inputs, distance))
    ]
    tables = {name: pa.concat_tables([part[name] for part in parts]) for name in parts[0]}
    tables |= {"pairs": _corrected(tables["pairs"]), "top": _largest(tables["top"])}
    together = where(tables["heads"], "head", ALL)
    ranked = ("self", "write", "change_self", "change_write") if tuned else ("self", "write")
    return run.result("attention", "attention", tables, together, ranked, distance=distance)


# --- one layer of one checkpoint


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


def see(model: OneLayer, inputs: Inputs, distance: int) -> LayerAttention:
    """Return what the layer whose weights `model` holds makes of the inputs."""
    n = len(inputs)
    asking = torch.cat([inputs.named, inputs.others])
    queries = model.heads(asking, torch.full((len(asking),), distance))
    keys = model.heads(asking, torch.zeros(len(asking)))
    mirrored = model.heads(inputs.opposite, torch.zeros(n))
    named = queries.part(slice(0, n))
    pairs = logits(named, keys)
    asked = logits(queries.part(slice(n, None)), keys.part(slice(0, n)))
    write, norm = _writes(model, keys, asking)
    return LayerAttention(
        pairs=_with_sum(pairs[:, :, :n]),
        keys=_with_sum(pairs[:, :, n:]),
        queries=_with_sum(asked),
        own=_with_sum(logits(queries, keys, paired=True)),
        opposite=_with_sum(logits(named, mirrored, paired=True)),
        write=write,
        write_norm=norm,
        added=model.attention(inputs.rows),
    )


def logits(queries: Heads, keys: Heads, paired: bool = False) -> Tensor:
    """Return [heads, queries, keys], or, `paired`, [heads, rows] of each query with the key of the same row."""
    shared = keys.keys.repeat_interleave(keys.group, 1)
    found = torch.einsum("nhd,nhd->hn" if paired else "nhd,mhd->hnm", queries.queries, shared) * queries.scaling
    cap = queries.softcap
    return found if cap is None else torch.tanh(found / cap) * cap


def _with_sum(heads: Tensor) -> Tensor:
    return torch.cat([heads, heads.sum(0, keepdim=True)])


def _writes(model: OneLayer, heads: Heads, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is written along each row and its length, per head and by all; the bias counts with all of them."""
    out = model.writing()
    units = torch.nn.functional.normalize(rows, dim=1).to(out.bias.device)
    total = out.bias.expand(len(rows), -1)
    parts = []
    for head in range(len(out.matrix)):
        written_by = heads.values[:, head // heads.group] @ out.matrix[head]
        total = total + written_by
        parts.append(along(units, written_by))
    parts.append(along(units, total))
    return torch.stack([part["parallel"] for part in parts]), torch.stack([part["norm"] for part in parts])


# --- tables


def layer_tables(inputs: Inputs, layer: int, seen: Sequence[LayerAttention]) -> dict[str, pa.Table]:
    """Return one layer's rows of every table; `seen` in the base and, if there is one, the tuned checkpoint."""
    cases = {"affinity": seen[0]}
    if len(seen) > 1:
        names = [one.name for one in fields(LayerAttention)]
        cases["change"] = LayerAttention(*(getattr(seen[1], name) - getattr(seen[0], name) for name in names))
    values = {name: case.pairs for name, case in cases.items()}
    z: dict[str, Tensor] = {}
    p: dict[str, Tensor] = {}
    for name, case in cases.items():
        suffix = "_change" if name == "change" else ""
        for prefix, part in inputs.baselines.items():
            z[f"{prefix}z{suffix}"] = _z_pairs(case, part)
        p[f"p{suffix}"] = _p_pairs(case, z[f"z{suffix}"][-1], inputs.baselines[""])
    at = {"layer": np.array([layer], np.int32)}
    numbers = np.array([*range(len(seen[0].own) - 1), ALL], np.int32)
    pairs = {name: tensor[-1].cpu().numpy() for name, tensor in (values | z).items()}
    pairs |= {name: tensor.cpu().numpy() for name, tensor in p.items()}
    beyond = [long_table([{"by": [by], **at}, {"head": numbers}], {"percent": _beyond(one)}) for by, one in z.items()]
    heads = _heads(inputs, list(cases.values()))
    return {
        "pairs": long_table([at, {"query": inputs.names}, {"key": inputs.names}], pairs),
        "heads": long_table([at, {"head": numbers}, {"name": inputs.names, "group": inputs.groups}], heads),
        "top": pa.concat_tables([_top(inputs.names, layer, values | z, by) for by in z]),
        "beyond": pa.concat_tables(beyond),
        "written": written(inputs, layer, [one.added for one in seen]),
    }


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


def _z(values: Tensor, baseline: Tensor, axis: int) -> Tensor:
    spread = baseline.std(axis, keepdim=True)
    return torch.where(spread > 0, (values - baseline.mean(axis, keepdim=True)) / spread, 0.0)


def _p_pairs(seen: LayerAttention, z: Tensor, part: slice) -> Tensor:
    """Return p of all heads together, before correction. A direction's affinity for itself has tails that no z
    describes: there p counts random directions."""
    n = len(z)
    p = torch.special.erfc(z.abs().double() / 2**0.5)
    p.diagonal().copy_(p_by_rank(seen.own[-1, :n], seen.own[-1, n:][part]))
    return p


def _heads(inputs: Inputs, seen: Sequence[LayerAttention]) -> dict[str, np.ndarray]:
    """Return every direction's numbers in every head, of the base checkpoint and of the change, if there is one."""
    found = {"opposite": seen[0].opposite.cpu().numpy()}
    for measure, field in (("self", "own"), ("write", "write"), ("write_norm", "write_norm")):
        for name, one in zip((measure, f"change_{measure}"), seen, strict=False):
            found |= with_z(inputs, name, getattr(one, field), len(inputs))
    return found


def _top(names: Sequence[str], layer: int, values: Mapping[str, Tensor], by: str) -> pa.Table:
    """Return the pairs of different directions with the largest |z| of every single head."""
    z = values[by][:-1].abs()
    heads, n, _ = z.shape
    z = z.masked_fill(torch.eye(n, dtype=torch.bool, device=z.device), -1.0).flatten(1)
    order = z.sort(dim=1, descending=True, stable=True).indices  # equal ones in their order, on every device
    best = order[:, : min(_TOP_OF_HEAD, n * n - n)]
    at = best.flatten().cpu().numpy()
    named = pa.array(names)
    columns = {
        "by": pa.array([by] * len(at), pa.string()),
        "layer": np.full(len(at), layer, np.int32),
        "head": np.repeat(np.arange(heads, dtype=np.int32), best.shape[1]),
        "query": named.take(at // n),
        "key": named.take(at % n),
    }
    measured = {name: tensor[:-1].flatten(1).gather(1, best).flatten() for name, tensor in values.items()}
    return pa.table(columns | {name: tensor.cpu().numpy() for name, tensor in measured.items()})


def _beyond(z: Tensor) -> np.ndarray:
    """Return the percentage of extreme pairs of different directions per head; of random ones it is 0.27 at most."""
    n = z.shape[1]
    extreme = z.abs() > BEYOND
    extreme.diagonal(dim1=1, dim2=2).fill_(False)
    return 100 * extreme.sum((1, 2)).cpu().numpy() / max(n * n - n, 1)


def _corrected(pairs: pa.Table) -> pa.Table:
    """Correct p over all layers (Benjamini and Hochberg): of pairs of different directions, and apart from those of
    directions with themselves, whose p cannot be as small."""
    own = column(pairs, "query") == column(pairs, "key")
    for name in {"p", "p_change"}.intersection(pairs.column_names):
        p = column(pairs, name).copy()
        for part in (own, ~own):
            p[part] = benjamini_hochberg(p[part])
        pairs = pairs.set_column(pairs.column_names.index(name), name, pa.array(p))
    return pairs


def _largest(top: pa.Table) -> pa.Table:
    """Return the pairs with the largest |z| of all layers and heads together, largest first."""
    kept = []
    for by in dict.fromkeys(top["by"].to_pylist()):
        mine = where(top, "by", by)
        kept.append(mine.take(np.argsort(-np.abs(column(mine, by)), kind="stable")[:_TOP]))
    return pa.concat_tables(kept) if kept else top
