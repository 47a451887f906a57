"""A pack written as HatCat reads it: the way back of hatcat.py, with the same scores.

A lens that normalises its input once more gets a LayerNorm whose scale is 1 and shift 0: the learned ones are folded
into its weights. Held-out measures, calibration and hierarchy go into the files HatCat has for them.
"""

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from steerscope.lenses.directory import atomic_directory
from steerscope.lenses.hierarchy import indices
from steerscope.lenses.pack import Pack
from steerscope.specs.errors import BadFile, InvalidRequest, Problem


def save_hatcat(pack: Pack, path: str | Path) -> None:
    """Write the directory; it appears whole or not at all. What HatCat cannot say is refused before."""
    problems = _problems(pack)
    if problems:
        raise BadFile(f"cannot write {path} for HatCat: {InvalidRequest(problems)}")
    with atomic_directory(Path(path), "pack_info.json") as folder:
        for level in range(pack.levels):
            (folder / f"layer{level}").mkdir()
        normed = pack.tensors["normed"].tolist() if "normed" in pack.tensors else [False] * len(pack)
        for i, concept in enumerate(pack.concepts):
            torch.save(_state(pack, i, normed[i]), folder / f"layer{concept.level}" / f"{concept.name}.pt")
        about = {
            "lens_pack_id": pack.info.name,
            "version": pack.info.version,
            "model": pack.info.model,
            "model_layer": pack.info.layer + 1,  # HatCat counts in hidden_states
            "trained_layers": list(range(pack.levels)),
        }
        _write(folder / "pack_info.json", about)
        _write(folder / "hierarchy.json", _hierarchy(pack))
        (folder / "hierarchy").mkdir()
        for level in range(pack.levels):
            members = range(len(pack))[pack.level(level)]
            _write(folder / "hierarchy" / f"layer{level}.json", {"concepts": [_record(pack, i) for i in members]})
            measured = {pack.concepts[i].name: pack.concepts[i].metrics for i in members if pack.concepts[i].metrics}
            if measured:
                _write(folder / f"layer{level}" / "results.json", measured)
        if pack.calibration is not None:
            _write(folder / "calibration.json", {"calibration": _calibration(pack)})


def _problems(pack: Pack) -> list[Problem]:
    found: list[Problem] = []
    info = pack.info
    if info.architecture.output != "sigmoid":
        found.append(Problem("output", f"is {info.architecture.output}", "only lenses with a sigmoid can be written"))
    if info.normalisation != "layernorm":
        found.append(Problem("normalisation", f"is {info.normalisation}", "HatCat always normalises its rows"))
    if info.site != "resid_post":
        found.append(Problem("site", f"is {info.site}", "HatCat reads resid_post"))
    if "floor" in pack.tensors:
        found.append(Problem("floor", "HatCat has no noise floor", "leave the tensor out"))
    seen: set[tuple[str, int]] = set()
    for concept in pack.concepts:
        if not re.fullmatch(r"[^/\\\0.][^/\\\0]*", concept.name) or concept.name.endswith("_classifier"):
            found.append(Problem(f"concept {concept.id!r}", "its name cannot be the name of a file", "rename it"))
        if (concept.name, concept.level) in seen:
            found.append(Problem(f"concept {concept.id!r}", "another of its level has its name", "rename one"))
        seen.add((concept.name, concept.level))
    return found


def _state(pack: Pack, i: int, normed: bool) -> dict[str, Tensor]:
    """Linear, ReLU and Dropout in turns, after the norm if there is one."""
    state: dict[str, Tensor] = {}
    if normed:
        state["net.0.weight"], state["net.0.bias"] = torch.ones(pack.info.hidden), torch.zeros(pack.info.hidden)
    for layer in range(len(pack.info.architecture.widths) + 1):
        place = 3 * layer + normed
        state[f"net.{place}.weight"] = pack.tensors[f"w{layer}"][i].clone()
        state[f"net.{place}.bias"] = pack.tensors[f"b{layer}"][i].clone()
    return state


def _key(pack: Pack, i: int) -> str:
    return f"{pack.concepts[i].name}:{pack.concepts[i].level}"


def _hierarchy(pack: Pack) -> dict[str, object]:
    parents = enumerate(pack.hierarchy.parents)
    groups = ((i, indices(pack.children(i))) for i in range(len(pack)))
    return {
        "child_to_parent": {_key(pack, child): _key(pack, above[0]) for child, above in parents if above},
        "parent_to_children": {_key(pack, i): [_key(pack, c) for c in group] for i, group in groups if group},
    }


def _record(pack: Pack, i: int) -> dict[str, object]:
    concept = pack.concepts[i]
    return {
        "sumo_term": concept.name,
        "layer": concept.level,
        "definition": concept.definition,
        "parent_concepts": [_key(pack, parent) for parent in pack.hierarchy.parents[i]],
        "category_children": [_key(pack, child) for child in indices(pack.children(i))],
    }


def _calibration(pack: Pack) -> dict[str, object]:
    curve = pack.calibration
    assert curve is not None
    columns = zip(curve.low.tolist(), curve.high.tolist(), curve.confidence.tolist(), strict=True)
    return {
        f"{concept.name}_L{concept.level}": {
            "concept": concept.name,
            "layer": concept.level,
            "cross_mean": low,
            "self_mean": high,
            "confidence": confidence,
        }
        for concept, (low, high, confidence) in zip(pack.concepts, columns, strict=True)
    }


def _write(file: Path, data: object) -> None:
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
