"""One mode of vLLM in a process of its own: start the engine, run mixed requests together, check every row against the
transformers engine, and print a verdict as the last line, in JSON.

    python tests/engines/vllm/mode_script.py [--compile] [--interpret] [--tensor-parallel 2] [--pipeline-parallel 2]
                                             [--beside]

Three waves. In the first the requests are made by hand: prompts longer than a step, every site, op and selector, rows
and reductions, before and after steering. The second is a round of stress: stop strings, EOS, cancellations,
preemption. In the third, lenses read and rules act.
With --beside another engine serves the same requests in another order at the same time, and is closed between the two.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.stress.run import Plan, stress
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.lenses.formats.probes import from_probes
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering
from steerscope.specs.steering import SITES
from steerscope.specs.watch import Watch, flag, steer, stop, when
from support.checking import check
from support.ledger import Ledger, Outcome
from support.model import HIDDEN, VOCAB, make_model
from support.oracle import Oracle
from support.targets import EngineTarget
from support.workload import Request

LIMIT = 1e-4  # relative L2 of a row
CHUNK = 32  # tokens of a step: longer prompts come in pieces
BOOKS = Lock()  # of the oracle and the ledger
LENGTHS = (4, 9, 31, 32, 33, 50, 64, 70, 90)
SELECTORS = ("all", "prompt", "generated", "last_prompt", "positions=[0:3]", "!last_prompt", "positions=[1, -2:]")
OPS = (
    lambda vector, **where: Add(vector=vector, scale=0.3, **where),
    lambda vector, **where: Cap(vector=vector, min=-1, max=1, **where),
    lambda vector, **where: Ablate(vector=vector, **where),
)


@dataclass(frozen=True)
class Shape:
    """Of the model that requests are made for."""

    hidden: int = HIDDEN
    tokens: tuple[int, int] = (20, VOCAB)  # prompts are drawn from these
    steered: tuple[str, ...] = ("all", "0", "1-2", "3")
    captured: tuple[str, ...] = ("all", "1,3", "0", "1-2", "3")
    ends: bool = True  # every other request may end with EOS


def mixed(count: int, shape: Shape = Shape()) -> list[Request]:  # noqa: B008 - frozen
    """Requests that differ in everything; the cycles have different lengths, so that all pairs come together."""
    rng = np.random.default_rng(7)
    lengths, selectors, wanted, ops, sites = map(cycle, (LENGTHS, SELECTORS, SELECTORS[::-1], OPS, SITES))
    steered, captured = cycle(shape.steered), cycle(shape.captured)
    kinds = cycle([(None, False), ("mean", False), (None, True), ("last", False), (None, False), ("mean", True)])
    return [
        Request(
            prompt=rng.integers(*shape.tokens, next(lengths)).tolist(),
            sampling=_sampling(i, 2 + (5 * i) % 13, shape.ends),
            steer=Steering(ops=tuple(_ops(i % 3, rng, shape.hidden, ops, steered, selectors, sites))),
            capture=_capture(captured, sites, wanted, kinds) if i % 8 != 5 else None,
            kind=("mixed", f"number {i}"),
        )
        for i in range(count)
    ]


def _sampling(i: int, most: int, ends: bool) -> Sampling:
    goes_on = i % 2 == 0 or not ends
    return Sampling(max_tokens=most, temperature=1.0 if i % 8 == 3 else 0.0, seed=i, ignore_eos=goes_on)


def _ops(
    count: int, rng: np.random.Generator, size: int, ops: Iterator, layers: Iterator, tokens: Iterator, sites: Iterator
) -> Iterator[Add | Cap | Ablate]:
    for _ in range(count):
        vector = rng.standard_normal(size).astype(np.float32)
        yield next(ops)(vector, layers=next(layers), tokens=next(tokens), site=next(sites))


def _capture(layers: Iterator, sites: Iterator, tokens: Iterator, kinds: Iterator) -> Capture:
    reduce, before = next(kinds)
    both = (next(sites), next(sites))  # also such pairs as (mlp_out, resid_pre), whose taps are not in the same order
    return Capture(layers=next(layers), sites=both, tokens=next(tokens), reduce=reduce, before_steering=before)


def first_wave(engine: SyncEngine, oracle: Oracle, requests: list[Request], ledger: Ledger) -> dict[str, int]:
    """All at once, every row and token against plain transformers."""
    prompts = [TokenPrompt(request.prompt) for request in requests]
    samplings, steers = [request.sampling for request in requests], [request.steer for request in requests]
    captures = [request.capture for request in requests]
    together = engine.generate(prompts, samplings, steer=steers, capture=captures)
    with BOOKS:
        for request, done in zip(requests, together, strict=True):
            (outcome,) = Outcome.of(done)
            check(oracle, request, outcome, ledger, LIMIT)
            if done.capture is not None:
                done.capture.close()
    greedy = sum(request.sampling.temperature == 0 for request in requests)
    return {"together": len(requests), "greedy": greedy, "longest": max(len(request.prompt) for request in requests)}


def second_wave(engine: SyncEngine, oracle: Oracle, count: int, ledger: Ledger) -> None:
    """Random ones, cancelled, preempted and ended by stop strings; of lenses the third knows more."""
    plan = Plan(count, seed=1, concurrent=count, watched=False, limit=LIMIT)
    found, _ = asyncio.run(stress(EngineTarget(engine.aio), oracle, plan))
    ledger.wrong += found.wrong
    ledger.ends += found.ends
    ledger.rows += found.rows
    ledger.worst_row = max(ledger.worst_row, found.worst_row)


def third_wave(engine: SyncEngine, reference: SyncEngine, ledger: Ledger) -> dict[str, int]:
    """Watched requests beside others: the same tokens, concepts and firings as on transformers."""
    rng = np.random.default_rng(3)
    probes = {
        f"c{i}": SimpleNamespace(coef_=rng.normal(size=(1, HIDDEN)) / 4, intercept_=np.zeros(1)) for i in range(9)
    }
    for one in (engine, reference):
        for layer in (0, 3):
            pack = from_probes(probes, model="any", layer=layer, name=f"layer {layer}", normalisation="layernorm")
            one.register_pack(f"{layer}", pack, any_model=True)
    push = Add(vector=rng.normal(size=HIDDEN).astype(np.float32), scale=0.5, layers="all")
    action = steer(push, name="push") if engine.aio.facts.switches else flag("push")
    rules = [
        [],
        [when("c1", above=0.5).then(action)],
        [(when("c2", above=0.6) & ~when("c3", above=0.5)).then(flag("f")), when("c4", above=0.3).then(action)],
        [when("c5", above=0.9, for_tokens=2).then(stop("enough"))],
    ]
    watches = [
        None if i % 5 == 4 else Watch(pack=str(3 * (i % 2)), top_k=2, tokens=SELECTORS[i % 3], rules=rules[i % 4])
        for i in range(16)
    ]
    prompts = [TokenPrompt(rng.integers(20, VOCAB, length).tolist()) for length in [*LENGTHS, *LENGTHS][:16]]
    captures = [Capture(layers="1,3", tokens="generated") if i % 3 == 0 else None for i in range(16)]
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    asked: dict[str, Any] = {"watch": watches, "capture": captures}
    found, wanted = (one.generate(prompts, sampling, **asked) for one in (engine, reference))
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if seen(mine) != seen(theirs):
            ledger.wrong.append(f"watched {i}: {seen(mine)} instead of {seen(theirs)}")
        for one in (mine, theirs):
            if one.capture is not None:
                one.capture.close()
    for name in ("0", "3"):
        engine.unregister_pack(name)
    ends = [one.finish_reason for one in found]
    return {
        "readings": sum(len(one.readings) for one in found),
        "firings": sum(len(one.firings) for one in found),
        "stopped_by_rule": ends.count("rule"),
    }


def seen(done: Generation) -> tuple[object, ...]:
    readings = [(r.position, [c.id for c in r.concepts]) for r in done.readings]
    firings = [(f.rule, f.action, f.position, f.acts_from) for f in done.firings]
    return done.token_ids, done.finish_reason, firings, readings


def left_over(engine: SyncEngine) -> dict[str, float]:
    """Return what is still held when no request is left: nothing."""
    engine.generate(TokenPrompt([20, 21]), Sampling(max_tokens=2, ignore_eos=True))  # lets the last finishes arrive
    stats = engine.stats()
    names = ("running", "waiting", "slots_in_use", "capture_bytes", "worker_slots_in_use", "worker_requests")
    return {**{name: stats[name] for name in names}, "shared_bytes": engine.aio.capacity.regions.used}  # type: ignore[attr-defined]


def options(args: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enforce_eager": not args.compile}
    chosen |= {"max_num_seqs": args.requests, "max_num_batched_tokens": max(CHUNK, args.requests)}
    chosen |= {"block_size": 32, "num_gpu_blocks_override": 12, "kv_cache_memory_bytes": 64 << 20}  # too few for all
    parallel = {"tensor_parallel_size": args.tensor_parallel, "pipeline_parallel_size": args.pipeline_parallel}
    return chosen | parallel


def triton_on_cpu() -> None:
    """Let vLLM's CPU build find a Triton back end, whose kernels Triton's interpreter then runs (TRITON_INTERPRET=1):
    it starts its second model runner only where there is one."""
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return False

    backends["cpu"] = type("Backend", (), {"driver": Driver, "compiler": None})


def children() -> list[str]:
    """Processes of this one; those of type SpawnProcess began with nothing of it."""
    return sorted(f"{type(child).__name__} {child.name}" for child in multiprocessing.active_children())


def compiled() -> dict[str, int]:
    """What was traced in this process, and whether Inductor made code of it."""
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    return {"graphs": graphs, "breaks": sum(counters["graph_break"].values()), "inductor": len(counters["inductor"])}


def both_waves(engines: list[SyncEngine], oracle: Oracle, requests: list[Request], ledger: Ledger) -> list[dict]:
    """The first wave on all engines at once; all but one are closed afterwards."""
    orders = [requests[i:] + requests[:i] for i in range(len(engines))]
    with ThreadPoolExecutor(len(engines)) as pool:
        waves = pool.map(lambda engine, order: first_wave(engine, oracle, order, ledger), engines, orders)
        found = list(waves)
    for engine in engines[1:]:
        engine.close()
    return found


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from steerscope.engines.vllm.client.engine import VLLMEngine
    from steerscope.engines.vllm.settings import VLLMSettings

    model, tokenizer = make_model(folder, torch.float32, "cpu")
    began = time.perf_counter()
    settings = VLLMSettings(sites=SITES)
    engines = [VLLMEngine(folder, name="mode", settings=settings, **options(args)).sync for _ in range(1 + args.beside)]
    engine = engines[0]
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
    result |= {"workers": engine.aio.describe(), "children": children()}  # type: ignore[attr-defined]
    result["backend"] = engine.aio._llm.vllm_config.compilation_config.backend  # type: ignore[attr-defined]
    reference, ledger = HFEngine(model, tokenizer, name="reference").sync, Ledger()
    oracle = Oracle(make_model(folder.with_name("oracle"), torch.float32, "cpu")[0])
    began = time.perf_counter()
    waves = both_waves(engines, oracle, mixed(args.requests), ledger)
    result |= {**waves[0], "engines": len(waves)}
    second_wave(engine, oracle, args.soaked, ledger)
    result |= third_wave(engine, reference, ledger)
    result |= {"run_s": round(time.perf_counter() - began, 1), "left_over": left_over(engine)}
    stats = engine.stats()
    result |= {"steps": stats["worker_steps"], "preempted": stats["worker_recomputed"], "ends": dict(ledger.ends)}
    engine.close()
    reference.close()
    result |= {"rows": ledger.rows, "worst_row": ledger.worst_row, "wrong": ledger.wrong}
    for child in multiprocessing.active_children():
        child.join(30)  # told to end, or killed: vLLM does not wait to see it gone
    return result | {"compiled": compiled(), "still_running": children()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="without it, eager")
    parser.add_argument("--interpret", action="store_true", help="give Triton a back end for the CPU")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--beside", action="store_true", help="with another engine beside it")
    parser.add_argument("--requests", type=int, default=24, help="of the first wave, all at once")
    parser.add_argument("--soaked", type=int, default=36, help="requests of the second wave")
    args = parser.parse_args()
    if args.interpret:
        triton_on_cpu()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args, Path(scratch) / "model")
    print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
