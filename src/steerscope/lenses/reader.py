"""Reader: one pack on a device that reads rows: their top concepts, and the scores that rules need.

Without a budget the pack is a bank: every lens is evaluated, without synchronising. With a budget it is tiers: concepts
are found by expansion, and rules may only name concepts that are always on the device (base levels, pinned).
"""

import functools
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from steerscope.lenses.bank import Bank
from steerscope.lenses.pack import Pack
from steerscope.lenses.stack import WORKSPACE, Weights
from steerscope.lenses.tiers import Tiers
from steerscope.specs.errors import InvalidRequest, Problem

Array = TypeVar("Array")


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How a registered pack is kept on the device.

    `budget` (lenses) or `budget_bytes` make it tiers, `pinned` are concepts of rules, `any_model` accepts a pack of
    another model's name.
    """

    weights: Weights = "fp32"
    budget: int | None = None
    budget_bytes: int | None = None
    base_levels: int = 2
    pinned: tuple[str, ...] = ()
    any_model: bool = False
    workspace: int = WORKSPACE

    @property
    def tiered(self) -> bool:
        return self.budget is not None or self.budget_bytes is not None


@dataclass(frozen=True)
class Registered:
    """A pack with the options it was registered with."""

    pack: Pack
    options: PackOptions = PackOptions()

    @cached_property
    def digest(self) -> str:
        """Return a hash of the pack and its options."""
        return hashlib.blake2b(repr((self.pack.digest, self.options)).encode(), digest_size=16).hexdigest()

    @cached_property
    def always(self) -> dict[int, int] | None:
        """Return the score column of each lens that is always on the device; None: all, at their index."""
        if not self.options.tiered:
            return None
        pack = self.pack
        levels = min(self.options.base_levels, self.pack.levels)
        base = range(pack.level(levels - 1).stop)
        pinned = [pack.index(name) for name in self.options.pinned]
        return {lens: i for i, lens in enumerate(dict.fromkeys([*base, *pinned]))}

    def readable(self, lens: int) -> bool:
        return self.always is None or lens in self.always

    def column(self, lens: int) -> int:
        return lens if self.always is None else self.always[lens]

    def problems(self) -> list[Problem]:
        """Return the problems that show without a device."""
        found: list[Problem] = []
        for name in self.options.pinned:
            try:
                self.pack.index(name)
            except InvalidRequest as error:
                found += [problem.under("pinned") for problem in error.problems]
        if self.options.tiered and self.pack.info.architecture.output == "topk":
            what = "the output topk compares all lenses of a row"
            found.append(Problem("budget", what, "leave it out"))
        return found


class StepReadings(NamedTuple, Generic[Array]):
    """`values` and `indices` [n, k] of the top concepts of n rows, best first (index −1: empty), the requested scores
    [n, terms], and which rules went on and off [n, rules] (None: no rules)."""

    values: Array
    indices: Array
    scores: Array | None = None
    on: Array | None = None
    off: Array | None = None

    def to_host(self) -> "HostStepReadings":
        return HostStepReadings(*(part if part is None else part.cpu().numpy() for part in self))  # type: ignore[union-attr]


HostStepReadings = StepReadings[np.ndarray]


class Reader:
    """A registered pack on a device, as a bank or as tiers."""

    def __init__(self, registered: Registered, device: str | torch.device = "cpu") -> None:
        self.registered = registered
        self.pack = registered.pack
        self.device = torch.device(device)
        options = registered.options
        kept: dict[str, Any] = {"device": self.device, "weights": options.weights, "workspace": options.workspace}
        self.bank = None if options.tiered else Bank(self.pack, **kept)
        self.tiers = self._tiers(options, kept) if options.tiered else None
        self._views: dict[tuple[int, ...] | None, int] = {None: 0}
        # One line per view: the lenses that count.
        self.views = torch.ones(1, len(self.pack), dtype=torch.bool, device=self.device)
        if self.bank is not None:
            self.bank.warm_up()

    def _tiers(self, options: PackOptions, kept: dict[str, Any]) -> Tiers:
        levels = min(options.base_levels, self.pack.levels)
        pinned = list(self.registered.always or ())
        budgets = {"budget": options.budget, "budget_bytes": options.budget_bytes}
        return Tiers(self.pack, **budgets, base_levels=levels, pinned=pinned, **kept)

    def view(self, levels: tuple[int, ...] | None) -> int:
        """Return the number of the view of these levels; 0 is all levels."""
        if levels not in self._views:
            mask = torch.zeros(1, len(self.pack), dtype=torch.bool, device=self.device)
            for level in levels or ():
                mask[:, self.pack.level(level)] = True
            self._views[levels] = len(self.views)
            self.views = torch.cat([self.views, mask])
        return self._views[levels]

    @torch.no_grad()
    def read(
        self, rows: Tensor, top_k: int, columns: Tensor | None = None, view: Tensor | None = None
    ) -> StepReadings[Tensor]:
        """Read rows [n, hidden]. `columns` [n, terms] are the requested scores of each row, `view` [n] the view of each
        row (None: all lenses)."""
        if self.tiers is not None:
            found = self.tiers.expand(rows, top_k)
            scores = None if columns is None else self.tiers.pinned_scores(rows).gather(1, columns)
            return StepReadings(found.values, found.indices, scores)
        assert self.bank is not None
        step = max(1, self.registered.options.workspace // (40 * len(self.pack)))  # bytes of scores, keys and views
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, max(1, len(rows)), step):
            here = slice(start, start + step)
            values, indices, scores = self.bank.best(
                rows[here], top_k, self.views, None if view is None else view[here]
            )
            parts.append((values, indices) if columns is None else (values, indices, scores.gather(1, columns[here])))
        return StepReadings(*(parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))))


@functools.cache
def _loading_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all loads, so that a new pack reuses the memory of a dropped one."""
    return torch.cuda.Stream(device)


def load_reader(registered: Registered, device: torch.device) -> Reader:
    """Make a reader beside other work of the device. Its weights are complete on return."""
    if device.type != "cuda":
        return Reader(registered, device)
    torch.cuda.set_device(device)
    stream = _loading_stream(device)
    with torch.cuda.stream(stream):
        reader = Reader(registered, device)
    stream.synchronize()
    return reader
