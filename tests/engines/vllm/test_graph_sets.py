"""Two sets of whole-step graphs, by a manager that is shaped like vLLM's (whose own needs a GPU)."""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest

from engines.conftest import HAS_VLLM, saved, start_vllm
from steerscope.engines.results import TokenPrompt
from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.graph_sets import GraphSets
from steerscope.engines.vllm.worker.worker_check import compile_kernels
from steerscope.specs import Add, Capture, Sampling


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
            found.captured.append((name, tap.mode_now()))
            if mode is Mode.FULL:
                manager.graphs[name] = tap.mode_now()
    return 10


def test_whole_steps_are_captured_with_taps_and_without():
    found = runner()
    graphs, every = GraphSets(found), found.cudagraph_manager._capture_descs
    assert graphs.capture(lambda: capture(found)) == 20
    whole, nothing = tap.TapMode(True, True), tap.TapMode(False, False)
    assert found.captured == [("a", whole), ("b", whole), ("c", whole), ("a", nothing), ("b", nothing)]
    assert found.cudagraph_manager._capture_descs is every
    for busy, wanted in ((True, whole), (False, nothing)):
        graphs.use(busy)
        assert found.cudagraph_manager.graphs == {"a": wanted, "b": wanted}


def test_a_capture_that_fails_leaves_the_switches_as_they_were():
    found = runner()
    turns = iter([lambda: capture(found), lambda: (_ for _ in ()).throw(MemoryError)])
    with pytest.raises(MemoryError):
        GraphSets(found).capture(lambda: next(turns)())
    assert tap.mode_now() == tap.TapMode(True, True)
    assert set(found.cudagraph_manager._capture_descs) == set(Mode)


@pytest.mark.parametrize("how", ["argument", "estimate"])
@pytest.mark.parametrize(("samples", "more"), [([50, 7, 6], 2 * 7), ([50], 0), ([], 0), (None, 0)])
def test_while_vllm_estimates_memory_its_own_graphs_are_captured_and_the_others_counted(how, samples, more):
    """They go to a pool that is thrown away. 0.29 does not say so in the call that captures them, later versions do."""
    found = runner()
    found.cudagraph_manager._capture_mem_samples = samples
    graphs, given = GraphSets(found), {"profile_only": True} if how == "argument" else {}
    passed: list[dict[str, bool]] = []

    def capture_model(**kwargs: bool) -> int:
        passed.append(kwargs)
        return capture(found)

    def estimate() -> int:
        size = graphs.capture(capture_model, **given)
        found.cudagraph_manager = None  # and a new one is made for the real ones
        return size

    assert (estimate() if how == "argument" else graphs.profile(estimate)) == 10 + more
    assert passed == [given]
    assert found.captured == [(name, tap.TapMode(True, True)) for name in "abc"]
    found.cudagraph_manager = runner().cudagraph_manager
    graphs.use(True)
    assert found.cudagraph_manager.graphs == {}, "graphs of the estimate are gone"
    assert graphs.capture(capture_model) == 20
    graphs.use(True)
    assert found.cudagraph_manager.graphs == dict.fromkeys("ab", tap.TapMode(True, True))


def test_an_estimate_that_fails_is_over():
    found = runner()
    graphs = GraphSets(found)
    with pytest.raises(MemoryError):
        graphs.profile(lambda: (_ for _ in ()).throw(MemoryError))
    assert graphs.capture(lambda: capture(found)) == 20


@pytest.mark.parametrize("manager", [None, SimpleNamespace(graphs={}), SimpleNamespace()])
def test_a_runner_without_such_graphs_is_left_alone(manager):
    found = SimpleNamespace(cudagraph_manager=manager)
    graphs = GraphSets(found)
    assert graphs.capture(lambda: 3) == 3
    graphs.use(True)
    assert found.cudagraph_manager is manager


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_step_replays_taps_that_do_what_its_requests_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's choice, in a real engine: a steered step with taps that only read would be silently wrong."""
    used: list[bool] = []
    monkeypatch.setattr(GraphSets, "use", lambda _, busy=False: used.append(busy))
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"enable_prefix_caching": False})
    add = Add(vector=np.ones(engine.facts.hidden, np.float32), scale=0.1, layers="all")
    prompts, sampling = [TokenPrompt([5, 6, 7]), TokenPrompt([8, 9, 10])], Sampling(max_tokens=4, ignore_eos=True)
    for steer, capture, wanted in (
        (None, None, False),
        (None, [Capture(), None], True),
        ([add, None], None, True),
        ([add, None], [None, Capture()], True),
    ):
        used.clear()
        done = engine.generate(prompts, sampling, steer=steer, capture=capture)
        assert used.count(wanted) >= 4  # the prompts, and every token but the last
        assert set(used) <= {wanted, False}  # an engine that schedules ahead may run a step too many
        for one in done:
            if one.capture is not None:
                one.capture.close()
    engine.close()


@pytest.mark.parametrize(("sizes", "wanted"), [([1, 8], 9), ([], 2), ([1, 64], None)])
def test_every_kernel_of_a_step_that_is_not_replayed_has_run_before_the_first_request(sizes, wanted):
    ran = []
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))
    index = SimpleNamespace(index=np.zeros((64, 16)))
    taps = SimpleNamespace(runner=SimpleNamespace(vllm_config=config), step_index=index)
    compile_kernels(taps, lambda tokens: ran.append((tokens, tap.mode_now())))
    modes = [tap.TapMode(steer, capture) for steer in (False, True) for capture in (False, True)]
    assert ran == ([] if wanted is None else [(wanted, mode) for mode in modes])
    assert tap.mode_now() == tap.TapMode(True, True)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_taps_of_a_step_do_what_its_requests_ask_and_wait_for_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.worker import worker

    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"enable_prefix_caching": False})
    (taps,) = (one for one in worker.LOCAL_WORKERS if one.runner.vllm_config is engine.aio._llm.vllm_config)
    order: list[str] = []
    modes: list[tap.TapMode] = []
    plan, join, reductions = taps.step_index.plan, taps.delivery.reductions.join, taps.delivery.reductions
    monkeypatch.setattr(taps.step_index, "plan", lambda *args: (order.append("plan"), plan(*args))[1])
    monkeypatch.setattr(reductions, "join", lambda: (order.append("join"), join())[1])
    monkeypatch.setattr(worker, "set_launch_mode", lambda mode: (modes.append(mode), tap.set_launch_mode(mode))[1])
    add = Add(vector=np.ones(engine.facts.hidden, np.float32), scale=0.1, layers="all")
    prompts, sampling = [TokenPrompt([5, 6, 7]), TokenPrompt([8, 9, 10])], Sampling(max_tokens=4, ignore_eos=True)
    for steer, capture in (([add, None], Capture()), (None, Capture()), ([add, None], None), (None, None)):
        modes.clear()
        for one in engine.generate(prompts, sampling, steer=steer, capture=capture):
            if one.capture is not None:
                one.capture.close()
        assert modes.count(tap.TapMode(steer is not None, capture is not None)) >= 4
    assert order == ["plan", "join"] * (len(order) // 2), "cells that a step is given may just have been read"
    assert len(order) >= 12
    engine.close()
