"""The tensors of a pack: names, shapes, checks and checksums.

For widths [a, b]: `w0 [lenses, a, hidden]`, `b0 [lenses, a]`, `w1 [lenses, b, a]`, `b1 [lenses, b]`,
`w2 [lenses, 1, b]`, `b2 [lenses, 1]`, all float32 or all bfloat16. Optional, one value per lens:

- `normed` (bool): the lens normalises its input once more. A learned scale and shift are folded into w0 and b0.
- `low`, `high`, `confidence` (float32): calibration. Scores 0, low and high become 0, 1/2 and 1, with straight lines
  between, times confidence.
- `floor` (float32): a score at or below it is noise and counts as 0. It is compared before calibration.
- `threshold` (float32): of the output `jumprelu`, which needs it.

and `decoder [lenses, hidden]`, the directions a sparse autoencoder writes.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from steerscope.lenses.spec import Concept, PackInfo, TensorEntry
from steerscope.specs.errors import Problem

WEIGHT_DTYPES = ("float32", "bfloat16")
CALIBRATION = ("low", "high", "confidence")
PER_LENS = (*CALIBRATION, "floor", "threshold")
_CHUNK = 1 << 24  # elements checked at a time: a mapped file must not be in memory at once


def layout(info: PackInfo, lenses: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight, in order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (into, out) in enumerate(itertools.pairwise([info.hidden, *info.architecture.widths, 1])):
        shapes[f"w{i}"] = (lenses, out, into)
        shapes[f"b{i}"] = (lenses, out)
    return shapes


def shape_problems(info: PackInfo, lenses: int, tensors: Mapping[str, TensorEntry]) -> list[Problem]:
    """Return problems of names, shapes and dtypes, which a file's header holds."""
    weights = layout(info, lenses)
    known = {name: (shape, WEIGHT_DTYPES) for name, shape in weights.items()}
    known |= {"normed": ((lenses,), ("bool",)), "decoder": ((lenses, info.hidden), WEIGHT_DTYPES)}
    known |= dict.fromkeys(PER_LENS, ((lenses,), ("float32",)))
    needed = [*weights, *(["threshold"] if info.architecture.output == "jumprelu" else [])]
    needed += CALIBRATION if any(name in tensors for name in CALIBRATION) else ()
    found = [Problem(name, "is missing", "the architecture needs it") for name in needed if name not in tensors]
    for name, entry in tensors.items():
        if name not in known:
            found.append(Problem(name, "is no tensor of a pack", f"known are {', '.join(known)}"))
            continue
        shape, allowed = known[name]
        if entry.shape != shape:
            found.append(Problem(name, f"has shape {list(entry.shape)}", f"expected {list(shape)}"))
        if entry.dtype not in allowed:
            found.append(Problem(name, f"has dtype {entry.dtype}", f"convert it to {' or '.join(allowed)}"))
    used = {tensors[name].dtype for name in weights if name in tensors}
    if len(used) > 1:
        found.append(Problem("weights", f"have different dtypes ({', '.join(sorted(used))})", "use one for all"))
    k = info.architecture.k
    if k is not None and k > lenses:
        found.append(Problem("architecture.k", f"is {k}, with {lenses} lenses", "it cannot be larger"))
    return found


def value_problems(concepts: Sequence[Concept], tensors: Mapping[str, Tensor]) -> list[Problem]:
    """Return problems of values: not finite, or a calibration that is not ascending. Shapes must be right."""
    found: list[Problem] = []
    for name, tensor in tensors.items():
        bad = _lenses_where(~_finite(tensor), concepts) if tensor.is_floating_point() else ""
        if bad:
            found.append(Problem(name, f"holds NaN or infinity ({bad})", "remove these lenses or mend their training"))
    if all(name in tensors for name in CALIBRATION):
        low, high, confidence = (tensors[name] for name in CALIBRATION)
        if bad := _lenses_where(~((low >= 0) & (high > low)), concepts):
            found.append(Problem("low, high", f"are not 0 ≤ low < high ({bad})", "calibrate these lenses again"))
        if bad := _lenses_where(~(confidence >= 0), concepts):
            found.append(Problem("confidence", f"is negative ({bad})", "use 0 to silence a lens"))
    return found


def _finite(tensor: Tensor) -> Tensor:
    """Return per lens whether its values are finite, piece by piece."""
    step = max(1, _CHUNK // max(1, tensor[0].numel()))
    pieces = [
        torch.isfinite(part).flatten(1).all(1) if part.dim() > 1 else torch.isfinite(part)
        for part in tensor.split(step)
    ]
    return torch.cat(pieces)


def _lenses_where(bad: Tensor, concepts: Sequence[Concept]) -> str:
    at = bad.nonzero().flatten().tolist()
    shown = ", ".join(concepts[i].id for i in at[:8])
    return f"{shown} and {len(at) - 8} more" if len(at) > 8 else shown


def entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return shape, dtype and checksum of every tensor, sorted by name."""
    return {name: entry(tensors[name], checksum(tensors[name])) for name in sorted(tensors)}


def entry(tensor: Tensor, sha256: str = "") -> TensorEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(dtype=dtype, shape=tuple(tensor.shape), sha256=sha256)


def checksum(tensor: Tensor) -> str:
    total = hashlib.sha256()
    for part in tensor.reshape(-1).split(_CHUNK):
        whole = part.contiguous() if len(part) > 1 else part.clone(memory_format=torch.contiguous_format)
        total.update(whole.view(torch.uint8).numpy().data)
    return total.hexdigest()
