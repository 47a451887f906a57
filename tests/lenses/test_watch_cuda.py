"""Lenses and rules in a CUDA graph: replayed with new rows they say and switch what they do outside of it."""

import pytest
import torch

from lenses.packs import make, rows
from steerscope.lenses.monitor import Monitor, WatchPlan
from steerscope.lenses.reader import PackOptions, Reader, Registered, StepReadings
from steerscope.lenses.rules import MOST_RULES, compile_rules
from steerscope.specs import Add
from steerscope.specs.tokens import EVERYWHERE
from steerscope.specs.watch import Watch, flag, steer, when

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HIDDEN, ROWS = 256, 12
PACK = make([5, 30], hidden=HIDDEN, widths=(64, 32), normed=True, calibrated=True)


def seated(device: str) -> tuple[Monitor, list]:
    monitor = Monitor(device, slots=4)
    push = Add(vector=[1.0] * HIDDEN, layers=0)
    rules = [
        when(PACK.concepts[3].id, above=0.1, for_tokens=2).then(flag("a")),
        (when(PACK.concepts[8].id, above=0.2) | ~when(PACK.concepts[9].id, above=0.1)).then(steer(push, off_for=2)),
    ]
    spec = Watch(pack=PACK, rules=rules)
    compiled, problems = compile_rules(rules, PACK)
    assert not problems
    plan = WatchPlan(Registered(PACK, PackOptions()), (3, "resid_post"), EVERYWHERE, compiled, spec)
    monitor.keep(Reader(plan.registered, device))
    return monitor, [monitor.admit(plan) for _ in range(3)]


def test_a_captured_step_reads_and_switches_as_one_outside_a_graph():
    monitor, seats = seated("cuda")
    other, same = seated("cpu")
    reader = seats[0].reader
    x = torch.zeros(ROWS, HIDDEN, device="cuda")
    slot, position = (torch.zeros(ROWS, dtype=torch.long, device="cuda") for _ in range(2))

    def step() -> StepReadings[torch.Tensor]:
        return monitor.look(reader, x, 5, slot, position, None)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # rows of no request: nothing is changed by the warm-up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    done, changes = [0, 0, 0], 0
    for turn in range(40):
        counts = [(1, 1, 1), (4, 0, 2), (1, 5, 0), (0, 1, 1)][turn % 4]
        owners = [(i, done[i] + j) for i, count in enumerate(counts) for j in range(count)]
        padded = [(0, 0)] * (ROWS - len(owners))
        found = rows(ROWS, HIDDEN, seed=turn)
        numbers = torch.tensor([[seats[i].slot, t] for i, t in owners] + padded)
        x.copy_(found)
        slot.copy_(numbers[:, 0])
        position.copy_(numbers[:, 1])
        graph.replay()
        wanted = other.look(same[0].reader, found, 5, numbers[:, 0], numbers[:, 1], None)
        torch.testing.assert_close(captured.values.cpu(), wanted.values, atol=1e-4, rtol=0)
        assert captured.on is not None
        assert captured.off is not None
        assert wanted.on is not None
        assert torch.equal(captured.on.cpu(), wanted.on)
        assert torch.equal(captured.off.cpu(), wanted.off)
        last = other.rules.gates.view(-1, MOST_RULES)[:-1]  # without what everybody writes
        assert torch.equal(monitor.rules.gates.cpu().view(last.shape[0] + 1, -1)[:-1], last)
        changes += int(wanted.on.sum())
        done = [a + b for a, b in zip(done, counts, strict=True)]
    assert changes > 3, "rules that never change would agree too"


def test_the_transformers_engine_watches_on_a_gpu_as_on_the_cpu():
    import copy

    from steerscope.engines.hf import HFEngine
    from steerscope.specs import Sampling
    from support import tiny

    pack = make([3, 6], hidden=64)
    pack = pack.replace(info=pack.info.model_copy(update={"layer": 2, "model": "llama"}))
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    push = Add(vector=[0.3] * 64, layers=1)
    rules = [when(concept.id, above=0.5).then(steer(push, name=concept.id)) for concept in pack.concepts[:3]]
    found = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(tiny.model()).to(device)
        with HFEngine(model, tiny.tokenizer(), name="llama").sync as engine:
            found.append(engine.generate(["The quick", "fox"], sampling, watch=Watch(pack=pack, rules=rules)))
    for cpu, gpu in zip(*found, strict=True):
        assert cpu.token_ids == gpu.token_ids
        assert [f.position for f in cpu.firings] == [f.position for f in gpu.firings]
        assert [r.position for r in cpu.readings] == [r.position for r in gpu.readings]
