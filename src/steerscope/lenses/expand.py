"""Expansion: find the concepts of a row without scoring every lens.

Score the base levels, take the top k, score their children, take the top k of all scores so far, and so on, `depth`
times or until the top k has no new concept. A concept is then left out if one of its children is in the top k too,
because the child is more specific. Places that become free stay empty.

A score of 0 is noise (see calibration): it is neither followed nor reported. Equal scores are ordered as the lenses
are. Results are the same whether all weights are on the device (`BankExpander`) or not (`Tiers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.lenses.bank import Bank, best_of
from steerscope.lenses.hierarchy import indices
from steerscope.lenses.pack import Pack
from steerscope.lenses.spec import Concept
from steerscope.specs.errors import InvalidRequest, Problem

MOST_ROWS = 256  # expanded together: their scores of all lenses are in memory


class Expanded(NamedTuple):
    """Results of n rows: `values` and `lenses` [n, k], all `scores` and the concepts whose groups were used
    [n, lenses]."""

    values: Tensor
    lenses: Tensor
    scores: Tensor
    used: Tensor


class Groups:
    """The base levels of a pack, and the group of each concept: its children below the base levels."""

    def __init__(self, pack: Pack, base_levels: int, device: torch.device) -> None:
        if not 1 <= base_levels <= pack.levels:
            what = f"{base_levels} levels of {pack.levels}"
            raise InvalidRequest([Problem("base_levels", what, f"choose 1–{pack.levels}")])
        if pack.info.architecture.output == "topk":
            what = "the output topk compares all lenses of a row"
            raise InvalidRequest([Problem("pack", what, "use Bank.top, which scores them all")])
        self.pack = pack
        self.base = range(pack.level(base_levels - 1).stop)
        self.steps = pack.levels - base_levels  # each step scores a deeper level
        self._members = [
            tuple(i for i in indices(pack.children(parent)) if i not in self.base) for parent in range(len(pack))
        ]
        edges = [(child, parent) for child, above in enumerate(pack.hierarchy.parents) for parent in above]
        both = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).to(device)
        self.child = both[:, 0].contiguous()
        self.parent = both[:, 1].contiguous()
        self.has_group = torch.tensor([bool(members) for members in self._members], device=device)

    def of(self, parent: int) -> tuple[int, ...]:
        return self._members[parent]


@dataclass(frozen=True)
class Expansion:
    """Top concepts of n rows: `values` and `indices` [n, k], best first; empty places hold 0 and −1.

    `scores` [n, lenses], with `keep_scores`, holds every score that was computed, and −inf elsewhere.
    """

    pack: Pack
    values: Tensor
    indices: Tensor
    scores: Tensor | None = None

    def row(self, i: int) -> list[tuple[Concept, float]]:
        """Return the concepts of row i with their scores, best first."""
        found = zip(self.indices[i].tolist(), self.values[i].tolist(), strict=True)
        return [(self.pack.concepts[lens], value) for lens, value in found if lens >= 0]


def expand_rows(
    groups: Groups, rows: Tensor, top_k: int, depth: int, keep_scores: bool, run: Callable[[Tensor, int, int], Expanded]
) -> Expansion:
    """Expand rows [n, hidden] in parts: `run(rows, top_k, depth)` expands one part."""
    if top_k < 1 or depth < 0:
        raise InvalidRequest([Problem("top_k, depth", f"are {top_k} and {depth}", "give at least 1 and 0")])
    with torch.no_grad():
        parts = [run(part, top_k, depth) for part in rows.split(MOST_ROWS)]
    scores = torch.cat([part.scores for part in parts]) if keep_scores else None
    values, lenses = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "lenses"))
    return Expansion(groups.pack, values, lenses, scores)


def expand(
    groups: Groups, known: Tensor, top_k: int, depth: int, load: Callable[[Sequence[int]], None] | None = None
) -> Expanded:
    """Expand over scores `known` [n, lenses].

    `load`, if given, adds the scores of the groups of some parents to `known` before they are used; the host reads the
    top k for it after every step down. Without it the host reads nothing, so that a CUDA graph can hold the expansion.
    """
    scores = known.clone()
    scores[:, groups.base.stop :] = -torch.inf
    k = min(top_k, scores.shape[1])
    used = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(min(depth, groups.steps)):
        wanted = _wanted(groups, scores, k, used)
        if load is not None:
            parents = wanted.any(0).nonzero().flatten().tolist()
            if not parents:
                break
            load(parents)
        used = used | wanted
        scores = torch.where(_any_over(wanted, groups.parent, groups.child), known, scores)
    values, lenses = _suppress(groups, *best_of(scores, k))
    return Expanded(values, lenses, scores, used)


def _wanted(groups: Groups, scores: Tensor, k: int, used: Tensor) -> Tensor:
    """Mark [n, lenses] the concepts of the top k whose groups come next."""
    best, lenses = best_of(scores, k)
    return torch.zeros_like(used).scatter_(1, lenses, best > 0) & groups.has_group & ~used


def _any_over(flags: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Carry flags [n, lenses] along edges from `source` to `target`."""
    counts = torch.zeros(flags.shape, device=flags.device)
    return counts.index_add_(1, target, flags[:, source].float()) > 0


def _suppress(groups: Groups, values: Tensor, lenses: Tensor) -> tuple[Tensor, Tensor]:
    """Remove concepts with score 0 or a child beside them, and move the others to the front."""
    inside = torch.zeros(len(values), len(groups.pack), dtype=torch.bool, device=values.device)
    inside.scatter_(1, lenses, values > 0)
    covered = _any_over(inside, groups.child, groups.parent).gather(1, lenses)
    kept = (values > 0) & ~covered
    first = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    values = torch.where(kept, values, 0.0)
    lenses = torch.where(kept, lenses, -1)
    return values.gather(1, first), lenses.gather(1, first)


class BankExpander:
    """Expansion with all weights on the device: all lenses are scored, then expanded."""

    def __init__(self, bank: Bank, base_levels: int = 2) -> None:
        if len(bank) != len(bank.pack) or list(bank.lenses) != list(range(len(bank.pack))):
            raise InvalidRequest([Problem("bank", "holds a part of its pack", "make it of the whole pack")])
        self.bank = bank
        self.groups = Groups(bank.pack, base_levels, bank.device)

    def expand(self, rows: Tensor, top_k: int = 10, depth: int = 5, keep_scores: bool = False) -> Expansion:
        """Return the top concepts of rows [n, hidden]."""

        def run(part: Tensor, top_k: int, depth: int) -> Expanded:
            return expand(self.groups, self.bank.scores(part), top_k, depth)

        return expand_rows(self.groups, rows, top_k, depth, keep_scores, run)
