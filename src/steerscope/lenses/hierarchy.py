"""The tree of concepts as indices.

Lenses are ordered by level, then by the place of their first parent, then as given. So a level is a slice, and so are
the children of a concept, unless they lie on different levels or some have it only as a second parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from steerscope.lenses.spec import Concept
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
    cycle = _cycle(by_id)
    if cycle:
        found.append(Problem(f"concept {cycle[0]!r}", f"is its own ancestor ({' → '.join(cycle)})", "break the cycle"))
    for concept in concepts:
        where = f"concept {concept.id!r}"
        if len(set(concept.parents)) < len(concept.parents):
            found.append(Problem(where, "names a parent twice", "name each once"))
        for parent in dict.fromkeys(concept.parents):
            if parent not in by_id:
                found.append(Problem(where, f"its parent {parent!r} is not in the pack", "add it or leave it out"))
            elif by_id[parent].level >= concept.level and not {parent, concept.id} <= set(cycle):
                what = f"is at level {concept.level}, its parent {parent!r} at {by_id[parent].level}"
                found.append(Problem(where, what, "a parent's level must be smaller"))
    return found


def _cycle(by_id: dict[str, Concept]) -> list[str]:
    """Return a cycle from child to parent, if there is one. Of others, the levels are reported."""
    try:
        TopologicalSorter({identity: concept.parents for identity, concept in by_id.items()}).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


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
