"""Slab: score all hot lenses and expand over their scores in one pass, without the host.

On a GPU the pass is one CUDA graph per number of rows. Rows whose groups are all hot cost one launch, and one copy to
the host of which groups were used. If one of these is not hot, the caller must discard the result.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steerscope.lenses.bank import activate, calibrate
from steerscope.lenses.expand import Groups, expand_known
from steerscope.lenses.graph_pool import GraphPool
from steerscope.lenses.pack import Calibration
from steerscope.lenses.slots import LensSlots
from steerscope.lenses.stack import SlotRange, Stack

MOST_ROWS = 64  # of one pass; for more rows it is faster to score only the needed lenses
_GRAPHS = 16  # cached; each holds its results, all share one workspace


class Passed(NamedTuple):
    """`values`, `lenses` [n, k] and `scores` [n, lenses] of an expansion, and the concepts whose groups it used."""

    values: Tensor
    lenses: Tensor
    scores: Tensor
    parents: list[int]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    rows: Tensor
    results: tuple[Tensor, ...]


class Slab:
    """The pass over one stack, and its CUDA graphs."""

    def __init__(self, stack: Stack, groups: Groups, normed: bool) -> None:
        self._stack, self._groups = stack, groups
        self._runs = [SlotRange(0, stack.slots, normed)]
        per_slot = stack.tensors
        self._curve = (
            Calibration(per_slot["low"], per_slot["high"], per_slot["confidence"]) if groups.pack.calibration else None
        )
        self._nowhere = len(groups.pack)  # column of empty slots
        self._lens_of = torch.full((stack.slots,), self._nowhere, device=stack.device)
        self._changes: int | None = None
        self._graphs: dict[object, _Graph] = {}
        self._pool = GraphPool()

    def __call__(self, rows: Tensor, top_k: int, depth: int, slots: LensSlots) -> Passed:
        if self._changes != slots.changes:
            lens_of = [self._nowhere] * self._stack.slots
            for lens, slot in slots.of.items():
                lens_of[slot] = lens
            self._lens_of.copy_(torch.tensor(lens_of))
            self._changes = slots.changes
        if rows.device.type != "cuda":
            values, lenses, scores, expanded = self._pass(rows, top_k, depth)
        else:
            values, lenses, scores, expanded = (each.clone() for each in self._replay(rows, top_k, depth))
        return Passed(values, lenses, scores, expanded.cpu().nonzero().flatten().tolist())

    def _pass(self, rows: Tensor, top_k: int, depth: int) -> tuple[Tensor, ...]:
        stack, architecture = self._stack, self._groups.pack.info.architecture
        logits = torch.empty(len(rows), stack.slots, device=stack.device)
        stack.logits(rows, self._runs, logits)
        found = activate(logits, architecture.output, architecture.k, stack.tensors["threshold"])
        found = calibrate(found, stack.tensors["floor"], self._curve)
        known = torch.full((len(rows), self._nowhere + 1), -torch.inf, device=stack.device)
        known.index_copy_(1, self._lens_of, found)
        values, lenses, scores, expanded = expand_known(self._groups, known[:, :-1], top_k, depth)
        return values, lenses, scores, expanded.any(0)

    def _replay(self, rows: Tensor, top_k: int, depth: int) -> tuple[Tensor, ...]:
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
        static, here = rows.clone(), torch.cuda.current_stream(rows.device)
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
