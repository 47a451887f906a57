"""Pack: lenses of one model, layer and site, with their hierarchy, held-out measures and calibration.

A pack is made of tensors, `Pack(info, concepts, tensors)`, or read from a directory with `Pack.load`, whose tensors are
mapped. `pack.concepts` and `pack.tensors` are in the order of the hierarchy (see hierarchy.py), not in the given order.
"""

import difflib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.lenses import hierarchy
from steerscope.lenses import tensors as arrays
from steerscope.lenses.formats import own
from steerscope.lenses.hierarchy import Children, Hierarchy
from steerscope.lenses.spec import Architecture, Concept, PackInfo, TensorEntry
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Site

__all__ = ["Architecture", "Calibration", "Concept", "Pack", "PackInfo"]


class Calibration(NamedTuple):
    """One value per lens, float32: scores 0, low and high become 0, 1/2 and 1, times confidence."""

    low: Tensor
    high: Tensor
    confidence: Tensor

    def apply(self, scores: Tensor) -> Tensor:
        """Calibrate scores [n, lenses]."""
        below = scores / self.low.clamp_min(torch.finfo(torch.float32).tiny)
        above = 1 + ((scores - self.low) / (self.high - self.low)).clamp(max=1)
        return torch.where(scores < self.low, below, above) * (self.confidence / 2)


class Pack:
    """Lenses with their hierarchy, calibration and measures. Invalid parts raise one error that names all problems.

    ```python
    import steerscope as ss

    pack = ss.Pack.load("pack")
    print(pack.info.layer, len(pack), pack.path(pack.index("fear")))
    ```
    """

    def __init__(self, info: PackInfo, concepts: Sequence[Concept], tensors: Mapping[str, Tensor]) -> None:
        concepts = tuple(concepts)
        tensors = dict(tensors)
        described = {name: arrays.entry(tensor) for name, tensor in tensors.items()}
        problems = hierarchy.problems_of(concepts) + arrays.shape_problems(info, len(concepts), described)
        if not problems:
            problems = arrays.value_problems(concepts, tensors)
        if problems:
            raise InvalidRequest(problems)
        place = hierarchy.order(concepts)
        if place != list(range(len(concepts))):
            index = torch.tensor(place)
            concepts = tuple(concepts[i] for i in place)
            tensors = {name: tensor[index.to(tensor.device)] for name, tensor in tensors.items()}
        self._set(info, concepts, {name: tensor.detach().cpu() for name, tensor in tensors.items()})

    def _set(self, info: PackInfo, concepts: tuple[Concept, ...], tensors: Mapping[str, Tensor]) -> None:
        self.info = info
        self.concepts = concepts
        self.tensors = tensors
        self.hierarchy = Hierarchy.of(concepts)
        self.folder: Path | None = None  # source of the pack; may hold another one by now

    # --- files

    @classmethod
    def load(cls, path: str | Path, verify: bool = True) -> "Pack":
        """Read a directory that `save` wrote. Names, sizes and shapes are always checked.

        With `verify` the whole file is read for its checksums and finite numbers; without, only headers are read.
        """
        manifest, concepts, tensors = own.read(Path(path), verify)
        pack = cls.__new__(cls)
        pack._set(manifest.info, concepts, tensors)
        pack.entries = manifest.entries
        pack.folder = Path(path).absolute()
        return pack

    def save(self, path: str | Path) -> None:
        """Write the directory, which appears complete or not at all, and replaces an older pack."""
        own.write(Path(path), self.info, self.concepts, self.tensors, self.entries)

    def release_tensors(self) -> None:
        """Free the tensors and the file that they are mapped from. Names, hierarchy and digest stay."""
        _ = self.entries  # computed while the tensors are here
        self.tensors = {}

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Return shape, dtype and checksum of every tensor."""
        return arrays.entries(self.tensors)

    @cached_property
    def digest(self) -> str:
        """Return a hash of the pack's content: equal packs have equal digests."""
        return own.digest(self.info, self.concepts, self.entries)

    # --- the hierarchy

    def __len__(self) -> int:
        return len(self.concepts)

    @property
    def levels(self) -> int:
        return len(self.hierarchy.levels)

    def level(self, n: int) -> slice:
        """Return the lenses of one level."""
        if not 0 <= n < self.levels:
            raise InvalidRequest([Problem("level", f"{n} does not exist", f"this pack has levels 0–{self.levels - 1}")])
        return self.hierarchy.levels[n]

    def children(self, i: int) -> Children:
        """Return the children as a slice, or as indices if they are not consecutive."""
        return self.hierarchy.children[i]

    def path(self, i: int) -> tuple[str, ...]:
        """Return the names from the root to the concept, by first parents."""
        return tuple(self.concepts[j].name for j in self.hierarchy.path(i))

    def index(self, name: str) -> int:
        """Return the lens with this id, or the only one with this name."""
        if name in self._by_id:
            return self._by_id[name]
        named = self._by_name.get(name, [])
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(self.concepts[i].id for i in named)
            raise InvalidRequest([Problem("concept", f"{len(named)} are named {name!r}", f"use an id: {ids}")])
        near = difflib.get_close_matches(name, [*self._by_id, *self._by_name], n=5, cutoff=0.5)
        remedy = f"near it are {', '.join(dict.fromkeys(near))}" if near else "see pack.concepts"
        raise InvalidRequest([Problem("concept", f"{name!r} is not in pack {self.info.name!r}", remedy)])

    @cached_property
    def _by_id(self) -> dict[str, int]:
        return {concept.id: i for i, concept in enumerate(self.concepts)}

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, concept in enumerate(self.concepts):
            found.setdefault(concept.name, []).append(i)
        return found

    # --- weights

    @property
    def lens_bytes(self) -> int:
        """Return the bytes of the weights of one lens, as stored."""
        return sum(self.tensors[name][0].nbytes for name in arrays.layout(self.info, len(self)))

    @property
    def calibration(self) -> Calibration | None:
        if "low" not in self.tensors:
            return None
        return Calibration(*(self.tensors[name] for name in arrays.CALIBRATION))

    def replace(
        self,
        info: PackInfo | None = None,
        concepts: Sequence[Concept] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> "Pack":
        """Return a new pack with other parts. `tensors`, in the order of `pack.concepts`, are added or replace the
        pack's tensors; None removes one."""
        changed = {**self.tensors, **(tensors or {})}
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        return Pack(info or self.info, concepts or self.concepts, kept)

    # --- compatibility

    def check(
        self,
        hidden: int,
        layers: int,
        *,
        layer: int | None = None,
        site: Site | None = None,
        model: str | None = None,
        any_model: bool = False,
    ) -> list[Problem]:
        """Return why these lenses cannot read a model of this hidden size and number of layers; empty if they can.

        `layer` and `site`, if given, must be those of the pack. `any_model` accepts another model's name (a fine-tune,
        a local copy) and nothing else.
        """
        info = self.info
        name = self.info.name
        found: list[Problem] = []
        other = "use a pack made for this model"
        if info.hidden != hidden:
            what = f"pack {name!r} reads rows of size {info.hidden}, the model has {hidden}"
            found.append(Problem("hidden", what, other))
        if info.layer >= layers:
            what = f"pack {name!r} reads layer {info.layer}, the model has layers 0–{layers - 1}"
            found.append(Problem("layer", what, other))
        if layer not in (None, info.layer):
            what = f"the lenses were trained on layer {info.layer}, not {layer}"
            found.append(Problem("layer", what, f"watch layer {info.layer}"))
        if site not in (None, info.site):
            found.append(Problem("site", f"the lenses were trained at {info.site}, not {site}", f"watch {info.site}"))
        if model is not None and not any_model and not _same_model(model, info.model):
            what = f"the lenses were trained on {info.model!r}, not {model!r}"
            found.append(Problem("model", what, "use a pack made for it, or any_model=True if its rows mean the same"))
        return found

    def __repr__(self) -> str:
        counts = "/".join(str(level.stop - level.start) for level in self.hierarchy.levels)
        where = f"{self.info.model} layer {self.info.layer} {self.info.site}"
        return f"Pack({self.info.name}, {len(self)} lenses ({counts}), {where})"


def _same_model(one: str, other: str) -> bool:
    """Compare model names: `org/name` in full, a bare name or a directory by its last part."""
    owners = [len(name.split("/")) == 2 and not name.startswith(("/", ".", "~")) for name in (one, other)]
    if all(owners):
        return one.lower() == other.lower()
    return one.rstrip("/").rpartition("/")[2].lower() == other.rstrip("/").rpartition("/")[2].lower()
