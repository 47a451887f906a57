"""Ops that gradient descent changes.

At each tap a vector is added. With `rank` r, r unit directions follow of which a learned part is kept, each by an
`Ablate`: together a symmetric update of rank r. At the start all of each direction is kept, which changes nothing.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from steerscope.core.equation import Operands
from steerscope.specs.steering import Ablate, Add, Coefficients, Site


class Learnable(nn.Module):
    def __init__(
        self, layers: Sequence[int], site: Site, start: Mapping[int, Tensor], hidden: int, rank: int = 0, seed: int = 0
    ) -> None:
        """Layers without a vector in `start` begin at zero."""
        super().__init__()
        self.layers, self.rank = tuple(layers), rank
        self.site: Site = site
        zero, generator = torch.zeros(hidden), torch.Generator().manual_seed(seed)
        self.added = nn.Parameter(torch.stack([start.get(layer, zero).float() for layer in self.layers]))
        if rank:
            drawn = torch.randn(len(self.layers), rank, hidden, generator=generator)
            self.directions = nn.Parameter(normalize(drawn, dim=-1))
            self.kept = nn.Parameter(torch.ones(len(self.layers), rank))

    def columns(self, layer: int, rows: int) -> list[Operands]:
        """Return the ops at a layer for a number of rows."""
        i = self.layers.index(layer)
        made = [_operands(self.added[i], Add(vector=[1.0]).coefficients(), rows)]
        for j in range(self.rank):
            column = _operands(normalize(self.directions[i, j], dim=-1), Ablate(vector=[1.0]).coefficients(), rows)
            made.append(column._replace(s=self.kept[i, j].expand(rows)))
        return made

    def vectors(self) -> dict[int | None, Tensor]:
        return {layer: self.added[i].detach().clone() for i, layer in enumerate(self.layers)}

    def ops(self, tokens: str = "all") -> list[Add | Ablate]:
        """Return the ops of a request that steers these tokens; a vector that is still zero has no op."""
        made: list[Add | Ablate] = []
        for i, layer in enumerate(self.layers):
            if self.added[i].any():
                made.append(Add(vector={layer: self.added[i]}, site=self.site, tokens=tokens))
            for j in range(self.rank):
                kept = float(self.kept[i, j].detach())
                way = self.directions[i, j]
                made.append(Ablate(vector={layer: way}, site=self.site, tokens=tokens, scale=kept))
        return made


def _operands(v: Tensor, coefficients: Coefficients, rows: int) -> Operands:
    c, s, m, lo, hi = (torch.full((rows,), number, device=v.device) for number in coefficients)
    return Operands(v.expand(rows, -1), c, s, m, lo, hi, torch.zeros(rows, dtype=torch.long, device=v.device))


def perplexity(nats: float) -> float:
    """Return the perplexity of a mean loss, infinite where it exceeds the floats."""
    return math.exp(nats) if nats < 700 else math.inf
