"""Make packs of linear probes: scikit-learn's fitted classifiers, or their weights in a file.

A probe is w·x + b, then a sigmoid. A StandardScaler before it in a pipeline is folded into w and b; any other step is
refused by name. Pass `normalisation="layernorm"` for probes that were fitted on rows normalised by a LayerNorm without
parameters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from steerscope.files import reading
from steerscope.lenses.pack import Concept, Pack, PackInfo
from steerscope.lenses.spec import Normalisation
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import Site

Probe = tuple[np.ndarray, float]  # w and b


def from_probes(
    probes: Mapping[str, object],
    *,
    model: str,
    layer: int,
    site: Site = "resid_post",
    name: str = "probes",
    normalisation: Normalisation = "none",
    concepts: Sequence[Concept] | None = None,
) -> Pack:
    """Make a pack of fitted probes by concept: estimators with `coef_` and `intercept_`, or pipelines that end in one.

    A probe of several classes becomes one lens per class, `concept=class`: each class's own w·x + b through a sigmoid,
    not the softmax over classes. `concepts`, if given, describe the lenses; their ids are those names.
    """
    found: dict[str, Probe] = {}
    problems: list[Problem] = []
    for concept, probe in probes.items():
        try:
            found.update(_lenses(concept, probe))
        except ValueError as error:
            what, _, remedy = str(error).partition("; ")
            problems.append(Problem(f"probe {concept!r}", what, remedy or "fit it again"))
    sizes = {len(w) for w, _ in found.values()}
    if len(sizes) > 1:
        problems.append(Problem("probes", f"read rows of sizes {sorted(sizes)}", "fit them on rows of one site"))
    if not probes:
        problems.append(Problem("probes", "there are none", "give at least one"))
    if problems:
        raise InvalidRequest(problems)
    info = {"name": name, "model": model, "layer": layer, "site": site, "normalisation": normalisation}
    return _pack(found, concepts, info)


def load_probes(
    path: str | Path,
    *,
    model: str,
    layer: int,
    site: Site = "resid_post",
    normalisation: Normalisation = "none",
    names: Sequence[str] | None = None,
    concepts: Sequence[Concept] | None = None,
) -> Pack:
    """Read `coef_ [lenses, hidden]` and `intercept_ [lenses]` (or without underscores) of a `.npz` or `.safetensors`.

    Names come from `names`, or from an array `names` in the `.npz`; otherwise lenses are numbered.
    """
    path = Path(path)
    if path.suffix.lower() not in (".npz", ".safetensors"):
        raise BadFile(f"{path} has an unknown suffix {path.suffix!r}; use .npz or .safetensors")
    with reading(path, "file of probes"):
        arrays = _arrays(path)
        w, b = (arrays.get(key, arrays.get(f"{key}_")) for key in ("coef", "intercept"))
        if w is None or b is None:
            raise BadFile(f"{path} holds {', '.join(arrays) or 'nothing'}; expected coef_ and intercept_")
        w = np.atleast_2d(w).astype(np.float32)
        b = np.atleast_1d(b).astype(np.float32)
        if w.ndim != 2 or b.shape != (len(w),):
            raise BadFile(f"{path}: coef_ is {list(w.shape)}, intercept_ {list(b.shape)}; expected [n, hidden] and [n]")
        chosen = [str(each) for each in names or arrays.get("names", range(len(w)))]
        if len(chosen) != len(w) or len(set(chosen)) < len(chosen):
            raise BadFile(f"{path}: {len(set(chosen))} different names for {len(w)} probes; give each its own")
        info = {"name": path.stem, "model": model, "layer": layer, "site": site, "normalisation": normalisation}
        return _pack(dict(zip(chosen, zip(w, b, strict=True), strict=True)), concepts, info)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    return {name: tensor.float().numpy() for name, tensor in load_file(path).items()}


def _pack(probes: Mapping[str, Probe], concepts: Sequence[Concept] | None, info: dict[str, Any]) -> Pack:
    described = [Concept(id=name) for name in probes] if concepts is None else concepts
    known = {concept.id: concept for concept in described}
    if known.keys() != probes.keys():
        what = f"and probes differ in {', '.join(sorted(known.keys() ^ probes.keys()))}"
        raise InvalidRequest([Problem("concepts", what, "describe each probe once, with its name as id")])
    w = torch.from_numpy(np.stack([w for w, _ in probes.values()])).float()
    b = torch.tensor([b for _, b in probes.values()], dtype=torch.float64).float()
    about = PackInfo(**info, hidden=w.shape[1], training={"source": "linear probes"})
    return Pack(about, [known[name] for name in probes], {"w0": w.unsqueeze(1), "b0": b.unsqueeze(1)})


def _lenses(concept: str, probe: Any) -> dict[str, Probe]:
    before: list[Any] = []
    if hasattr(probe, "steps"):  # a pipeline
        *before, probe = [step for _, step in probe.steps if step not in (None, "passthrough")]
    if not (hasattr(probe, "coef_") and hasattr(probe, "intercept_")):
        raise ValueError(f"is a {type(probe).__name__} without coef_ and intercept_; give a fitted linear classifier")
    w = np.atleast_2d(np.asarray(probe.coef_, dtype=np.float64))
    b = np.broadcast_to(np.atleast_1d(np.asarray(probe.intercept_, dtype=np.float64)), (len(w),))
    for step in reversed(before):
        w, b = _fold(step, w, b)
    if len(w) == 1:
        return {concept: (w[0], float(b[0]))}
    classes = getattr(probe, "classes_", range(len(w)))
    return {f"{concept}={label}": (w[i], float(b[i])) for i, label in enumerate(classes)}


def _fold(step: Any, w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return w and b of w·((x − mean) / scale) + b as a function of x."""
    if type(step).__name__ != "StandardScaler" or not hasattr(step, "scale_"):
        raise ValueError(f"has a step {type(step).__name__} before it; only a fitted StandardScaler can be folded in")
    if step.scale_ is not None:
        w = w / step.scale_
    if step.with_mean and step.mean_ is not None:  # the mean exists even if it is not used
        b = b - w @ step.mean_
    return w, b
