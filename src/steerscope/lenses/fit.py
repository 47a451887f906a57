"""Fit all lenses of a pack together: rows and labels in, stacked weights out. Needs no engine and no files.

Every text was written for one concept, and its rows carry that label. Positives of a lens are rows of its concept and
of concepts below it; negatives are sampled rows of siblings, opposites and distant concepts, never of ancestors. Half
of each batch is positive, so that a constant answer does not win. All lenses take a step at once on stacked weights
[lenses, …]. After each epoch a lens is validated on texts of forms it was not trained on: its best weights are kept,
and a lens that has not improved for `patience` epochs leaves the stack.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from steerscope.lenses.spec import EPSILON
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem

TRAIN = 0
VALIDATION = 1
TEST = 2
_WORKSPACE = 1 << 24  # values of a hidden layer in memory at once
Weights = dict[str, Tensor]


class FitSettings(Spec):
    """Settings of training. `widths` () is a linear probe; every step uses `batch` rows of each lens."""

    widths: tuple[int, ...] = (128, 64)
    epochs: int = Field(default=40, ge=1)
    steps: int = Field(default=20, ge=1)  # of one epoch
    batch: int = Field(default=64, ge=2)
    learning_rate: float = Field(default=3e-4, gt=0)
    weight_decay: float = Field(default=3.0, ge=0)
    dropout: float = Field(default=0.5, ge=0, lt=1)
    patience: int = Field(default=4, ge=1)  # epochs without improvement
    siblings: float = Field(default=0.2, ge=0, le=1)  # share of the negatives; the rest is distant
    opposites: float = Field(default=0.05, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Rows with labels: `text[i]` is the text of row i, `concept[t]` and `part[t]` belong to text t."""

    rows: Tensor  # [rows, hidden]
    text: Tensor  # [rows]
    concept: Tensor  # [texts]
    part: Tensor  # [texts]: TRAIN, VALIDATION or TEST

    def __post_init__(self) -> None:
        problems = []
        if self.rows.dim() != 2 or len(self.rows) != len(self.text):
            problems.append(Problem("rows", f"have shape {list(self.rows.shape)}", f"give {len(self.text)} rows"))
        if len(self.concept) != len(self.part) or (len(self.text) and int(self.text.max()) >= len(self.concept)):
            problems.append(Problem("text", "points beyond the list of texts", "give a concept and a part for each"))
        if problems:
            raise InvalidRequest(problems)

    def of(self, part: int) -> tuple[Tensor, Tensor]:
        """Return the rows of one part, normalised as for lenses, and the concept of each."""
        chosen = (self.part[self.text] == part).nonzero().flatten()
        return normalise(self.rows[chosen]), self.concept[self.text[chosen]]


@dataclass(frozen=True, slots=True)
class Relations:
    """What texts of each concept are to each lens, bool [lenses, concepts]; others are never used."""

    positive: Tensor  # the concept itself and its descendants
    siblings: Tensor
    opposites: Tensor
    distant: Tensor

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], opposites: Sequence[Sequence[int]] | None = None) -> "Relations":
        """Derive relations from each concept's parents and opposites, as indices. Opposites are symmetric."""
        n = len(parents)
        parent = torch.zeros(n, n, dtype=torch.bool)
        against = torch.zeros(n, n, dtype=torch.bool)
        for i, above in enumerate(parents):
            parent[i, list(above)] = True
        for i, other in enumerate(opposites or ()):
            against[i, list(other)] = True
        above = parent
        further = above | _reach(above, above)
        while not torch.equal(further, above):
            above = further
            further = above | _reach(above, above)
        positive = above.T | torch.eye(n, dtype=torch.bool)
        allowed = ~(positive | above)
        opposed = _reach(against | against.T, positive) & allowed
        beside = _reach(_reach(parent, parent.T), positive) & allowed & ~opposed
        return cls(positive, beside, opposed, allowed & ~beside & ~opposed)

    @property
    def negative(self) -> Tensor:
        return self.siblings | self.opposites | self.distant

    def shares(self, settings: FitSettings, present: Tensor) -> Tensor:
        """Return each concept's share of a lens's negatives [lenses, concepts]; rows sum to 1.

        `present` marks concepts that have texts. The share of a missing kind goes to the others.
        """
        rest = max(0.0, 1 - settings.siblings - settings.opposites)
        kinds = (self.siblings, settings.siblings), (self.opposites, settings.opposites), (self.distant, rest)
        total = torch.zeros(self.positive.shape)
        for mask, share in kinds:
            usable = (mask & present).float()
            total += share * usable / usable.sum(1, keepdim=True).clamp_min(1)
        fallback = (self.negative & present).float()
        total = torch.where(total.sum(1, keepdim=True) > 0, total, fallback)
        return total / total.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _reach(first: Tensor, then: Tensor) -> Tensor:
    """Compose two relations."""
    return (first.float() @ then.float()) > 0


@dataclass(frozen=True, slots=True)
class Fit:
    """Stacked weights as in a pack, and each lens's best validation loss and its epoch."""

    weights: Weights
    loss: Tensor
    epoch: Tensor


def normalise(rows: Tensor) -> Tensor:
    """Apply the LayerNorm without parameters that precedes every lens."""
    return functional.layer_norm(rows.float(), rows.shape[-1:], eps=EPSILON)


def logits(weights: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Return logits [rows, lenses] of normalised rows, computed in tiles."""
    lenses, width = weights["b0"].shape
    tile = max(1, _WORKSPACE // (lenses * width))
    return torch.cat([_dense(weights, part) for part in rows.split(tile)] or [rows.new_zeros(0, lenses)])


def _dense(weights: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    hidden = (rows @ weights["w0"].flatten(0, 1).T).view(len(rows), *weights["b0"].shape) + weights["b0"]
    for i in range(1, len(weights) // 2):
        hidden = torch.einsum("nli,loi->nlo", hidden.relu(), weights[f"w{i}"]) + weights[f"b{i}"]
    return hidden.squeeze(-1)


def fit(
    examples: LabelledRows,
    relations: Relations,
    settings: FitSettings | None = None,
    *,
    seed: int = 0,
    lenses: range | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Fit:
    """Train the lenses (or some) until none improves. Calls `progress(epoch, lenses still training)`.

    The same seed gives the same weights, bit for bit on one machine.
    """
    settings = settings or FitSettings()
    which = torch.tensor(list(lenses if lenses is not None else range(len(relations.positive))))
    generator = torch.Generator(examples.rows.device).manual_seed(seed * 1_000_003 + int(which[0]))
    sampler = _Sampler(examples, relations, settings, which)
    judge = _Judge(examples, relations, settings, which)
    now = _initial(len(which), examples.rows.shape[1], settings.widths, generator)
    best = {name: tensor.detach().clone() for name, tensor in now.items()}
    loss = torch.full((len(which),), torch.inf, device=generator.device)
    epoch_of = torch.zeros_like(which)
    active = torch.arange(len(which), device=generator.device)
    adam = _optimiser(now, settings)
    for epoch in range(1, settings.epochs + 1):
        for _ in range(settings.steps):
            rows, truth = sampler.draw(active, generator)
            adam.zero_grad()
            _loss(now, rows, truth, settings.dropout, generator).backward()
            adam.step()
        found = judge.losses(now, active)
        better = found < loss[active]
        for name, tensor in best.items():
            tensor[active[better]] = now[name].detach()[better]
        loss[active[better]], epoch_of[active[better].cpu()] = found[better], epoch
        going = epoch - epoch_of[active.cpu()] < settings.patience
        active = active[going]
        _keep(now, adam, going)
        if progress:
            progress(epoch, len(active))
        if not len(active):
            break
    return Fit(best, loss, epoch_of)


def _initial(lenses: int, hidden: int, widths: Sequence[int], generator: torch.Generator) -> Weights:
    """Draw weights as torch initialises a Linear."""
    weights: Weights = {}
    sizes = [hidden, *widths, 1]
    for i, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        for name, shape in {f"w{i}": (lenses, out, into), f"b{i}": (lenses, out)}.items():
            drawn = torch.rand(shape, generator=generator, device=generator.device)
            weights[name] = ((2 * drawn - 1) / into**0.5).requires_grad_()
    return weights


def _loss(weights: Weights, rows: Tensor, truth: Tensor, dropout: float, generator: torch.Generator) -> Tensor:
    """Return the summed loss. Lenses share no weight, so each gets the gradient of its own mean loss."""
    hidden = rows
    last = len(weights) // 2 - 1
    for i in range(last + 1):
        hidden = torch.baddbmm(weights[f"b{i}"].unsqueeze(1), hidden, weights[f"w{i}"].transpose(1, 2))
        if i < last:
            kept = torch.rand(hidden.shape, generator=generator, device=generator.device) >= dropout
            hidden = hidden.relu() * kept / (1 - dropout)
    each = functional.binary_cross_entropy_with_logits(hidden.squeeze(-1), truth, reduction="none")
    return each.mean(1).sum()


def _optimiser(weights: Weights, settings: FitSettings) -> torch.optim.AdamW:
    decayed = [tensor for name, tensor in weights.items() if name.startswith("w")]
    others = [tensor for name, tensor in weights.items() if not name.startswith("w")]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def _keep(weights: Weights, adam: torch.optim.AdamW, going: Tensor) -> None:
    """Remove the other lenses from the stack and from the optimiser."""
    for tensor in weights.values():
        state = adam.state[tensor]
        tensor.data = tensor.data[going]
        tensor.grad = None
        state |= {name: state[name][going] for name in ("exp_avg", "exp_avg_sq")}


class _Sampler:
    """Draws a batch for every lens: a concept by its share, then one of the concept's rows."""

    def __init__(self, examples: LabelledRows, relations: Relations, settings: FitSettings, which: Tensor) -> None:
        rows, concept = examples.of(TRAIN)
        order = concept.argsort(stable=True)
        self._rows = rows[order]
        device = rows.device
        count = torch.bincount(concept.cpu(), minlength=relations.positive.shape[1])
        self._count = count.to(device)
        self._start = (count.cumsum(0) - count).to(device)
        positive = (relations.positive * count)[which].double()
        negative = relations.shares(settings, count > 0)[which].double()
        _refuse_unlearnable(which, positive, negative, "training")
        self._tables = [(share / share.sum(1, keepdim=True)).cumsum(1).to(device) for share in (positive, negative)]
        half = settings.batch // 2
        self._sizes = (half, settings.batch - half)

    def draw(self, active: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows [active, batch, hidden], positives first, and their truth [active, batch]."""
        picked = []
        for table, size in zip(self._tables, self._sizes, strict=True):
            dice = torch.rand(2, len(active), size, generator=generator, device=generator.device, dtype=torch.double)
            share = table[active]
            # Rounding may leave the last sum slightly below 1, so the draw is scaled to it.
            concept = torch.searchsorted(share, dice[0] * share[:, -1:], right=True)
            picked.append(self._start[concept] + (dice[1] * self._count[concept]).long())
        truth = torch.cat([torch.ones(picked[0].shape), torch.zeros(picked[1].shape)], 1)
        return self._rows[torch.cat(picked, 1)], truth.to(self._rows.device)


class _Judge:
    """Computes the balanced validation loss of every lens, with negatives weighted as in training."""

    def __init__(self, examples: LabelledRows, relations: Relations, settings: FitSettings, which: Tensor) -> None:
        self._rows, self._concept = examples.of(VALIDATION)
        count = torch.bincount(self._concept.cpu(), minlength=relations.positive.shape[1])
        positive = (relations.positive * (count > 0))[which].float()
        positive = positive * count / (positive * count).sum(1, keepdim=True).clamp_min(1)
        negative = relations.shares(settings, count > 0)[which]
        _refuse_unlearnable(which, positive, negative, "validation")
        weight = torch.stack([positive, negative]) / count.clamp_min(1)
        self._weight = weight.to(self._rows.device)  # of one row of a concept: [2, lenses, concepts]

    @torch.no_grad()
    def losses(self, weights: Weights, active: Tensor) -> Tensor:
        found = logits(weights, self._rows)
        positive, negative = self._weight[:, active][:, :, self._concept].transpose(1, 2)
        return (functional.softplus(-found) * positive + functional.softplus(found) * negative).sum(0) / 2


def _refuse_unlearnable(which: Tensor, positive: Tensor, negative: Tensor, part: str) -> None:
    problems = [
        Problem(f"lens {int(i)}", f"has no {kind} rows for {part}", "give its concept texts of more forms")
        for kind, share in (("positive", positive), ("negative", negative))
        for i in which[share.sum(1) == 0]
    ]
    if problems:
        raise InvalidRequest(problems)
