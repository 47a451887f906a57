"""Memory shared by CUDA graphs that run one after the other."""

import weakref
from typing import Any

import torch


class GraphPool:
    """A pool handle for graphs that share memory, as long as one of them is alive.

    torch frees a pool with the last graph in it. A capture that then names the old handle fails with an internal
    assertion, and so do all later ones. So a handle is used only while a graph that was captured into its pool is
    alive; otherwise the next graph begins a new pool.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._handle: Any = None

    def handle(self) -> Any:
        """Return the pool for the next capture."""
        if self._handle is None or not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note a graph that was captured into the pool."""
        self._graphs.add(graph)
