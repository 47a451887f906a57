"""Which memory a CUDA graph is captured into. What torch itself says of it is seen in test_cuda.py, on a GPU."""

import gc
import itertools

import pytest
import torch

from steerscope.lenses.graph_pool import GraphPool


class Allocator:
    """torch's rule: a pool lives as long as a graph in it, and a capture into a dead one fails."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._known = set[tuple[int, int]]()
        self.alive = dict[tuple[int, int], int]()

    def new_handle(self) -> tuple[int, int]:
        return (0, next(self._numbers))

    def capture(self, handle: tuple[int, int]) -> "Graph":
        assert handle in self.alive or handle not in self._known, "use_count > 0 INTERNAL ASSERT FAILED"
        self._known.add(handle)
        self.alive[handle] = self.alive.get(handle, 0) + 1
        return Graph(self, handle)

    def release(self, handle: tuple[int, int]) -> None:
        self.alive[handle] -= 1
        if not self.alive[handle]:
            del self.alive[handle]


class Graph:
    def __init__(self, allocator: Allocator, handle: tuple[int, int]) -> None:
        self.allocator, self.handle = allocator, handle

    def __del__(self) -> None:
        self.allocator.release(self.handle)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.new_handle)
    return made


def captured(pool: GraphPool, allocator: Allocator) -> Graph:
    graph = allocator.capture(pool.handle())
    pool.add(graph)  # type: ignore[arg-type]
    return graph


def test_graphs_share_a_pool_while_one_of_them_is_alive(allocator: Allocator):
    pool = GraphPool()
    graphs = [captured(pool, allocator) for _ in range(3)]
    assert len(allocator.alive) == 1
    del graphs[:2]
    gc.collect()
    graphs.append(captured(pool, allocator))
    assert len(allocator.alive) == 1


def test_a_new_pool_begins_when_all_graphs_are_gone(allocator: Allocator):
    pool = GraphPool()
    for _ in range(3):
        graphs = [captured(pool, allocator) for _ in range(2)]
        assert len(allocator.alive) == 1
        del graphs
        gc.collect()
        assert not allocator.alive


def test_a_capture_that_fails_leaves_no_dead_pool_behind(allocator: Allocator):
    pool = GraphPool()
    allocator.capture(pool.handle())  # and is never added
    gc.collect()
    assert captured(pool, allocator).handle in allocator.alive
