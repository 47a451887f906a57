"""Read lens packs of HatCat.

Files, and what is assumed of them:

- `pack_info.json` or `pack.json`: the model (`model`, `model_name`, `model_id`, or those in `model_info`), the pack's
  name and version. The layer of the model (`model_layer` or `layer_idx`) is usually missing: pass `layer`. A number in
  the file is an index of transformers' `hidden_states`, where entry k is our layer k − 1 at resid_post.
- `layerN/Concept.pt`, `layerN/Concept_classifier.pt`, `layerN/classifiers/…`: one state dict each; N is the level of
  the hierarchy. Keys `net.0`, `net.3`, `net.6` or, with a LayerNorm of its own, `net.0` (the norm), `net.1`, `net.4`,
  `net.7`; old files have no `net.`. All kinds may be mixed. The norm's scale and shift are folded into the weights.
- Rows are normalised by a LayerNorm without parameters before any lens, always.
- The hierarchy, from the pack or from `concept_pack`: `hierarchy.json` (`child_to_parent`, `parent_to_children`, keys
  `Name:level`), then `hierarchy/layerN.json` or `layerN.json` (records with `sumo_term`, `parent_concepts`,
  `category_children`, `definition`). A bare name means the nearest level above that has it. Parents without a lens, or
  not above their child, are left out; their number is in `training`.
- `calibration.json`: `self_mean`, `cross_mean` and optionally `confidence` under `Concept_LN`. If `cross_mean` is
  missing or 0, half of `self_mean` takes its place, which makes the curve a straight line. A lens without an entry, or
  with `self_mean` not above `cross_mean`, keeps its scores.
- `layerN/results.json`: held-out measures by concept.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steerscope.files import reading
from steerscope.lenses.pack import Architecture, Concept, Pack, PackInfo
from steerscope.lenses.tensors import CALIBRATION
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import Site
from steerscope.vectors.legacy import read_pt

IDENTITY = (0.5, 1.0, 1.0)  # low, high and confidence of a curve that changes nothing
_MEASURES = ("auroc", "f1", "precision", "recall", "accuracy")


class _Record(NamedTuple):
    """A concept. HatCat calls its `level` a layer."""

    name: str
    level: int

    @property
    def id(self) -> str:
        return f"{self.name}:{self.level}"


class _Lens(NamedTuple):
    layers: list[tuple[Tensor, Tensor]]  # weight and bias
    normed: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.layers[0][0].shape[1], *(weight.shape[0] for weight, _ in self.layers))

    @property
    def is_bfloat16(self) -> bool:
        return not self.normed and all(tensor.dtype == torch.bfloat16 for layer in self.layers for tensor in layer)


def load_hatcat(
    path: str | Path,
    *,
    layer: int | None = None,
    model: str | None = None,
    site: Site = "resid_post",
    concept_pack: str | Path | None = None,
) -> Pack:
    """Read a directory of HatCat. One error names all files that cannot be read."""
    path = Path(path)
    problems: list[Problem] = []
    about = _about(path, problems)
    model = model or _model(about)
    if model is None:
        problems.append(Problem("model", "pack_info.json does not say it", "pass model=…"))
    layer = layer if layer is not None else _layer(about)
    if layer is None:
        what = "pack_info.json does not say which layer of the model the lenses read"
        problems.append(Problem("layer", what, "pass layer=…; hidden_states[k] of transformers is layer k − 1 here"))
    records, lenses = _read_lenses(path, problems)
    if problems or layer is None or model is None:
        raise BadFile(f"{path} is not a readable lens pack of HatCat: {InvalidRequest(problems)}")
    with reading(path, "lens pack of HatCat"):
        tree = _Tree([Path(concept_pack or path), path], records)
        hidden, *widths, _ = lenses[0].sizes
        calibration = _calibration(path, records)
        left_out = {"parents_left_out": len(tree.left_out)} if tree.left_out else {}
        info = PackInfo(
            name=str(about.get("lens_pack_id") or about.get("pack_id") or path.absolute().name),
            version=str(about.get("version") or about.get("pack_version") or "1"),
            model=model,
            hidden=hidden,
            layer=layer,
            site=site,
            normalisation="layernorm",
            architecture=Architecture(widths=tuple(widths)),
            training={"source": "hatcat", "pack_info": about, **left_out},
            calibration={"method": "hatcat"} if calibration else {},
        )
        return Pack(info, _concepts(path, records, tree), _stack(lenses) | calibration)


# --- pack_info.json


def _about(path: Path, problems: list[Problem]) -> dict[str, Any]:
    if not path.is_dir():
        problems.append(Problem("", "it is no directory", "give the directory with pack_info.json"))
    try:
        return dict(_read([path], "pack_info.json", "pack.json") or {})
    except (BadFile, ValueError, TypeError):
        problems.append(Problem("pack_info.json", "is not a JSON object", "mend it"))
        return {}


def _model(about: Mapping[str, object]) -> str | None:
    inner = about.get("model_info")
    places = [about, inner if isinstance(inner, Mapping) else {}]
    found = (place.get(key) for place in places for key in ("model", "model_id", "model_name"))
    return next((name for name in found if isinstance(name, str) and name), None)


def _layer(about: Mapping[str, object]) -> int | None:
    found = (about.get(key) for key in ("model_layer", "layer_idx"))
    entry = next((number for number in found if isinstance(number, int) and not isinstance(number, bool)), 0)
    return entry - 1 if entry > 0 else None


# --- the lenses


def _read_lenses(path: Path, problems: list[Problem]) -> tuple[list[_Record], list[_Lens]]:
    records: list[_Record] = []
    lenses: list[_Lens] = []
    folders = [folder for folder in path.glob("layer*") if folder.is_dir() and folder.name[5:].isdigit()]
    for folder in sorted(folders, key=lambda folder: int(folder.name[5:])):
        for file in sorted([*folder.glob("*.pt"), *folder.glob("classifiers/*.pt")]):
            name = file.stem.removesuffix("_classifier")
            where = str(file.relative_to(path))
            if "@L" in name and name.rpartition("@L")[2].isdigit():
                what = "reads a layer of its own, and a pack reads one"
                problems.append(Problem(where, what, "keep the lenses of one layer, and drop the @L… from their names"))
                continue
            try:
                lenses.append(_lens(read_pt(file)))
                records.append(_Record(name, int(folder.name[5:])))
            except (BadFile, ValueError) as error:
                problems.append(Problem(where, str(error).removeprefix(f"{file} "), "train or copy this lens again"))
    if not records and not problems:
        problems.append(Problem("layerN/Concept.pt", "there are none", "give the directory with pack_info.json"))
    for record, count in Counter(records).items():
        if count > 1:
            what = f"there are {count} files of {record.name!r}"
            problems.append(Problem(f"layer{record.level}", what, "keep one of them"))
    if lenses:
        usual = Counter(lens.sizes for lens in lenses).most_common(1)[0][0]
        for record, lens in zip(records, lenses, strict=True):
            if lens.sizes != usual:
                what = f"has layers of sizes {list(lens.sizes)}, most lenses have {list(usual)}"
                problems.append(Problem(f"layer{record.level}/{record.name}", what, "keep lenses of one kind"))
    return records, lenses


def _lens(state: object) -> _Lens:
    """Return the linear layers of a state dict, with a LayerNorm before them folded in."""
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError("is not a state dict of tensors")
    plain = {str(key).removeprefix("net."): tensor for key, tensor in state.items()}
    places = sorted({int(key.partition(".")[0]) for key in plain if key.partition(".")[0].isdigit()})
    if not places or {f"{i}.{part}" for i in places for part in ("weight", "bias")} != set(plain):
        raise ValueError(f"has the keys {', '.join(map(str, state))}; expected pairs such as net.0.weight, net.0.bias")
    pairs = [(plain[f"{i}.weight"], plain[f"{i}.bias"]) for i in places]
    norm = pairs.pop(0) if pairs[0][0].dim() == 1 else None
    for (weight, bias), i in zip(pairs, places[norm is not None :], strict=True):
        if weight.dim() != 2 or bias.shape != weight.shape[:1]:
            raise ValueError(f"has at {i} shapes {list(weight.shape)} and {list(bias.shape)}; expected a linear layer")
        if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise ValueError(f"holds NaN or infinity at {i}")
    fits = all(a[0].shape[0] == b[0].shape[1] for a, b in zip(pairs, pairs[1:], strict=False))
    if not pairs or not fits or pairs[-1][0].shape[0] != 1:
        raise ValueError("is not a chain of linear layers that ends in one number")
    if norm is not None:
        pairs[0] = _folded(*norm, *pairs[0])
    return _Lens(pairs, norm is not None)


def _folded(scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return a linear layer with the scale and shift of a LayerNorm before it."""
    if scale.shape != weight.shape[1:] or shift.shape != scale.shape:
        raise ValueError(f"has a norm of size {len(scale)} before a layer of {weight.shape[1]} inputs")
    wide = weight.double()
    return (wide * scale.double()).float(), (bias.double() + wide @ shift.double()).float()


def _stack(lenses: list[_Lens]) -> dict[str, Tensor]:
    """Stack the lenses. Each one is freed as soon as it is copied."""
    dtype = torch.bfloat16 if all(lens.is_bfloat16 for lens in lenses) else torch.float32
    normed = torch.tensor([lens.normed for lens in lenses])
    tensors: dict[str, Tensor] = {}
    for at in reversed(range(len(lenses))):
        for i, layer in enumerate(lenses.pop().layers):
            for name, tensor in zip((f"w{i}", f"b{i}"), layer, strict=True):
                if name not in tensors:
                    tensors[name] = torch.empty(len(normed), *tensor.shape, dtype=dtype)
                tensors[name][at] = tensor
    return {**tensors, "normed": normed} if normed.any() else tensors


# --- calibration and concepts


def _calibration(path: Path, records: list[_Record]) -> dict[str, Tensor]:
    data = _read([path], "calibration.json", what="calibration")
    if data is None:
        return {}
    with reading(path / "calibration.json", "calibration"):
        found = data.get("calibration", data)
        curves = [_curve(found.get(f"{record.name}_L{record.level}")) for record in records]
    columns = torch.tensor(curves, dtype=torch.float32).T
    return {name: column.contiguous() for name, column in zip(CALIBRATION, columns, strict=True)}


def _curve(entry: object) -> tuple[float, float, float]:
    if not isinstance(entry, Mapping):
        return IDENTITY
    own = float(entry["self_mean"])
    other = float(entry.get("cross_mean") or 0.0)
    low = other if other > 0 else own / 2
    return (low, own, float(entry.get("confidence", 1.0))) if own > low else IDENTITY


def _concepts(path: Path, records: list[_Record], tree: "_Tree") -> list[Concept]:
    results = {level: _read([path / f"layer{level}"], "results.json") for level in {r.level for r in records}}
    return [
        Concept(
            id=record.id,
            name=record.name,
            level=record.level,
            definition=tree.definitions.get(record, ""),
            parents=tuple(parent.id for parent in tree.parents[record]),
            metrics=_metrics(results[record.level], record.name),
        )
        for record in records
    ]


def _metrics(results: Any, name: str) -> dict[str, float]:
    entry = results.get(name) if isinstance(results, Mapping) else None
    if not isinstance(entry, Mapping):
        return {}
    found = {name: entry.get(name, entry.get(f"test_{name}")) for name in _MEASURES}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


# --- the hierarchy


class _Tree:
    """Parents and definitions of concepts. Links to other concepts are left out."""

    def __init__(self, folders: Sequence[Path], concepts: Sequence[_Record]) -> None:
        self.parents: defaultdict[_Record, list[_Record]] = defaultdict(list)
        self.definitions: dict[_Record, str] = {}
        self.left_out: set[tuple[str, str]] = set()
        self._known = set(concepts)
        self._levels: defaultdict[str, list[int]] = defaultdict(list)  # of the concepts of each name, ascending
        for name, level in sorted(concepts):
            self._levels[name].append(level)
        described = list(_described(folders))
        for link in (*_links(folders), *_links_of(described)):
            self._add(*link)
        for concept, fields in described:
            definition = str(fields.get("definition") or fields.get("sumo_definition") or "")
            if concept in self._known and definition:
                self.definitions.setdefault(concept, definition)

    def _add(self, child_name: str, parent_name: str) -> None:
        child = self._find(child_name, below=_level(parent_name))
        parent = self._find(parent_name, above=child.level if child else _level(child_name))
        if child is None or parent is None or parent.level >= child.level:
            self.left_out.add((child_name, parent_name))
        elif parent not in self.parents[child]:
            self.parents[child].append(parent)

    def _find(self, name: str, above: int | None = None, below: int | None = None) -> _Record | None:
        """Find a concept by `Name:level`, or by a bare name the nearest above or below a level."""
        level = _level(name)
        if level is not None:
            concept = _Record(name.rpartition(":")[0], level)
            return concept if concept in self._known else None
        levels = self._levels[name]
        if above is not None:
            levels = [one for one in reversed(levels) if one < above]
        elif below is not None:
            levels = [one for one in levels if one > below]
        return _Record(name, levels[0]) if levels else None


def _level(name: str) -> int | None:
    bare, _, level = name.rpartition(":")
    return int(level) if bare and level.isdigit() else None


def _links(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
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


def _links_of(described: Sequence[tuple[_Record, Mapping]]) -> Iterator[tuple[str, str]]:
    """Yield (child, parent) of the records of concepts: those that name parents, then those that name children."""
    for concept, fields in described:
        single = fields.get("parent")
        for parent in [*(fields.get("parent_concepts") or ()), *([single] if single else ())]:
            yield concept.id, str(parent)
    for concept, fields in described:
        for child in fields.get("category_children") or ():
            yield str(child), concept.id


def _described(folders: Sequence[Path]) -> Iterator[tuple[_Record, Mapping]]:
    """Yield the concepts of the files of all levels, with their fields."""
    for level in range(100):
        data = _read(folders, f"hierarchy/layer{level}.json", f"layer{level}.json")
        found = data.get("concepts") if isinstance(data, Mapping) else data
        for fields in found if isinstance(found, list) else ():
            term = fields.get("sumo_term") or fields.get("term") or fields.get("name")
            if term:
                yield _Record(str(term), int(fields.get("layer", level))), fields


def _read(folders: Sequence[Path], *names: str, what: str = "part of a lens pack of HatCat") -> Any:
    """Return the content of the first of these files that exists, or None."""
    for file in (folder / name for folder in folders for name in names):
        if file.is_file():
            with reading(file, what):
                return json.loads(file.read_bytes())
    return None
