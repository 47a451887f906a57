"""The same streams through the engine alone and through HTTP, in turns, in one process.

    python -m bench.served --model smollm2-135m --out bench/results/served.json

The clients run in a process of their own. The ratio of times is blurred by a busy machine, so the result also has the
ratio of the process's processor times, the server thread's time per token, and the functions in which it is spent.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.profiles import profiled, top_functions
from steerscope.bench.drivers import Ours, Prompts
from steerscope.bench.one import about_driver, budget_of, opened, paired, stream_round, summary, write
from steerscope.bench.shapes import SHAPES, NoTokenizer
from steerscope.bench.workload import NotMeasured, Setup, check_streams
from steerscope.engines.detokenizer import Decoder
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from steerscope.specs import Steering

LENGTHS = 5  # of the prompts
_SETTINGS = {"model": str, "engine": str, "batch": int, "prefill": int, "decode": int, "dtype": str}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in _SETTINGS.items():
        parser.add_argument(f"--{name}", type=kind, default=getattr(Setup(), name))
    parser.add_argument("--cell", default="zero-layer", help="what each stream asks: zero-layer, add, …")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    setup = Setup(**{name: getattr(args, name) for name in _SETTINGS})
    result = served(setup, args.iterations, args.cell)
    write(args.out, result)
    console = Console(highlight=False, soft_wrap=True)
    found = result["summary"]
    for name, what in (("ratio", "time"), ("cpu_ratio", "processor time")):
        low, high = found[name]["interval"]
        console.print(f"server / engine, {what}: {found[name]['median']:.3f} ({low:.3f} to {high:.3f})")
    console.print(f"server's thread: {found['loop_us_per_token']:.1f} µs per token")


class Words(NoTokenizer):
    """Tokenizer of random weights whose every id is a word, so that every token is an event."""

    def decode(self, token_ids: list[int], **_options: bool) -> str:
        return "".join(f" w{i}" for i in token_ids)


def served(setup: Setup, iterations: int, cell: str) -> dict[str, Any]:
    """Measure rounds of streams both ways, and profile the server's thread in one more round."""
    budget_of(setup, cell)
    with opened(lambda scratch: Ours(setup, scratch, 0)) as driver:
        _speak(driver, setup)
        with _running(driver) as server, _clients() as clients:
            pair = _Pair(driver, cell, server, clients)
            _, *rounds = [pair.both(i) for i in range(1 + iterations)]
            profile = pair.profiled(1 + iterations)
            result = about_driver(driver, cell=cell, iterations=iterations, warmups=1)
    alone, through = ([one[kind] for one in rounds] for kind in ("engine", "server"))
    figures: dict[str, Any] = {
        "engine": summary([one["total_s"] for one in alone]),
        "server": summary([one["total_s"] for one in through]),
        "first_token_engine": summary([one["first_token_s"] for one in alone]),
        "first_token_server": summary([one["first_token_s"] for one in through]),
        "ratio": paired([one["total_s"] for one in alone], [one["total_s"] for one in through]),
        "cpu_ratio": paired([one["cpu_s"] for one in alone], [one["cpu_s"] for one in through]),
        "loop_us_per_token": statistics.median(one["loop_us_per_token"] for one in through),
    }
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
def _running(driver: Ours) -> Iterator[Server]:
    server = Server(create_app(driver.engine.aio, ServerSettings(port=0, max_running=4096)))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        while not (server.started and server.serving.ready):
            if not thread.is_alive() or server.serving.failure is not None:
                raise NotMeasured(f"the server did not start: {server.serving.failure}")
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def _clients() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Start the clients' process, and yield a function that plays one round there."""
    command = [sys.executable, "-m", "bench.stream_client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders = process.stdin
        answers = process.stdout

        def play(order: dict[str, Any]) -> dict[str, Any]:
            orders.write(json.dumps(order) + "\n")
            orders.flush()
            return json.loads(answers.readline())

        yield play


@dataclass
class _Pair:
    """The same streams through an engine alone and through its server."""

    driver: Ours
    cell: str
    server: Server
    clients: Callable[[dict[str, Any]], dict[str, Any]]

    def both(self, seed: int) -> dict[str, dict[str, float]]:
        """Run one round of each; the order alternates."""
        order = ("engine", "server") if seed % 2 == 0 else ("server", "engine")
        found = {}
        for kind in order:
            gc.collect()
            before = time.process_time()
            prompts = self._prompts(seed)
            found[kind] = stream_round(self.driver, self.cell, prompts) if kind == "engine" else self.through(prompts)
            found[kind]["cpu_s"] = time.process_time() - before
        return found

    def _prompts(self, seed: int) -> Prompts:
        """Return prompts of several lengths: texts of one length, all at once, would decode faster than served ones."""
        prompts = self.driver.setup.prompts(seed)
        return [ids[: max(1, len(ids) - i % LENGTHS)] for i, ids in enumerate(prompts)]

    def through(self, prompts: Prompts) -> dict[str, float]:
        setup = self.driver.setup
        ops = self.driver.options(self.cell)["steer"] or [None] * len(prompts)
        host, port = self.server.address.removeprefix("http://").split(":")
        order = {"host": host, "port": int(port), "bodies": [*map(_body, prompts, setup.decodes(), ops)]}
        before = self._on_loop(time.thread_time)
        found = self.clients(order)
        spent = self._on_loop(time.thread_time) - before
        counts = found.pop("tokens")
        del found["first_tokens_s"]
        check_streams(setup, counts, found["last_first_token_s"], found.pop("first_end_s"))
        return found | {
            "tokens_per_s": sum(counts) / found["total_s"],
            "loop_us_per_token": 1e6 * spent / sum(counts),
        }

    def _on_loop(self, what: Callable[[], Any]) -> Any:
        """Call a function in the server's thread."""

        async def call() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self.server.servers[0].get_loop()).result(60)

    def profiled(self, seed: int) -> dict[str, Any]:
        """Run one more round, with the server's thread under cProfile."""
        rounds: list[dict[str, float]] = []
        stats = profiled(lambda: rounds.append(self.through(self._prompts(seed))), self._on_loop)
        tokens = sum(self.driver.setup.decodes())
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
            "thread": "server",
            "tokens": tokens,
            "calls_per_token": round(stats.total_calls / tokens, 2),
            "profiled_us_per_token": rounds[0]["loop_us_per_token"],
            "functions": functions,
        }


def _body(ids: list[int], tokens: int, op: Any) -> str:
    body: dict[str, Any] = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if op is not None:
        body["steerscope"] = {"steer": Steering(ops=(op,)).model_dump(mode="json", exclude_none=True)}
    return json.dumps(body)


if __name__ == "__main__":
    main()
