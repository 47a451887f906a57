"""Three sets of whole-step graphs, by a manager that is shaped like vLLM's (whose own needs a GPU)."""

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
            found.captured.append((name, tap.working(True, True)))
            if mode is Mode.FULL:
                manager.graphs[name] = tap.working(True, True)
    return 10


def test_whole_steps_are_captured_with_all_that_taps_do_and_with_less():
    found = runner()
    graphs, every = Graphs(found), found.cudagraph_manager._capture_descs
    assert graphs.capture(lambda: capture(found)) == 30
    whole, reading, nothing = (True, True), (False, True), (False, False)
    first = [("a", whole), ("b", whole), ("c", whole)]
    assert found.captured == [*first, ("a", reading), ("b", reading), ("a", nothing), ("b", nothing)]
    assert found.cudagraph_manager._capture_descs is every
    for use, wanted in (((True, True), whole), ((False, True), reading), ((), nothing)):
        graphs.use(*use)
        assert found.cudagraph_manager.graphs == {"a": wanted, "b": wanted}


def test_a_capture_that_fails_leaves_the_switches_as_they_were():
    found = runner()
    turns = iter([lambda: capture(found), lambda: (_ for _ in ()).throw(MemoryError)])
    with pytest.raises(MemoryError):
        Graphs(found).capture(lambda: next(turns)())
    assert tap.working(True, True) == (True, True)
    assert set(found.cudagraph_manager._capture_descs) == set(Mode)


@pytest.mark.parametrize("manager", [None, SimpleNamespace(graphs={}), SimpleNamespace()])
def test_a_runner_without_such_graphs_is_left_alone(manager):
    found = SimpleNamespace(cudagraph_manager=manager)
    graphs = Graphs(found)
    assert graphs.capture(lambda: 3) == 3
    graphs.use(True, True)
    assert found.cudagraph_manager is manager
