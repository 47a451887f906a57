"""How much every matrix of a layer changed between two checkpoints, along given directions.

Matrices that face the residual stream are seen as vectors in it: rows of those that read, columns of those that write.
Their change is summed up a part at a time, so that nothing larger than one layer is in memory.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.specs.errors import BadFile

Side = Literal["reads", "writes"]
_WRITERS = ("o_proj", "out_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "wo", "w2")


def facing(weights: Mapping[str, Tensor], hidden: int) -> Iterator[tuple[str, Side, Tensor]]:
    """The matrices that face the stream, each as vectors in it [n, hidden]; experts of one kind share a name.

    Shapes tell who reads and who writes; names only where a matrix is square.
    """
    of_gpt2 = [w for name, w in weights.items() if name.endswith(".c_fc.weight") and w.shape[0] == hidden]
    stored_by_input = any(w.shape[1] != hidden for w in of_gpt2)  # Conv1D keeps [in, out], Linear [out, in]
    for name, weight in weights.items():
        if weight.dim() != 2 or hidden not in weight.shape:
            continue
        module = name.removesuffix(".weight")
        linear = weight.T if stored_by_input else weight
        square = linear.shape[0] == linear.shape[1]
        writes = module.rsplit(".", 1)[-1] in _WRITERS if square else linear.shape[0] == hidden
        yield re.sub(r"\.\d+\.", ".", module), "writes" if writes else "reads", linear.T if writes else linear


@dataclass(slots=True)
class ChangeSums:
    """Sums over the vectors of one matrix; `along` and `cosines` have an entry per direction."""

    side: Side
    change: float = 0.0
    weight: float = 0.0
    count: int = 0
    seen: int = 0
    along: np.ndarray = field(default_factory=lambda: np.zeros(1))
    cosines: np.ndarray = field(default_factory=lambda: np.zeros(1))
    largest: np.ndarray = field(default_factory=lambda: np.zeros(1))
    where: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def add(self, before: Tensor, after: Tensor, units: Tensor) -> None:
        """Some more vectors, [n, hidden] each, of both checkpoints."""
        before = before.to(units.device, torch.float32)
        delta = after.to(units.device, torch.float32) - before
        along = delta @ units.T
        lengths = delta.norm(dim=1)
        changed = lengths > 0
        cosines = along[changed].abs() / lengths[changed, None]
        self.change += float(lengths.double().square().sum())
        self.weight += float(before.norm(dim=1).double().square().sum())
        self.count += int(changed.sum())
        self.along = self.along + along.double().square().sum(0).cpu().numpy()
        self.cosines = self.cosines + cosines.double().sum(0).cpu().numpy()
        if len(cosines):
            best, at = (one.cpu().numpy() for one in cosines.max(0))
            at = self.seen + changed.nonzero()[:, 0].cpu().numpy()[at]
            self.where = np.where(best > self.largest, at, self.where)
            self.largest = np.maximum(best, self.largest)
        self.seen += len(delta)


def layer_changes(base: Checkpoint, tuned: Checkpoint, number: int, units: Tensor) -> dict[str, ChangeSums]:
    """The embedding counts with the first layer, the head with the last."""
    before, after = base.layer(number), tuned.layer(number)
    other = {name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))}
    if other:
        raise BadFile(f"layer {number} of {tuned.name} differs in the shape of {', '.join(sorted(other)[:4])}")
    found: dict[str, ChangeSums] = {}
    for (kind, side, a), (_, _, b) in zip(
        facing(before, base.hidden), facing({name: after[name] for name in before}, base.hidden), strict=True
    ):
        found.setdefault(kind, ChangeSums(side)).add(a, b, units)
    ends: list[tuple[str, Side, bool]] = [
        ("embedding", "writes", number == 0),
        ("head", "reads", number == base.layers - 1),
    ]
    for kind, side, wanted in ends:
        if wanted:
            found[kind] = ChangeSums(side)
            names = getattr(base, kind), getattr(tuned, kind)
            for a, b in zip(base.rows(names[0]), tuned.rows(names[1]), strict=False):
                rows = min(len(a), len(b))  # a vocabulary may have grown: new tokens have nothing to change from
                found[kind].add(a[:rows], b[:rows], units)
    return found


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape
