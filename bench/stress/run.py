"""Rounds of random requests, several at once; after each round, counts are compared, and all rows with the oracle."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.machine import commit
from bench.random_packs import small_share
from steerscope.bench.one import hardware, versions
from steerscope.engines.engine_thread import ThreadedEngine
from steerscope.lenses import Pack
from support.checking import check
from support.ledger import Ledger, Outcome
from support.model import PACK, VOCAB, make_model, make_pack
from support.oracle import Oracle
from support.targets import EngineTarget, ServerTarget, Target, refused
from support.workload import Request, draw

Say = Callable[[str], None]
Dtype = Literal["float32", "bfloat16"]
_BFLOAT16 = 0.05  # relative L2 of a row


@dataclass(frozen=True)
class Plan:
    requests: int = 1000
    seconds: float = 600.0
    seed: int = 0
    concurrent: int = 32
    watched: bool = True
    limit: float = 1e-4  # relative L2 of a row


def _peak_mib() -> int:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def stress(target: Target, oracle: Oracle, plan: Plan, say: Say = lambda _: None) -> tuple[Ledger, list[int]]:
    """The ledger, and this process's memory in MiB after each round."""
    rng, ledger, memory = np.random.default_rng(plan.seed), Ledger(), []
    prefix = rng.integers(20, VOCAB, 64).tolist()
    began = time.monotonic()
    before = await target.rest()
    while ledger.sent < plan.requests and time.monotonic() - began < plan.seconds:
        count = min(4 * plan.concurrent, plan.requests - ledger.sent)
        requests = [draw(rng, prefix, plan.watched) for _ in range(count)]
        await _round(target, oracle, plan, requests, ledger)
        memory.append(_peak_mib())
        say(f"{ledger.sent} sent, {ledger.rows} rows, {ledger.tokens} tokens checked, {len(ledger.wrong)} wrong")
    stats = await target.rest()
    ledger.reserved_bytes = int(stats["capture_reserved"] - before["capture_reserved"])
    ledger.delivered_bytes = target.delivered
    ledger.released_bytes = int(stats["capture_released"] - before["capture_released"]) - target.delivered
    ledger.wrong += ledger.problems()
    return ledger, memory


async def _round(target: Target, oracle: Oracle, plan: Plan, requests: list[Request], ledger: Ledger) -> None:
    gate, first = asyncio.Semaphore(plan.concurrent), ledger.sent

    async def one(i: int, request: Request) -> list[Outcome] | None:
        async with gate:
            running = asyncio.create_task(target.run(request, f"stress{first + i}"))
            if request.end is not None and request.end[0] == "kill":
                done, _ = await asyncio.wait([running], timeout=request.end[1])
                if not done:
                    running.cancel()
            return await running

    found = await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)), return_exceptions=True)
    for request, outcome in zip(requests, found, strict=True):
        ledger.sent += 1
        ledger.kinds.update(request.kind)
        await asyncio.to_thread(_enter, oracle, plan, request, outcome, ledger)
    stats = await target.rest()
    if not target.balanced(stats):
        ledger.wrong.append(f"{stats['capture_bytes']:.0f} bytes are held, clients hold {target.held}")
    await target.let_go()


def _enter(
    oracle: Oracle, plan: Plan, request: Request, outcome: list[Outcome] | BaseException | None, ledger: Ledger
) -> None:
    said = f"{', '.join(request.kind)}: "
    if request.mistaken:
        ledger.refused += isinstance(outcome, BaseException) and refused(outcome)
        if not (isinstance(outcome, BaseException) and refused(outcome)):
            ledger.wrong.append(f"{said}not refused, but {outcome!r:.200}")
        return
    if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
        ledger.failed += 1
        ledger.wrong.append(f"{said}{type(outcome).__name__}: {outcome}")
        return
    if outcome is None or isinstance(outcome, asyncio.CancelledError):
        ledger.cancelled += 1
        ledger.ends["left"] += 1
        if request.end is None:
            ledger.wrong.append(f"{said}ended without being cancelled")
        return
    assert not isinstance(outcome, BaseException)
    cancelled = any(one.reason == "cancelled" for one in outcome)
    ledger.cancelled += cancelled
    ledger.finished += not cancelled
    for one in outcome:
        check(oracle, request, one, ledger, plan.limit)


# --- from nothing to a result


def start_engine(
    kind: Literal["hf", "vllm"], folder: Path, pack: Pack, plan: Plan, dtype: str, cached: int
) -> ThreadedEngine[Any]:
    """On the model in the folder, small enough in every way that requests wait, come in pieces and are preempted."""
    if kind == "hf":
        from steerscope.engines.hf import HFEngine

        engine: ThreadedEngine[Any] = HFEngine.from_pretrained(
            folder, name="stress", dtype=dtype, max_batch=plan.concurrent // 2
        )
    else:
        from steerscope.engines.vllm.client.engine import VLLMEngine

        cuda = torch.cuda.is_available()
        block = 16 if cuda else 32
        given: dict[str, Any] = {"dtype": dtype, "max_model_len": 256, "enforce_eager": not cuda}
        given |= {"max_num_seqs": plan.concurrent, "max_num_batched_tokens": max(32, plan.concurrent)}
        given |= {"enable_prefix_caching": True, "block_size": block, "num_gpu_blocks_override": cached // block}
        given |= {"kv_cache_memory_bytes": 64 << 20} | small_share("cuda" if cuda else "cpu")
        engine = VLLMEngine(folder, name="stress", capture_budget=256 << 20, **given)
    engine.register_pack(PACK, pack, any_model=True)
    return engine


def prepare(folder: Path) -> Path:
    """The model and the pack of lenses, where they are not there yet."""
    if not (folder / "model").exists():
        make_model(folder / "model", torch.float32, "cpu")
        make_pack().save(folder / PACK)
    return folder


def oracle_of(folder: Path, dtype: torch.dtype = torch.float32) -> Oracle:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).eval().to(device)  # type: ignore[arg-type]
    return Oracle(model, {PACK: Pack.load(folder / PACK)})


def run(
    folder: Path,
    plan: Plan,
    kind: Literal["hf", "vllm"] = "hf",
    url: str | None = None,
    say: Say = lambda _: None,
    dtype: Dtype = "float32",
    cached: int = 768,
) -> dict[str, Any]:
    """Stress an engine, or the server at `url`, which must run the folder's model with its pack. In bfloat16 rows are
    compared, and neither tokens nor readings."""
    prepare(folder)
    oracle, engine = oracle_of(folder, getattr(torch, dtype)), None
    if dtype == "bfloat16":
        plan = replace(plan, watched=False, limit=_BFLOAT16)
    began = time.monotonic()

    async def through() -> tuple[Ledger, list[int], dict[str, float]]:
        target: Target = ServerTarget(url) if url else EngineTarget(engine)  # type: ignore[arg-type]
        ledger, memory = await stress(target, oracle, plan, say)
        return ledger, memory, await target.stats()

    facts: dict[str, Any] = {}
    if url is None:
        engine = start_engine(kind, folder / "model", Pack.load(folder / PACK), plan, dtype, cached)
    if kind == "vllm" and engine is not None:
        served: Any = engine
        scheduler = served._llm.vllm_config.scheduler_config
        facts = {"mode": served.mode, "async_scheduling": bool(scheduler.async_scheduling)}
    try:
        ledger, memory, stats = asyncio.run(through())
    finally:
        if engine is not None:
            engine.sync.close()
    left = {name: stats[name] for name in ("running", "waiting", "slots_in_use", "capture_bytes") if name in stats}
    result = {"target": "server" if url else kind, "dtype": dtype, **facts, "commit": commit(), "versions": versions()}
    result |= {"hardware": hardware(), "seed": plan.seed, "concurrent": plan.concurrent}
    result |= {"seconds": round(time.monotonic() - began, 1), "preempted": int(stats.get("worker_recomputed", 0))}
    result |= {**ledger.as_json(), "left_over": left, "rss_mib": memory}
    return result | {"holds": not ledger.wrong and not any(left.values())}
