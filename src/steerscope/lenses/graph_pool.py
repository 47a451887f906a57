"""Memory that CUDA graphs share which run one after the other."""

import weakref
from typing import Any

import torch


class GraphPool:
    """torch gives a pool up with the last graph in it, and fails when another graph is captured into it later: a pool
    is shared only with graphs that are alive, else a new one begins."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._handle: Any = None

    def handle(self) -> Any:
        """The pool for the next graph that is captured."""
        if self._handle is None or not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Share the pool with later graphs while this one, which was captured into it, is alive."""
        self._graphs.add(graph)
