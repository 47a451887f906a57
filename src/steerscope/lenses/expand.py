"""Expansion: find the concepts of a row without scoring every lens.

Score the base levels; take the top k of what is scored; score the children of those; take the top k of all that is
scored by then; and so on, `depth` times or until nothing new is among them. In the end a concept is left out if one of
its children is in the top k beside it: the child says the same, and more. Places that become free stay empty.

A score of 0 is noise (see calibration): it is neither followed nor reported. Equal scores are ordered as the lenses
are. Whether the weights are all there (`Whole`) or come and go (`Tiers`, a `Scorer`) must not change a result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from steerscope.lenses.bank import Bank, best_of
from steerscope.lenses.hierarchy import indices
from steerscope.lenses.pack import Pack
from steerscope.lenses.spec import Concept
from steerscope.specs.errors import InvalidRequest, Problem

_ROWS = 256  # expanded together; their scores over all lenses are in memory


class Scored(NamedTuple):
    """Scores [n, m] of the m lenses `lenses`."""

    lenses: Tensor
    scores: Tensor


class Scorer(Protocol):
    @property
    def groups(self) -> "Groups": ...

    def base(self, rows: Tensor) -> Scored:
        """The lenses of the base levels."""
        ...

    def children(self, rows: Tensor, parents: Sequence[int]) -> Iterable[Scored]:
        """The groups of these parents, in any order, each lens at least once."""
        ...


class Groups:
    """Who is scored when: the base levels at once, and the group of a concept, its children beyond the base."""

    def __init__(self, pack: Pack, base_levels: int, device: torch.device) -> None:
        if not 1 <= base_levels <= pack.levels:
            what = f"{base_levels} levels of {pack.levels}"
            raise InvalidRequest([Problem("base_levels", what, f"choose 1–{pack.levels}")])
        if pack.info.architecture.output == "topk":
            what = "the output topk compares all lenses of a row"
            raise InvalidRequest([Problem("pack", what, "use Bank.top, which scores them all")])
        self.pack = pack
        self.base = range(pack.level(base_levels - 1).stop)
        self.steps = pack.levels - base_levels  # what a step scores lies below what the last one did
        self._members = [
            tuple(i for i in indices(pack.children(parent)) if i not in self.base) for parent in range(len(pack))
        ]
        edges = [(child, parent) for child, above in enumerate(pack.hierarchy.parents) for parent in above]
        both = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).to(device)
        self.child, self.parent = both[:, 0].contiguous(), both[:, 1].contiguous()
        self.has_group = torch.tensor([bool(members) for members in self._members], device=device)

    def of(self, parent: int) -> tuple[int, ...]:
        return self._members[parent]


@dataclass(frozen=True)
class Expansion:
    """`values` and `indices` [n, k], best first; places that are empty hold 0 and −1.

    `scores` [n, lenses], if they were asked for, holds every score that was computed, and −inf elsewhere.
    """

    pack: Pack
    values: Tensor
    indices: Tensor
    scores: Tensor | None = None

    def row(self, i: int) -> list[tuple[Concept, float]]:
        found = zip(self.indices[i].tolist(), self.values[i].tolist(), strict=True)
        return [(self.pack.concepts[lens], value) for lens, value in found if lens >= 0]


@torch.no_grad()
def expand(scorer: Scorer, rows: Tensor, top_k: int = 10, depth: int = 5, keep_scores: bool = False) -> Expansion:
    """Rows [n, hidden] → the top concepts of each. The host looks at the top k after every step down."""
    check(top_k, depth)
    parts = [_expand(scorer, part, top_k, depth) for part in rows.split(_ROWS)]
    return joined(scorer.groups, parts, keep_scores)


def check(top_k: int, depth: int) -> None:
    if top_k < 1 or depth < 0:
        raise InvalidRequest([Problem("top_k, depth", f"are {top_k} and {depth}", "give at least 1 and 0")])


def joined(groups: Groups, parts: Sequence[tuple[Tensor, ...]], keep_scores: bool) -> Expansion:
    """Parts of rows, each with values, lenses and scores."""
    values, found, scores = (torch.cat(column) for column in zip(*parts, strict=True))
    return Expansion(groups.pack, values, found, scores if keep_scores else None)


def _expand(scorer: Scorer, rows: Tensor, top_k: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = scorer.groups
    first = scorer.base(rows)
    scores = torch.full((len(rows), len(groups.pack)), -torch.inf, device=first.scores.device)
    scores[:, first.lenses] = first.scores
    k = min(top_k, scores.shape[1])
    expanded = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(depth):
        wanted = _wanted(groups, scores, k, expanded)
        parents = wanted.any(0).nonzero().flatten().tolist()
        if not parents:
            break
        expanded |= wanted
        asked = _any_over(wanted, groups.parent, groups.child)
        for lenses, found in scorer.children(rows, parents):
            scores[:, lenses] = torch.where(asked[:, lenses], found, scores[:, lenses])
    return *_suppress(groups, *best_of(scores, k), expanded), scores


def expand_known(groups: Groups, known: Tensor, top_k: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same where the scores `known` [n, lenses] of all lenses that may be asked for are there already: the host
    has nothing to decide, and a graph can hold it. → values, lenses, scores, and whose groups [n, lenses] were used."""
    scores = known.clone()
    scores[:, groups.base.stop :] = -torch.inf
    k = min(top_k, scores.shape[1])
    expanded = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(min(depth, groups.steps)):
        wanted = _wanted(groups, scores, k, expanded)
        expanded = expanded | wanted
        scores = torch.where(_any_over(wanted, groups.parent, groups.child), known, scores)
    return *_suppress(groups, *best_of(scores, k), expanded), scores, expanded


def _wanted(groups: Groups, scores: Tensor, k: int, expanded: Tensor) -> Tensor:
    """Of the top k those [n, lenses] whose groups come next."""
    best, lenses = best_of(scores, k)
    return torch.zeros_like(expanded).scatter_(1, lenses, best > 0) & groups.has_group & ~expanded


def _any_over(flags: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Flags [n, lenses] carried along edges from `source` to `target`."""
    counts = torch.zeros(flags.shape, device=flags.device)
    return counts.index_add_(1, target, flags[:, source].float()) > 0


def _suppress(groups: Groups, values: Tensor, lenses: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    inside = torch.zeros_like(like).scatter_(1, lenses, values > 0)
    covered = _any_over(inside, groups.child, groups.parent).gather(1, lenses)
    kept = (values > 0) & ~covered
    first = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    values, lenses = torch.where(kept, values, 0.0), torch.where(kept, lenses, -1)
    return values.gather(1, first), lenses.gather(1, first)


class Whole:
    """Expansion with all weights on the device: everything is scored at once, then expanded."""

    def __init__(self, bank: Bank, base_levels: int = 2) -> None:
        if len(bank) != len(bank.pack) or list(bank.lenses) != list(range(len(bank.pack))):
            raise InvalidRequest([Problem("bank", "holds a part of its pack", "make it of the whole pack")])
        self.bank, self.groups = bank, Groups(bank.pack, base_levels, bank.device)

    @torch.no_grad()
    def expand(self, rows: Tensor, top_k: int = 10, depth: int = 5, keep_scores: bool = False) -> Expansion:
        check(top_k, depth)
        parts = [expand_known(self.groups, self.bank.scores(part), top_k, depth)[:3] for part in rows.split(_ROWS)]
        return joined(self.groups, parts, keep_scores)
