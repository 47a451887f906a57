"""Read the hierarchy of a HatCat pack from those of its files that exist. See hatcat.py."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from steerscope.files import reading


class Record(NamedTuple):
    """A concept. HatCat calls its `level` a layer."""

    name: str
    level: int

    @property
    def id(self) -> str:
        return f"{self.name}:{self.level}"


@dataclass
class Tree:
    parents: dict[Record, list[Record]] = field(default_factory=dict)
    definitions: dict[Record, str] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)


def read_tree(pack: Path, concept_pack: Path, concepts: Sequence[Record]) -> Tree:
    """Return the hierarchy of these concepts. Links to other concepts are left out and counted."""
    tree = Tree()
    finder = _Finder(concepts)
    folders = list(dict.fromkeys((concept_pack, pack)))
    described = list(_described(folders))
    left_out: set[tuple[str, str]] = set()
    for child_name, parent_name in (*_links(folders), *_links_of(described)):
        child = finder.find(child_name, below=_level(parent_name))
        parent = finder.find(parent_name, above=child.level if child else _level(child_name))
        if child is None or parent is None or parent.level >= child.level:
            left_out.add((child_name, parent_name))
        elif parent not in tree.parents.setdefault(child, []):
            tree.parents[child].append(parent)
    for concept, fields in described:
        definition = str(fields.get("definition") or fields.get("sumo_definition") or "")
        if concept in finder.known and definition:
            tree.definitions.setdefault(concept, definition)
    if left_out:
        tree.notes["parents_left_out"] = len(left_out)
    return tree


class _Finder:
    """Finds concepts by `Name:level`, or by a bare name the nearest above or below a level."""

    def __init__(self, concepts: Sequence[Record]) -> None:
        self.known = set(concepts)
        self._by_name: dict[str, list[Record]] = {}
        for concept in sorted(concepts, key=lambda concept: concept.level):
            self._by_name.setdefault(concept.name, []).append(concept)

    def find(self, name: str, above: int | None = None, below: int | None = None) -> Record | None:
        level = _level(name)
        if level is not None:
            concept = Record(name.rpartition(":")[0], level)
            return concept if concept in self.known else None
        named = self._by_name.get(name, ())
        if above is not None:
            return next((one for one in reversed(named) if one.level < above), None)
        return next((one for one in named if below is None or one.level > below), None)


def _level(name: str) -> int | None:
    bare, _, level = name.rpartition(":")
    return int(level) if bare and level.isdigit() else None


def _links(folders: Sequence[Path]) -> Iterable[tuple[str, str]]:
    """Yield (child, parent) of `hierarchy.json`; the first parent of a child is its main one."""
    data = _read(folders, "hierarchy.json", "hierarchy/hierarchy.json")
    if not isinstance(data, Mapping):
        return
    for child, parents in data.get("child_to_parent", {}).items():
        for parent in [parents] if isinstance(parents, str) else parents or ():
            yield child, parent
    for parent, children in data.get("parent_to_children", {}).items():
        for child in children or ():
            yield child, parent


def _links_of(described: Sequence[tuple[Record, Mapping]]) -> Iterable[tuple[str, str]]:
    """Yield (child, parent) of the records of concepts: those that name parents, then those that name children."""
    for concept, fields in described:
        single = fields.get("parent")
        for parent in [*(fields.get("parent_concepts") or ()), *([single] if single else ())]:
            yield concept.id, str(parent)
    for concept, fields in described:
        for child in fields.get("category_children") or ():
            yield str(child), concept.id


def _described(folders: Sequence[Path]) -> Iterable[tuple[Record, Mapping]]:
    """Yield the concepts of the files of all levels, with their fields."""
    for level in range(100):
        data = _read(folders, f"hierarchy/layer{level}.json", f"layer{level}.json")
        found = data.get("concepts") if isinstance(data, Mapping) else data
        for fields in found if isinstance(found, list) else ():
            term = fields.get("sumo_term") or fields.get("term") or fields.get("name")
            if term:
                yield Record(str(term), int(fields.get("layer", level))), fields


def _read(folders: Sequence[Path], *names: str) -> object:
    """Return the content of the first of these files that exists."""
    for file in (folder / name for folder in folders for name in names):
        if file.is_file():
            with reading(file, "hierarchy"):
                return json.loads(file.read_bytes())
    return None
