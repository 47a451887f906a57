"""The tree of concepts as indices.

Lenses are ordered by level, then by the place of their first parent, then as given. So a level is a slice, and so are
the children of a concept, unless they lie on different levels or some have it only as a second parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from steerscope.lenses.spec import Concept, HierarchySummary
from steerscope.specs.errors import Problem

Children = slice | tuple[int, ...]


def problems_of(concepts: Sequence[Concept]) -> list[Problem]:
    """Return problems of ids that are not unique and of parents that are missing, too deep, or their own ancestors."""
    found: list[Problem] = []
    if not concepts:
        found.append(Problem("concepts", "there are none", "give at least one"))
    by_id: dict[str, Concept] = {}
    for concept in concepts:
        if concept.id in by_id:
            found.append(Problem(f"concept {concept.id!r}", "two concepts have this id", "give each its own"))
        by_id[concept.id] = concept
    in_cycle = _cycles(by_id)
    for cycle in in_cycle:
        path = " → ".join([*cycle, cycle[0]])
        found.append(Problem(f"concept {cycle[0]!r}", f"is its own ancestor ({path})", "break the cycle"))
    cyclic = {identity for cycle in in_cycle for identity in cycle}
    for concept in concepts:
        where = f"concept {concept.id!r}"
        if len(set(concept.parents)) < len(concept.parents):
            found.append(Problem(where, "names a parent twice", "name each once"))
        for parent in dict.fromkeys(concept.parents):
            if parent not in by_id:
                found.append(Problem(where, f"its parent {parent!r} is not in the pack", "add it or leave it out"))
            elif by_id[parent].level >= concept.level and not (parent in cyclic and concept.id in cyclic):
                what = f"is at level {concept.level}, its parent {parent!r} at {by_id[parent].level}"
                found.append(Problem(where, what, "a parent's level must be smaller"))
    return found


def _cycles(by_id: dict[str, Concept]) -> list[list[str]]:
    """Return cycles, each from child to parent, that share no concept."""
    parents = {identity: [p for p in concept.parents if p in by_id] for identity, concept in by_id.items()}
    cycles: list[list[str]] = []
    while True:
        try:
            TopologicalSorter(parents).prepare()
        except CycleError as error:
            cycles.append(error.args[1][:0:-1])
            for identity in cycles[-1]:
                del parents[identity]
        else:
            return cycles


def order(concepts: Sequence[Concept]) -> list[int]:
    """Return for each place of a pack the index of its concept. Concepts in that order stay as they are."""
    by_level: dict[int, list[int]] = {}
    for i, concept in enumerate(concepts):
        by_level.setdefault(concept.level, []).append(i)
    place: dict[str, int] = {}
    result: list[int] = []
    for level in sorted(by_level):
        members = by_level[level]
        members.sort(key=lambda i: place[concepts[i].parents[0]] if concepts[i].parents else -1)
        for i in members:
            place[concepts[i].id] = len(result)
            result.append(i)
    return result


@dataclass(frozen=True)
class Hierarchy:
    """Levels, parents and children of valid, ordered concepts, as indices."""

    levels: tuple[slice, ...]
    parents: tuple[tuple[int, ...], ...]
    children: tuple[Children, ...]

    @classmethod
    def of(cls, concepts: Sequence[Concept]) -> "Hierarchy":
        place = {concept.id: i for i, concept in enumerate(concepts)}
        parents = tuple(tuple(place[parent] for parent in concept.parents) for concept in concepts)
        members: list[list[int]] = [[] for _ in concepts]
        counts = [0] * (max(concept.level for concept in concepts) + 1)
        for i, concept in enumerate(concepts):
            counts[concept.level] += 1
            for parent in parents[i]:
                members[parent].append(i)
        ends = [sum(counts[: level + 1]) for level in range(len(counts))]
        levels = tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))
        return cls(levels, parents, tuple(as_slice(each) for each in members))

    def summary(self) -> HierarchySummary:
        return HierarchySummary(
            levels=tuple(level.stop - level.start for level in self.levels),
            roots=sum(not parents for parents in self.parents),
            several_parents=sum(len(parents) > 1 for parents in self.parents),
        )

    def path(self, i: int) -> tuple[int, ...]:
        """Return the concepts from the root to this one, by first parents."""
        trail = [i]
        while self.parents[trail[-1]]:
            trail.append(self.parents[trail[-1]][0])
        return tuple(reversed(trail))


def indices(children: Children) -> tuple[int, ...]:
    """Return children as indices."""
    return tuple(range(children.start, children.stop)) if isinstance(children, slice) else children


def as_slice(indices: Sequence[int]) -> Children:
    """Return indices as a slice if they are consecutive and ascending."""
    if not indices:
        return slice(0, 0)
    found = range(indices[0], indices[0] + len(indices))
    return slice(found.start, found.stop) if list(indices) == list(found) else tuple(indices)
