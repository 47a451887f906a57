"""`bench stream --http`: the same streams through the engine alone and through HTTP, in turns, in one process.

The clients run in a process of their own. The ratio of times is blurred by a busy machine, so the result also has the
ratio of the process's processor times, the server thread's time per token, and the functions in which it is spent.
"""

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from steerscope.bench.drivers import Ours
from steerscope.bench.one import about, budget_of, driver_of, stream_round
from steerscope.bench.profiled import profiled, top_functions
from steerscope.bench.shapes import SHAPES, NoTokenizer
from steerscope.bench.stats import paired, summary
from steerscope.bench.workload import NotMeasured, Setup, check_streams, steering_of
from steerscope.engines.detokenizer import Decoder
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from steerscope.specs import Steering

LENGTHS = 5  # of the prompts


class Words(NoTokenizer):
    """Tokenizer of random weights whose every id is a word, so that every token is an event."""

    def decode(self, token_ids: list[int], **_options: bool) -> str:
        return "".join(f" w{i}" for i in token_ids)


def served(setup: Setup, iterations: int, cell: str = "zero-layer", warmups: int = 1) -> dict[str, Any]:
    """Measure rounds of streams both ways, and profile the server's thread in one more round."""
    budget_of(setup, cell)
    with driver_of("ours", setup, 0) as driver:
        _speak(driver, setup)
        with _running(driver) as (server, thread), _clients() as clients:
            measure = _Measure(driver, setup, cell, server, clients)
            rounds = [measure.both(i) for i in range(warmups + iterations)][warmups:]
            profile = measure.profiled(warmups + iterations, thread)
            result = about(setup, cell=cell, iterations=iterations, warmups=warmups) | {"engine": driver.describe()}
    alone, through = ([one[kind] for one in rounds] for kind in ("engine", "server"))
    figures: dict[str, Any] = {
        "engine": summary([one["total_s"] for one in alone]),
        "server": summary([one["total_s"] for one in through]),
        "first_token_engine": summary([one["first_token_s"] for one in alone]),
        "first_token_server": summary([one["first_token_s"] for one in through]),
    }
    for name, key in (("ratio", "total_s"), ("cpu_ratio", "cpu_s")):
        figures[name] = paired([one[key] for one in alone], [one[key] for one in through])
    figures["loop_us_per_token"] = statistics.median(one["loop_us_per_token"] for one in through)
    return result | {"iterations": rounds, "profile": profile, "summary": figures}


def _speak(driver: Ours, setup: Setup) -> None:
    """Give the engine a tokenizer: the driver has none, since texts cost time that other benchmarks do not measure."""
    engine: Any = driver.engine.aio
    if setup.model in SHAPES:
        engine.tokenizer = Words()
    else:
        from transformers import AutoTokenizer

        from steerscope.models import resolve

        engine.tokenizer = AutoTokenizer.from_pretrained(resolve(setup.model))
    engine._decoder = Decoder(engine.tokenizer)


@contextmanager
def _running(driver: Ours) -> Iterator[tuple[Server, threading.Thread]]:
    server = Server(create_app(driver.engine.aio, ServerSettings(port=0, max_running=4096)))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        while not (server.started and server.serving.ready):
            if not thread.is_alive() or server.serving.failure is not None:
                raise NotMeasured(f"not measured: the server did not start: {server.serving.failure}")
            time.sleep(0.01)
        yield server, thread
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def _clients() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "steerscope.bench.stream_client"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


class _Measure:
    def __init__(self, driver: Ours, setup: Setup, cell: str, server: Server, clients: "subprocess.Popen[str]") -> None:
        self.driver, self.setup, self.cell, self.server, self.clients = driver, setup, cell, server, clients
        self.loop = server.servers[0].get_loop()
        facts = driver.facts
        steer = steering_of(cell, facts.layers, facts.hidden, setup.batch)
        self.ops = list(steer) if isinstance(steer, list | tuple) else [steer] * setup.batch

    def both(self, seed: int) -> dict[str, dict[str, float]]:
        """Run one round of each; the order alternates."""
        order = ("engine", "server") if seed % 2 == 0 else ("server", "engine")
        found = {}
        for kind in order:
            gc.collect()
            before = time.process_time()
            found[kind] = self.alone(seed) if kind == "engine" else self.through(seed)
            found[kind]["cpu_s"] = time.process_time() - before
        return found

    def alone(self, seed: int) -> dict[str, float]:
        return stream_round(self.driver, self.setup, self.cell, self._prompts(seed))

    def _prompts(self, seed: int) -> list[list[int]]:
        """Return prompts of several lengths: texts of one length, all at once, would decode faster than served ones."""
        return [ids[: max(1, len(ids) - i % LENGTHS)] for i, ids in enumerate(self.setup.prompts(seed))]

    def through(self, seed: int) -> dict[str, float]:
        asked = zip(self._prompts(seed), self.setup.decodes(), self.ops, strict=True)
        bodies = [self._body(*one) for one in asked]
        host, port = self.server.address.removeprefix("http://").split(":")
        before = self._loop_seconds()
        assert self.clients.stdin is not None
        assert self.clients.stdout is not None
        self.clients.stdin.write(json.dumps({"host": host, "port": int(port), "bodies": bodies}) + "\n")
        self.clients.stdin.flush()
        found = json.loads(self.clients.stdout.readline())
        spent = self._loop_seconds() - before
        counts = found.pop("tokens")
        del found["first_tokens_s"]
        check_streams(self.setup, counts, found["last_first_token_s"], found.pop("first_end_s"))
        found["tokens_per_s"] = sum(counts) / found["total_s"]
        found["loop_us_per_token"] = 1e6 * spent / sum(counts)
        return found

    def _body(self, ids: list[int], tokens: int, op: Any) -> str:
        body: dict[str, Any] = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if op is not None:
            body["steerscope"] = {"steer": Steering(ops=(op,)).model_dump(mode="json", exclude_none=True)}
        return json.dumps(body)

    def _loop_seconds(self) -> float:
        """Return the processor time of the server's thread."""
        return self._on_loop(time.thread_time)

    def _on_loop(self, what: Any) -> Any:
        async def call() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)

    def profiled(self, seed: int, thread: threading.Thread) -> dict[str, Any]:
        """Run one more round, with the server's thread under cProfile."""
        rounds: list[dict[str, float]] = []
        stats = profiled(lambda: rounds.append(self.through(seed)), self._on_loop)
        tokens = sum(self.setup.decodes())
        functions = [
            {
                "function": one["function"],
                "file": one["file"],
                "calls_per_token": round(one["calls"] / tokens, 3),
                "own_us_per_token": round(one["own_us"] / tokens, 3),
            }
            for one in top_functions(stats)
        ]
        return {
            "thread": thread.name,
            "tokens": tokens,
            "calls_per_token": round(stats.total_calls / tokens, 2),
            "profiled_us_per_token": rounds[0]["loop_us_per_token"],
            "functions": functions,
        }
