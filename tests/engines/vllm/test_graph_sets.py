"""Three sets of whole-step graphs, by a manager that is shaped like vLLM's (whose own needs a GPU)."""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, saved, start_vllm
from steerscope.engines.results import TokenPrompt
from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.graph_sets import GraphSets
from steerscope.engines.vllm.worker.worker_check import largest_replayed
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import RequestFailed


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
            found.captured.append((name, tap._launch_mode[:2]))
            if mode is Mode.FULL:
                manager.graphs[name] = tap._launch_mode[:2]
    return 10


def test_whole_steps_are_captured_with_all_that_taps_do_and_with_less():
    found = runner()
    graphs, every = GraphSets(found), found.cudagraph_manager._capture_descs
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
        GraphSets(found).capture(lambda: next(turns)())
    assert tap._launch_mode == tap.TapMode(True, True)
    assert set(found.cudagraph_manager._capture_descs) == set(Mode)


@pytest.mark.parametrize("how", ["argument", "estimate"])
@pytest.mark.parametrize(("samples", "more"), [([50, 7, 6], 4 * 7), ([50], 0), ([], 0), (None, 0)])
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
    assert found.captured == [(name, (True, True)) for name in "abc"]
    found.cudagraph_manager = runner().cudagraph_manager
    graphs.use(True, True)
    assert found.cudagraph_manager.graphs == {}, "graphs of the estimate are gone"
    assert graphs.capture(capture_model) == 30
    graphs.use(True, True)
    assert found.cudagraph_manager.graphs == {"a": (True, True), "b": (True, True)}


def test_an_estimate_that_fails_is_over():
    found = runner()
    graphs = GraphSets(found)
    with pytest.raises(MemoryError):
        graphs.profile(lambda: (_ for _ in ()).throw(MemoryError))
    assert graphs.capture(lambda: capture(found)) == 30


@pytest.mark.parametrize("manager", [None, SimpleNamespace(graphs={}), SimpleNamespace()])
def test_a_runner_without_such_graphs_is_left_alone(manager):
    found = SimpleNamespace(cudagraph_manager=manager)
    graphs = GraphSets(found)
    assert graphs.capture(lambda: 3) == 3
    graphs.use(True, True)
    assert found.cudagraph_manager is manager


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_step_replays_taps_that_do_what_its_requests_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's choice, in a real engine: a steered step with taps that only read would be silently wrong."""
    used: list[tuple[bool, bool]] = []
    monkeypatch.setattr(GraphSets, "use", lambda _, steers=False, busy=False: used.append((steers, busy)))
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"enable_prefix_caching": False})
    add = Add(vector=np.ones(engine.facts.hidden, np.float32), scale=0.1, layers="all")
    prompts, sampling = [TokenPrompt([5, 6, 7]), TokenPrompt([8, 9, 10])], Sampling(max_tokens=4, ignore_eos=True)
    for steer, capture, wanted in (
        (None, None, (False, False)),
        (None, [Capture(), None], (False, True)),
        ([add, None], None, (True, True)),
        ([add, None], [None, Capture()], (True, True)),
    ):
        used.clear()
        done = engine.generate(prompts, sampling, steer=steer, capture=capture)
        assert used.count(wanted) >= 4  # the prompts, and every token but the last
        assert set(used) <= {wanted, (False, False)}  # an engine that schedules ahead may run a step too many
        for one in done:
            if one.capture is not None:
                one.capture.close()
    engine.close()


@pytest.mark.parametrize(
    ("sizes", "comes", "wanted"), [([1, 8], True, 8), ([], True, 0), ([1, 8], False, 64), ([1, 64], True, 64)]
)
def test_what_is_asked_comes_late_only_where_a_dummy_batch_has_shown_that_taps_are_called(sizes, comes, wanted):
    index, ran = torch.zeros(1), []
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))
    taps = SimpleNamespace(
        runner=SimpleNamespace(vllm_config=config), taps=SimpleNamespace(keys=[(0, "resid_post")], span=0),
        pool=SimpleNamespace(index=index), device=index.device,
    )  # fmt: skip

    def dummy_run(tokens: int) -> None:
        ran.append(tokens)
        if comes:
            tap.mode_of(index)

    assert largest_replayed(taps, dummy_run, 64) == wanted  # type: ignore[arg-type]
    assert ran == ([] if sizes == [1, 64] else [max(2, max(sizes, default=0) + 1)])
    assert not tap._pending


@pytest.mark.parametrize(
    ("sizes", "most", "span", "wanted"),
    [
        ([1, 8], 2048, 2, ["9 ops rows", "9", "9 rows", "9 ops", "513", "513 rows", "513 ops", "513 op", "513 op rows",
                           "513 rows sums"]),
        ([600], 2048, 0, ["601 ops rows", "601", "601 rows", "601 ops", "601 op", "601 op rows"]),
        ([], 512, 2, ["2 ops rows", "2", "2 rows", "2 ops"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steer", [True, False])
def test_every_kernel_of_a_step_that_is_not_replayed_has_run_before_the_first_request(sizes, most, span, wanted, steer):
    index, ran = torch.zeros(1), []
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))
    taps = SimpleNamespace(
        runner=SimpleNamespace(vllm_config=config), taps=SimpleNamespace(keys=[(0, "resid_post")], span=span),
        pool=SimpleNamespace(index=index), device=SimpleNamespace(type="cuda"), settings=SimpleNamespace(steer=steer),
    )  # fmt: skip

    def dummy_run(tokens: int) -> None:
        doing = tap.mode_of(index)
        words = "op" if doing.columns else "ops" if doing.steer else "", "rows" * doing.capture
        ran.append(" ".join(filter(None, (str(tokens), *words, "sums" * (doing.runs is not None)))))

    assert largest_replayed(taps, dummy_run, most) == max(sizes, default=0)  # type: ignore[arg-type]
    assert ran == [what for what in wanted if steer or "op" not in what or what == wanted[0]]


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_first_tap_of_a_step_brings_what_is_asked_unless_the_step_may_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it or with it, rows and texts are the same; a step whose taps never come is no step."""
    from steerscope.engines.vllm.worker import worker

    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"enable_prefix_caching": False})
    (taps,) = (one for one in worker.LOCAL_WORKERS if one.runner.vllm_config is engine.aio._llm.vllm_config)
    assert taps._largest_replayed == 0, "a CPU has no graphs"
    late: list[int] = []
    order: list[str] = []
    plan, join, reductions = taps.step_index.plan, taps.delivery.reductions.join, taps.delivery.reductions
    monkeypatch.setattr(taps.step_index, "plan", lambda *args: (order.append("plan"), plan(*args))[1])
    monkeypatch.setattr(reductions, "join", lambda: (order.append("join"), join())[1])
    monkeypatch.setattr(worker, "at_first_tap", lambda *args: (late.append(1), tap.at_first_tap(*args)))
    add = Add(vector=np.ones(engine.facts.hidden, np.float32), scale=0.1, layers="all")
    prompts, sampling = [TokenPrompt([5, 6, 7]), TokenPrompt([8, 9, 10])], Sampling(max_tokens=4, ignore_eos=True)
    found = []
    for most in (0, 3, 1000):
        taps._largest_replayed = most
        late.clear()
        done = engine.generate(prompts, sampling, steer=[add, None], capture=Capture())
        assert bool(late) == (most < 6)
        assert len(late) >= 4 or most
        rows = [torch.stack(list(one.rows.values())) for one in done]
        found.append(([one.token_ids for one in done], rows))
        for one in done:
            one.capture.close()
    assert found[0][0] == found[1][0] == found[2][0]
    for i in range(2):
        assert torch.equal(found[0][1][i], found[1][1][i])
        assert torch.equal(found[0][1][i], found[2][1][i])
    assert order == ["plan", "join"] * (len(order) // 2), "cells that a step is given may just have been read"
    assert len(order) >= 24
    taps._largest_replayed = 0
    monkeypatch.setattr(tap, "mode_of", lambda _: tap.TapMode())
    with pytest.raises(RequestFailed, match="no tap ran in a step"):
        engine.generate(prompts, sampling, steer=add)
    assert not tap._pending
    engine.close()
