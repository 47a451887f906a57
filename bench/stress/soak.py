"""An hour of mixed load on a server with a real model: does anything grow, slow down or drift?

    .venv-vllm/bin/python -m bench.stress.soak --engine vllm --out bench/results/soak.json

Every few seconds the server and its children are looked at: memory, handles, threads, files in shared memory, processor
time per token. Once a minute the same four questions are asked amid the load, and must be answered as the first time.
Before and after it, at rest, the server must hold the same.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from scipy.stats import theilslopes

from bench.machine import commit
from bench.random_packs import make_pack
from bench.stress.mixture import HIDDEN, LAYER, PACK, Clients, Record, vector
from bench.stress.processes import look, orphans
from steerscope.bench.one import hardware, versions, write
from steerscope.client import AsyncClient

MODEL = "smollm2-135m"
EVERY_S, TTL_S = 10.0, 15.0
_WARM_UP_S, _START_S = 120.0, 600.0
_SMALL = 64 << 20  # of the cache and of rows: all of it has been written to when the load begins, and grows no more
_HELD = ("handles", "shared", "capture_mib")  # the same at rest, before and after
_GROWTH = {"memory_mib": 1.03, "threads": 1.03, "first_token_ms": 1.1, "token_ms": 1.1}  # last third against the middle

Sample = dict[str, float]


async def sample(process: int, http: httpx.AsyncClient, record: Record) -> Sample:
    text = (await http.get("/metrics")).text
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    seen = await asyncio.to_thread(look, process)
    held = float(told["steerscope_capture_bytes"]) / 2**20
    return {"at": record.now(), "tokens": record.tokens, "capture_mib": held, **seen._asdict()}


async def load(process: int, http: httpx.AsyncClient, seconds: float, clients: int) -> tuple[Record, list[Sample]]:
    """So long, and then until the server is at rest; the last sample is of that."""
    record, samples = Record(), []
    until = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            samples.append(await sample(process, http, record))
            await asyncio.sleep(EVERY_S)

    asking = Clients(str(http.base_url), record)
    async with asking.client:
        await asyncio.gather(*(asking.run(i, until) for i in range(clients)), asking.canaries(until), watch())
    await asyncio.sleep(2 * TTL_S)  # rows that are not fetched
    return record, [*samples, await sample(process, http, record)]


async def soaked(process: int, url: str, seconds: float, clients: int) -> dict[str, Any]:
    async with AsyncClient(url) as client:
        for i, name in enumerate(("held", "other")):
            await client.upload_vector(name, vector(i))
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        warming, (*_, before) = await load(process, http, min(_WARM_UP_S, seconds), clients)
        record, (*samples, after) = await load(process, http, seconds, clients)
    result = {"requests": dict(record.requests), "tokens": record.tokens, "canaries": record.canaries}
    result |= {"wrong": warming.wrong + record.wrong, "before": before, "after": after}
    return result | {"trends": trends(record, samples)}


def trends(record: Record, samples: list[Sample]) -> dict[str, dict[str, Any]]:
    at = [one["at"] for one in samples]
    series = {
        name: list(zip(at, [one[name] for one in samples], strict=True)) for name in ("memory_mib", "threads", *_HELD)
    }
    width = min(6, len(samples) // 2)
    spans = [(a, b) for a, b in zip(samples, samples[width:], strict=False) if b["tokens"] > a["tokens"]]
    series["processor_ms_per_token"] = [
        (b["at"], 1e3 * (b["processor_s"] - a["processor_s"]) / (b["tokens"] - a["tokens"])) for a, b in spans
    ]
    series["first_token_ms"] = [(at, 1e3 * value) for at, value in record.firsts]
    series["token_ms"] = [(at, 1e3 * value) for at, value in record.gaps]
    return {name: trend(np.array(points)) for name, points in series.items()}


def trend(points: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Medians of the thirds and of every minute; the slope per hour (Theil and Sen) with its 95 % interval."""
    at, values = points.T
    end = float(at.max())
    few = np.linspace(0, len(at) - 1, min(len(at), 500)).astype(int)  # the cost of a slope grows with the square
    fit: Any = theilslopes(values[few], at[few])

    def medians(width: float, count: int) -> list[float | None]:
        parts = [values[(at >= i * width) & (at <= (i + 1) * width)] for i in range(count)]
        return [round(float(np.median(part)), 3) if len(part) else None for part in parts]

    hourly = [round(3600 * float(value), 3) for value in (fit[0], fit[2], fit[3])]
    return {"thirds": medians(end / 3, 3), "per_hour": hourly, "by_minute": medians(60, int(end // 60) + 1)}


def problems(result: dict[str, Any]) -> list[str]:
    found = [*result["wrong"], *(f"{path} was left in shared memory" for path in result["orphans"])]
    for name in _HELD:
        if result["after"][name] > result["before"][name]:
            found.append(f"{name} at rest: {result['before'][name]:g} before, {result['after'][name]:g} after")
    for name, most in _GROWTH.items():
        _, middle, last = result["trends"][name]["thirds"]
        if last > most * middle:
            found.append(f"{name} grows: {middle:g}, then {last:g}")
    return found


@contextmanager
def serving(engine: str, scratch: Path) -> Iterator[tuple[int, str]]:
    make_pack((4, 60), HIDDEN, (32, 16), layer=LAYER).save(scratch / PACK)
    (scratch / "vectors").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "steerscope.cli.main", "serve", MODEL, "--engine", engine, "--port", str(port)]
    command += ["--pack", str(scratch / PACK), "--any-model", "--vectors", str(scratch / "vectors")]
    command += ["--dtype", "float32", "--capture-ttl", str(TTL_S), "--log-level", "warning"]
    command += ["--captures-bytes", str(_SMALL)]
    if engine == "vllm":
        own = {"max_model_len": 512, "kv_cache_memory_bytes": _SMALL, "enforce_eager": not torch.cuda.is_available()}
        command += ["--vllm", json.dumps(own)]
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    with subprocess.Popen(command) as process:
        try:
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server did not start; see above")
                time.sleep(0.5)
            yield process.pid, url
        finally:
            process.terminate()
            process.wait(120)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"engine": args.engine, "model": MODEL, "minutes": args.minutes, "clients": args.clients}
    result |= {"commit": commit(), "versions": versions(), "hardware": hardware()}
    before = orphans()
    with tempfile.TemporaryDirectory() as scratch, serving(args.engine, Path(scratch)) as (process, url):
        result |= asyncio.run(soaked(process, url, 60 * args.minutes, args.clients))
    result["orphans"] = sorted(orphans() - before)
    write(args.out, result)
    Console().print("\n".join(problems(result)) or "nothing grew, nothing was wrong", markup=False)


if __name__ == "__main__":
    main()
