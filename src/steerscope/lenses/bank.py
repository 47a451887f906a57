"""Bank: lenses of a pack on a device, evaluated together.

    bank = Bank(pack, device="cuda", weights="bf16")
    values, indices = bank.top(rows, 10)

Nothing waits for the device, and no shape depends on a value: with `out` given, or in a graph's own memory, every
method can be captured in a CUDA graph. Memory beside weights and results has a bound, `workspace`.
"""

import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from steerscope.lenses.pack import Calibration, Pack
from steerscope.lenses.spec import Output
from steerscope.lenses.stack import WORKSPACE, Stack, Weights, runs_of, unused
from steerscope.lenses.tensors import PER_LENS
from steerscope.specs.errors import InvalidRequest, Problem

Lenses = slice | Sequence[int]


def gather(pack: Pack, lenses: Lenses) -> dict[str, Tensor]:
    """The tensors of some lenses. A slice of a pack on disk is not read yet."""
    chosen = lenses if isinstance(lenses, slice) else torch.tensor(list(lenses), dtype=torch.long)
    return {name: tensor[chosen] for name, tensor in pack.tensors.items() if name not in ("decoder", "normed")}


def normed_flags(pack: Pack) -> list[bool]:
    return pack.tensors["normed"].tolist() if "normed" in pack.tensors else [False] * len(pack)


def activate(logits: Tensor, output: Output, k: int | None, threshold: Tensor) -> Tensor:
    """Logits [n, lenses] → what the lenses say, in place where that is possible."""
    match output:
        case "sigmoid":
            return logits.sigmoid_()
        case "relu":
            return logits.relu_()
        case "jumprelu":
            return logits.mul_(logits > threshold).relu_()
        case "topk":
            values, indices = logits.topk(k or 1, dim=-1)
            return logits.zero_().scatter_(-1, indices, values.relu_())


def calibrate(probabilities: Tensor, floor: Tensor, calibration: Calibration | None) -> Tensor:
    """The noise floor, then the calibration."""
    scores = probabilities if calibration is None else calibration.apply(probabilities)
    return torch.where(probabilities > floor, scores, 0.0)


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The top k. Of equal scores the earlier lens comes first: sigmoids and calibrations end in many that are just 1,
    and `topk` alone would choose among them by chance. Positive floats are ordered as their bits are."""
    bits = torch.where(scores > 0, scores, 0.0).view(torch.int32).long()
    later = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    lenses = ((bits << 32) + later).topk(k, dim=-1).indices
    return scores.gather(1, lenses), lenses


class Bank:
    """All lenses of a pack, or some (a slice such as `pack.level(1)`, or indices, in the order given)."""

    def __init__(
        self,
        pack: Pack,
        lenses: Lenses | None = None,
        *,
        device: str | torch.device = "cpu",
        weights: Weights = "fp32",
        workspace: int = WORKSPACE,
    ) -> None:
        self.pack, self.device = pack, torch.device(device)
        self.lenses = _indices(pack, lenses)
        flags = normed_flags(pack)
        # Lenses of one kind of input lie together here; `_columns` puts results back into the order asked for.
        places = sorted(range(len(self.lenses)), key=lambda place: flags[self.lenses[place]])
        inside = [self.lenses[place] for place in places]
        self._runs = runs_of(range(len(inside)), [flags[lens] for lens in inside])
        self._columns = None
        if inside != self.lenses:
            self._columns = torch.tensor(places).argsort().to(self.device)
        self._stack = Stack(pack.info, len(inside), self.device, weights, workspace)
        step = max(1, workspace // max(1, self._stack.lens_bytes) // 2)
        for start in range(0, len(inside), step):  # in parts: the whole pack may not fit into the host's memory
            part = _as_slice(inside[start : start + step])
            self._stack.write(slice(start, start + step), self._stack.encode(gather(pack, part)))
        self._index = torch.tensor(self.lenses, device=self.device)
        order = slice(None) if self._columns is None else self._columns
        self._per_lens = {name: self._stack.tensors[name][order] for name in PER_LENS}
        self._threshold, self._floor = self._per_lens["threshold"], self._per_lens["floor"]
        self._calibration = None
        if pack.calibration:
            self._calibration = Calibration(*(self._per_lens[name] for name in Calibration._fields))
        self._floored = self._calibration is not None or "floor" in pack.tensors
        self._chooses = False  # by a kernel: `warm_up`

    def __len__(self) -> int:
        return len(self.lenses)

    @property
    def nbytes(self) -> int:
        """Weights on the device."""
        return sum(tensor.nbytes for tensor in self._stack.tensors.values())

    def warm_up(self) -> None:
        """What `best` needs on a GPU is compiled now, and not while somebody waits for it. It is used only if it finds
        what the other way finds."""
        self._chooses = self._stack.kernels is not None and self._proved(self._stack.kernels)

    @torch.no_grad()
    def _proved(self, kernels: ModuleType) -> bool:
        chance, view = torch.Generator().manual_seed(0), torch.tensor([1, 0, 1], device=self.device)
        logits = torch.randn(3, len(self), generator=chance).to(self.device)
        views = torch.rand(2, len(self), generator=chance).lt(0.5).to(self.device)
        try:
            for most, at in itertools.product(kernels.CHOSEN, (None, view)):
                k, counts = min(most, len(self)), torch.ones_like(logits).bool() if at is None else views[at]
                if not self._may_choose(k):
                    continue
                found, wanted = (find(logits.clone(), k, views, at) for find in (self._chosen, self._sorted))
                if not _agree(found, wanted, counts):
                    return unused("they do not find the largest")
        except Exception as error:
            return unused(f"{type(error).__name__}: {error}")
        return True

    @torch.no_grad()
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows [n, hidden] of any float dtype → [n, lenses], float32."""
        result = self._result(rows, out)
        if self._columns is None:
            self._stack.logits(rows, self._runs, result)
            return result
        together = torch.empty_like(result)
        self._stack.logits(rows, self._runs, together)
        return torch.index_select(together, 1, self._columns, out=result)

    @torch.no_grad()
    def probabilities(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """What each lens says alone: a probability, or the activation of a feature of a sparse autoencoder."""
        return self._said(self.logits(rows, out))

    @torch.no_grad()
    def scores(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Probabilities, calibrated where the pack has a calibration; at or below the noise floor they are 0."""
        return self._scored(self.logits(rows, out))

    def _said(self, logits: Tensor) -> Tensor:
        architecture = self.pack.info.architecture
        return activate(logits, architecture.output, architecture.k, self._threshold)

    def _scored(self, logits: Tensor) -> Tensor:
        result = self._said(logits)
        return result.copy_(calibrate(result, self._floor, self._calibration)) if self._floored else result

    @torch.no_grad()
    def best(self, rows: Tensor, k: int, views: Tensor, view: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest scores of each row, or all if there are fewer, best first; which columns they are (−1: nothing
        more to say); and all scores. `view` [n] says which line of `views` [·, lenses] has the lenses that count (None:
        all)."""
        k = min(k, len(self))
        find = self._chosen if self._chooses and self._may_choose(k) else self._sorted
        return find(self.logits(rows), k, views, view)

    def _may_choose(self, k: int) -> bool:
        kernels = self._stack.kernels
        return kernels is not None and kernels.chooses(len(self), k, self.pack.info.architecture.output)

    def _chosen(self, logits: Tensor, k: int, views: Tensor, view: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`best` of logits, which become scores: by a kernel."""
        assert self._stack.kernels is not None
        how = self.pack.info.architecture.output, self._per_lens, self._floored, self._calibration is not None
        return *self._stack.kernels.choose(logits, k, *how, views, view), logits

    def _sorted(self, logits: Tensor, k: int, views: Tensor, view: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same, one operation after the other."""
        scores = self._scored(logits)
        values, indices = best_of(scores if view is None else torch.where(views[view], scores, 0.0), k)
        said = values > 0
        return torch.where(said, values, 0.0), torch.where(said, indices, -1), scores

    @torch.no_grad()
    def top(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest scores of each row, or all if there are fewer, and which lenses of the pack they belong to."""
        k = min(k, len(self))
        values = torch.empty(len(rows), k, device=self.device)
        indices = torch.empty(len(rows), k, dtype=torch.long, device=self.device)
        step = max(1, self._stack.workspace // (16 * len(self)))  # scores of so many rows are there at a time
        for start in range(0, len(rows), step):
            here = slice(start, start + step)
            best, columns = self.scores(rows[here]).topk(k, dim=-1)
            values[here] = best
            indices[here] = self._index[columns]
        return values, indices

    def _result(self, rows: Tensor, out: Tensor | None) -> Tensor:
        if rows.dim() != 2 or rows.shape[1] != self.pack.info.hidden:
            what, wanted = f"have shape {list(rows.shape)}", f"give [n, {self.pack.info.hidden}]"
            raise InvalidRequest([Problem("rows", what, wanted)])
        if out is None:
            return torch.empty(len(rows), len(self), device=self.device)
        if out.shape != (len(rows), len(self)) or out.dtype != torch.float32:
            what = f"is {out.dtype} {list(out.shape)}"
            raise InvalidRequest([Problem("out", what, f"give float32 [{len(rows)}, {len(self)}]")])
        return out


def _agree(found: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, Tensor, Tensor], counts: Tensor) -> bool:
    """Whether these are as large, belong to lenses that count and are as large, and to each once. Where two lenses say
    nearly the same, another rounding may put the other one first."""
    values, lenses, scores = found
    named = torch.where(lenses < 0, 0.0, torch.where(counts, wanted[2], 0.0).gather(1, lenses.clamp(min=0)))
    pairs = (values, wanted[0]), (scores, wanted[2]), (named, wanted[0])
    in_order = lenses.sort(dim=-1).values
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    return all(torch.allclose(one, other, atol=1e-5) for one, other in pairs) and not twice.any()


def _indices(pack: Pack, lenses: Lenses | None) -> list[int]:
    everything = range(len(pack))
    chosen = list(everything if lenses is None else everything[lenses] if isinstance(lenses, slice) else lenses)
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


def _as_slice(lenses: Sequence[int]) -> Lenses:
    together = all(b - a == 1 for a, b in zip(lenses, lenses[1:], strict=False))
    return slice(lenses[0], lenses[-1] + 1) if together else lenses
