"""Two sets of whole-step graphs, by a manager that is shaped like vLLM's (whose own needs a GPU)."""

from enum import Enum
from types import SimpleNamespace

import pytest

from steerscope.engines.vllm import tap
from steerscope.engines.vllm.graphs import Graphs


class Mode(Enum):
    FULL = 1
    PIECEWISE = 2


def runner() -> SimpleNamespace:
    manager = SimpleNamespace(graphs={}, _capture_descs={Mode.FULL: ["a", "b"], Mode.PIECEWISE: ["c"]})
    return SimpleNamespace(cudagraph_manager=manager, captured=[])


def capture(found: SimpleNamespace) -> int:
    """As vLLM does it: a graph per description of a whole step; pieces keep theirs elsewhere."""
    manager = found.cudagraph_manager
    for mode, names in manager._capture_descs.items():
        for name in names:
            found.captured.append((name, tap.kernels))
            if mode is Mode.FULL:
                manager.graphs[name] = tap.kernels
    return 10


def test_whole_steps_are_captured_with_the_kernels_and_without():
    found = runner()
    graphs, every = Graphs(found), found.cudagraph_manager._capture_descs
    assert graphs.capture(lambda: capture(found)) == 20
    assert found.captured == [("a", True), ("b", True), ("c", True), ("a", False), ("b", False)]
    assert found.cudagraph_manager._capture_descs is every
    graphs.use(busy=True)
    assert found.cudagraph_manager.graphs == {"a": True, "b": True}
    graphs.use(busy=False)
    assert found.cudagraph_manager.graphs == {"a": False, "b": False}


def test_a_capture_that_fails_leaves_the_switches_as_they_were():
    found = runner()
    turns = iter([lambda: capture(found), lambda: (_ for _ in ()).throw(MemoryError)])
    with pytest.raises(MemoryError):
        Graphs(found).capture(lambda: next(turns)())
    assert tap.kernels
    assert set(found.cudagraph_manager._capture_descs) == set(Mode)


@pytest.mark.parametrize("manager", [None, SimpleNamespace(graphs={}), SimpleNamespace()])
def test_a_runner_without_such_graphs_is_left_alone(manager):
    found = SimpleNamespace(cudagraph_manager=manager)
    graphs = Graphs(found)
    assert graphs.capture(lambda: 3) == 3
    graphs.use(busy=True)
    assert found.cudagraph_manager is manager
