"""Bank: all or some lenses of a pack on a device, evaluated together.

    bank = Bank(pack, device="cuda", weights="bf16")
    values, indices = bank.top(rows, 10)

No method synchronises with the device and no shape depends on a value, so that every method can be captured in a CUDA
graph. `workspace` bounds the memory beside weights and results.
"""

import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from steerscope.lenses.pack import Pack
from steerscope.lenses.stack import WORKSPACE, Stack, Weights, trusted
from steerscope.specs.errors import InvalidRequest, Problem

Lenses = slice | Sequence[int]


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores and their lenses, best first; of equal scores the earlier lens comes first.

    Saturated sigmoids give many scores of exactly 1, which `topk` alone would order arbitrarily. The bits of positive
    floats are ordered as the floats are, so bits and lens are combined into one key.
    """
    bits = torch.where(scores > 0, scores, 0.0).view(torch.int32).long()
    later = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    lenses = ((bits << 32) + later).topk(k, dim=-1).indices
    return scores.gather(1, lenses), lenses


class Bank:
    """All lenses of a pack, or some: a slice such as `pack.level(1)`, or indices, whose order results keep."""

    def __init__(
        self,
        pack: Pack,
        lenses: Lenses | None = None,
        *,
        device: str | torch.device = "cpu",
        weights: Weights = "fp32",
        workspace: int = WORKSPACE,
    ) -> None:
        self.pack = pack
        self.device = torch.device(device)
        self.lenses = _indices(pack, lenses)
        self._stack = Stack(pack, len(self.lenses), self.device, weights, workspace)
        self._stack.fill(self.lenses)
        self._index = torch.tensor(self.lenses, device=self.device)
        self._chooses = False  # whether a kernel finds the top k, see `warm_up`

    def __len__(self) -> int:
        return len(self.lenses)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights on the device."""
        return sum(tensor.nbytes for tensor in self._stack.tensors.values())

    def warm_up(self) -> None:
        """Compile the kernel of `best` now, not during a request, and use it if it finds what sorting finds."""
        kernels = self._stack.kernels
        self._chooses = kernels is not None and trusted(lambda: self._fault(kernels))

    @torch.no_grad()
    def _fault(self, kernels: ModuleType) -> str:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(3, len(self), generator=generator).to(self.device)
        views = torch.rand(2, len(self), generator=generator).lt(0.5).to(self.device)
        view_of_row = torch.tensor([1, 0, 1], device=self.device)
        sizes = [min(most, len(self)) for most in kernels.CHOSEN]
        for k, view in itertools.product(filter(self._may_choose, sizes), (None, view_of_row)):
            counts = torch.ones_like(logits).bool() if view is None else views[view]
            found, expected = (find(logits.clone(), k, views, view) for find in (self._chosen, self._sorted))
            if not _agree(found, expected, counts):
                return "they do not find the largest scores"
        return ""

    @torch.no_grad()
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [n, lenses] of rows [n, hidden] of any float dtype."""
        result = self._result(rows, out)
        self._stack.logits(rows, [range(len(self))], result)
        return result

    @torch.no_grad()
    def probabilities(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return each lens's own output: a probability, or the activation of a sparse autoencoder's feature."""
        return self._stack.outputs(self.logits(rows, out))

    @torch.no_grad()
    def scores(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return probabilities, calibrated if the pack has a calibration, and 0 at or below the noise floor."""
        return self._stack.scored(self.logits(rows, out))

    @torch.no_grad()
    def best(self, rows: Tensor, k: int, views: Tensor, view: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k largest scores of each row (or all), best first, their columns (−1: score 0), and all scores.

        `view` [n] is the line of `views` [·, lenses] that marks the lenses that count for each row (None: all).
        """
        k = min(k, len(self))
        find = self._chosen if self._chooses and self._may_choose(k) else self._sorted
        return find(self.logits(rows), k, views, view)

    def _may_choose(self, k: int) -> bool:
        kernels = self._stack.kernels
        return kernels is not None and kernels.chooses(len(self), k, self.pack.info.architecture.output)

    def _chosen(self, logits: Tensor, k: int, views: Tensor, view: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `best` of logits by the kernel, which turns them into scores in place."""
        stack = self._stack
        output = self.pack.info.architecture.output
        assert stack.kernels is not None
        how = output, stack.tensors, stack.floored, stack.calibrated
        return *stack.kernels.choose(logits, k, *how, views, view), logits

    def _sorted(self, logits: Tensor, k: int, views: Tensor, view: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `best` of logits by torch operations."""
        scores = self._stack.scored(logits)
        values, indices = best_of(scores if view is None else torch.where(views[view], scores, 0.0), k)
        positive = values > 0
        return torch.where(positive, values, 0.0), torch.where(positive, indices, -1), scores

    @torch.no_grad()
    def top(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest scores of each row (or all) and their lenses, as indices of the pack."""
        k = min(k, len(self))
        step = max(1, self._stack.workspace // (16 * len(self)))  # rows whose scores fit
        found = [self.scores(part).topk(k, dim=-1) for part in rows.split(step)]
        values, columns = (torch.cat(column) for column in zip(*found, strict=True))
        return values, self._index[columns]

    def _result(self, rows: Tensor, out: Tensor | None) -> Tensor:
        if rows.dim() != 2 or rows.shape[1] != self.pack.info.hidden:
            what = f"have shape {list(rows.shape)}"
            wanted = f"give [n, {self.pack.info.hidden}]"
            raise InvalidRequest([Problem("rows", what, wanted)])
        if out is None:
            return torch.empty(len(rows), len(self), device=self.device)
        if out.shape != (len(rows), len(self)) or out.dtype != torch.float32:
            what = f"is {out.dtype} {list(out.shape)}"
            raise InvalidRequest([Problem("out", what, f"give float32 [{len(rows)}, {len(self)}]")])
        return out


def _agree(found: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, Tensor, Tensor], counts: Tensor) -> bool:
    """Return whether values agree and belong to different lenses that count and have these scores.

    The lenses may differ: of two that score nearly the same, another rounding may put the other one first.
    """
    values, lenses, scores = found
    named = torch.where(lenses < 0, 0.0, torch.where(counts, wanted[2], 0.0).gather(1, lenses.clamp(min=0)))
    pairs = (values, wanted[0]), (scores, wanted[2]), (named, wanted[0])
    in_order = lenses.sort(dim=-1).values
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    return all(torch.allclose(one, other, atol=1e-5) for one, other in pairs) and not twice.any()


def _indices(pack: Pack, lenses: Lenses | None) -> list[int]:
    everything = range(len(pack))
    if lenses is None:
        lenses = slice(None)
    chosen = list(everything[lenses] if isinstance(lenses, slice) else lenses)
    problems = [
        Problem("lenses", f"{i} does not exist", f"the pack has lenses 0–{len(pack) - 1}")
        for i in chosen
        if not 0 <= i < len(pack)
    ]
    if not chosen:
        problems.append(Problem("lenses", "there are none", "give at least one"))
    if pack.info.architecture.output == "topk" and sorted(chosen) != list(everything):
        problems.append(Problem("lenses", "the output topk compares all lenses of a row", "take the whole pack"))
    if problems:
        raise InvalidRequest(problems)
    return chosen
