"""Attention: which directions look at which (QK), and what looking at a direction writes (VO), head by head.

The affinity of directions a and b is the logit with which a token whose stream is a, `distance` positions behind one
whose stream is b, looks at that token: behind norms, q/k norms and RoPE, with scaling and soft cap. Distance 0 is
without RoPE, which rotates both alike then. An affinity is extreme when it is so both among those of a with random keys
and among those of random queries with b; a's own is held against that of random directions with themselves.
"""

from typing import Unpack

import torch
from torch import Tensor

from steerscope.analysis.attention_tables import ALL, LayerAttention, columns, whole_tables
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import Inputs, LayerPass, PassOptions, along, least_p
from steerscope.analysis.onelayer import Heads, OneLayer
from steerscope.analysis.results import AnalysisResult, where
from steerscope.specs.errors import InvalidRequest, Problem


def logits(queries: Heads, keys: Heads, paired: bool = False) -> Tensor:
    """Return [heads, queries, keys], or, `paired`, [heads, rows] of each query with the key of the same row."""
    shared = keys.keys.repeat_interleave(keys.group, 1)
    found = torch.einsum("nhd,nhd->hn" if paired else "nhd,mhd->hnm", queries.queries, shared) * queries.scaling
    cap = queries.softcap
    return found if cap is None else torch.tanh(found / cap) * cap


def see(model: OneLayer, inputs: Inputs, distance: int) -> LayerAttention:
    """Return what the layer whose weights `model` holds makes of the inputs."""
    n = len(inputs)
    asking = torch.cat([inputs.named, inputs.others])
    queries = model.heads(asking, torch.full((len(asking),), distance))
    keys = model.heads(asking, torch.zeros(len(asking)))
    mirrored = model.heads(inputs.opposite, torch.zeros(n))
    named = _part(queries, slice(0, n))
    pairs = logits(named, keys)
    asked = logits(_part(queries, slice(n, None)), _part(keys, slice(0, n)))
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


def _part(heads: Heads, rows: slice) -> Heads:
    return Heads(heads.queries[rows], heads.keys[rows], heads.values[rows], heads.scaling, heads.softcap)


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


def attention_pass(
    base: Checkpoint,
    directions: Directions,
    tuned: Checkpoint | None = None,
    *,
    distance: int = 0,
    **options: Unpack[PassOptions],
) -> AnalysisResult:
    """Return the tables `pairs` (all heads together), `heads`, `top` (pairs of single heads), `beyond`, `written`,
    `ranking`.

    Directions of layer i go through layer i, or those of `layer` through all. z is against `random` random directions,
    and against those of `against`, if given.
    """
    longest = getattr(base.config, "max_position_embeddings", None)
    if distance < 0 or (longest and distance >= longest):
        what = f"{distance} is out of range"
        raise InvalidRequest([Problem("distance", what, f"{base.name} reaches from 0 to {(longest or 0) - 1}")])
    run = LayerPass(base=base, directions=directions, tuned=tuned, **options)
    parts = [
        columns(inputs, number, seen)
        for number, inputs, seen in run.layers("attention", lambda model, inputs: see(model, inputs, distance))
    ]
    tables = whole_tables(parts)
    together = where(tables["heads"], "head", ALL)
    measures = ("self", "write")
    ranked = (*measures, "change_self", "change_write") if tuned else measures
    self_p = least_p(len(directions.names) * len(parts), run.random)
    more = {"distance": distance, "self_p": self_p}
    return run.result("attention", "attention", tables, together, ranked, measures, **more)
