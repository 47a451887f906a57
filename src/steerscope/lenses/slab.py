"""Slab: score all hot lenses and expand over their scores in one pass, without the host.

On a GPU the pass is one CUDA graph per number of rows. Rows whose groups are all hot cost one launch, and one copy to
the host of which groups were used. If one of these is not hot, the caller must discard the result.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.lenses.bank import Scoring
from steerscope.lenses.expand import Expanded, Groups, expand
from steerscope.lenses.graph_pool import GraphPool
from steerscope.lenses.slots import LensSlots
from steerscope.lenses.stack import Stack

MOST_ROWS = 64  # of one pass; for more rows it is faster to score only the needed lenses
_GRAPHS = 16  # cached; each holds its results, all share one workspace


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    rows: Tensor
    results: Expanded


class Slab:
    """The pass over one stack, and its CUDA graphs."""

    def __init__(self, stack: Stack, groups: Groups) -> None:
        self._stack = stack
        self._groups = groups
        self._scoring = Scoring(groups.pack, stack.tensors)
        self._nowhere = len(groups.pack)  # column of empty slots
        self._lens_of = torch.full((stack.slots,), self._nowhere, device=stack.device)
        self._changes: int | None = None
        self._graphs: dict[object, _Graph] = {}
        self._pool = GraphPool()

    def expand(self, rows: Tensor, top_k: int, depth: int, slots: LensSlots) -> Expanded:
        """Expand over the hot lenses; `used` [lenses] is whether any row used a concept's group."""
        if self._changes != slots.changes:
            lens_of = [self._nowhere] * self._stack.slots
            for lens, slot in slots.of.items():
                lens_of[slot] = lens
            self._lens_of.copy_(torch.tensor(lens_of))
            self._changes = slots.changes
        if rows.device.type != "cuda":
            return self._pass(rows, top_k, depth)
        return Expanded(*(each.clone() for each in self._replay(rows, top_k, depth)))

    def _pass(self, rows: Tensor, top_k: int, depth: int) -> Expanded:
        logits = torch.empty(len(rows), self._stack.slots, device=self._stack.device)
        self._stack.logits(rows, [range(self._stack.slots)], logits)
        known = torch.full((len(rows), self._nowhere + 1), -torch.inf, device=self._stack.device)
        known.index_copy_(1, self._lens_of, self._scoring.scores(logits))
        found = expand(self._groups, known[:, :-1], top_k, depth)
        return found._replace(used=found.used.any(0))

    def _replay(self, rows: Tensor, top_k: int, depth: int) -> Expanded:
        key = (rows.shape, rows.dtype, top_k, depth)
        if key not in self._graphs:
            if len(self._graphs) >= _GRAPHS:
                self._graphs.clear()
            self._graphs[key] = self._captured(rows, top_k, depth)
        found = self._graphs[key]
        found.rows.copy_(rows)
        found.graph.replay()
        return found.results

    def _captured(self, rows: Tensor, top_k: int, depth: int) -> _Graph:
        static = rows.clone()
        here = torch.cuda.current_stream(rows.device)
        side = torch.cuda.Stream(rows.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self._pass(static, top_k, depth)  # libraries initialise here, which a capture cannot
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loading thread may use the device meanwhile.
        with torch.cuda.graph(graph, self._pool.handle(), capture_error_mode="thread_local"):
            results = self._pass(static, top_k, depth)
        self._pool.add(graph)
        return _Graph(graph, static, results)
