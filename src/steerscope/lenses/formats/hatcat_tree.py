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


def read_tree(pack: Path, concept_pack: Path, records: Sequence[Record]) -> Tree:
    """Return the hierarchy of these records. Links to other concepts are left out and counted."""
    known, tree = set(records), Tree()
    by_name: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.level):
        by_name.setdefault(record.name, []).append(record)
    left_out: set[tuple[str, str]] = set()

    def find(name: str, above: int | None = None, below: int | None = None) -> Record | None:
        """Find `Name:level`, or the nearest of that name above or below a level."""
        bare, _, level = name.rpartition(":")
        if bare and level.isdigit():
            return Record(bare, int(level)) if Record(bare, int(level)) in known else None
        fits = [r for r in by_name.get(name, ()) if (above is None or r.level < above)]
        fits = [r for r in fits if below is None or r.level > below]
        if not fits:
            return None
        return fits[-1] if above is not None else fits[0]

    for child_name, parent_name in _links(pack, concept_pack):
        child_level, parent_level = _level(child_name), _level(parent_name)
        child = find(child_name, below=parent_level)
        parent = find(parent_name, above=child.level if child else child_level)
        if child is None or parent is None or parent.level >= child.level:
            left_out.add((child_name, parent_name))
        elif parent not in tree.parents.setdefault(child, []):
            tree.parents[child].append(parent)
    for record, definition in _definitions(pack, concept_pack):
        if record in known and definition:
            tree.definitions.setdefault(record, definition)
    tree.notes = {"parents_left_out": len(left_out)} if left_out else {}
    return tree


def _level(name: str) -> int | None:
    bare, _, level = name.rpartition(":")
    return int(level) if bare and level.isdigit() else None


def _links(pack: Path, concept_pack: Path) -> Iterable[tuple[str, str]]:
    """Yield (child, parent) as in the files; the first parent of a child is its main one."""
    for data in _files(pack, concept_pack, ("hierarchy.json", "hierarchy/hierarchy.json")):
        if isinstance(data, Mapping):
            for child, parents in data.get("child_to_parent", {}).items():
                for parent in [parents] if isinstance(parents, str) else parents or ():
                    yield child, parent
            for parent, children in data.get("parent_to_children", {}).items():
                for child in children or ():
                    yield child, parent
    for term, level, record in _records(pack, concept_pack):
        single = record.get("parent")
        for parent in [*(record.get("parent_concepts") or ()), *([single] if single else ())]:
            yield f"{term}:{level}", str(parent)
    for term, level, record in _records(pack, concept_pack):
        for child in record.get("category_children") or ():
            yield str(child), f"{term}:{level}"


def _definitions(pack: Path, concept_pack: Path) -> Iterable[tuple[Record, str]]:
    for term, level, record in _records(pack, concept_pack):
        yield Record(term, level), str(record.get("definition") or record.get("sumo_definition") or "")


def _records(pack: Path, concept_pack: Path) -> Iterable[tuple[str, int, Mapping]]:
    for level in range(100):
        for data in _files(pack, concept_pack, (f"hierarchy/layer{level}.json", f"layer{level}.json")):
            found = data.get("concepts", ()) if isinstance(data, Mapping) else data
            for record in found if isinstance(found, list) else ():
                term = record.get("sumo_term") or record.get("term") or record.get("name")
                if term:
                    yield str(term), int(record.get("layer", level)), record


def _files(pack: Path, concept_pack: Path, names: Sequence[str]) -> Iterable[object]:
    """Yield the content of the first of these files that exists, in the concept pack or else in the pack."""
    for file in (folder / name for folder in dict.fromkeys((concept_pack, pack)) for name in names):
        if file.is_file():
            with reading(file, "hierarchy"):
                yield json.loads(file.read_bytes())
            return
