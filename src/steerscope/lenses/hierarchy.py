"""The tree of concepts as index arithmetic.

Lenses are ordered by level, then by the place of their first parent, then as given. So a level is a slice, and so are
the children of a concept, unless some of them have it only as a second parent or lie on different levels: then they
are a list of indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steerscope.lenses.spec import Concept, HierarchySummary
from steerscope.specs.errors import Problem

Children = slice | tuple[int, ...]


def problems_of(concepts: Sequence[Concept]) -> list[Problem]:
    """Ids that are not unique, parents that do not exist, lie too deep, or are reached from themselves."""
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
    """Each cycle of parents once. Without recursion: a chain may be as long as the pack."""
    cycles: list[list[str]] = []
    done: set[str] = set()
    for start in by_id:
        trail: list[str] = []
        place: dict[str, int] = {}
        stack: list[tuple[str, int]] = [(start, 0)]
        while stack:
            here, turn = stack.pop()
            if turn == 0:
                if here in place:
                    cycles.append(trail[place[here] :])
                    continue
                if here in done:
                    continue
                place[here] = len(trail)
                trail.append(here)
            parents = [parent for parent in by_id[here].parents if parent in by_id]
            if turn < len(parents):
                stack.append((here, turn + 1))
                stack.append((parents[turn], 0))
            else:
                done.add(here)
                trail.pop()
                del place[here]
    return cycles


def order(concepts: Sequence[Concept]) -> list[int]:
    """Where the lens at each place of a pack comes from. Concepts in that order already stay as they are."""
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
    """Of concepts that are valid and in order."""

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
        return cls(levels, parents, tuple(_as_slice(each) for each in members))

    def summary(self) -> HierarchySummary:
        return HierarchySummary(
            levels=tuple(level.stop - level.start for level in self.levels),
            roots=sum(not parents for parents in self.parents),
            several_parents=sum(len(parents) > 1 for parents in self.parents),
        )

    def path(self, i: int) -> tuple[int, ...]:
        """From the root to the concept, by first parents."""
        trail = [i]
        while self.parents[trail[-1]]:
            trail.append(self.parents[trail[-1]][0])
        return tuple(reversed(trail))


def indices(children: Children) -> tuple[int, ...]:
    return tuple(range(children.start, children.stop)) if isinstance(children, slice) else children


def _as_slice(members: list[int]) -> Children:
    if not members:
        return slice(0, 0)
    together = members[-1] - members[0] + 1 == len(members)
    return slice(members[0], members[-1] + 1) if together else tuple(members)
