"""Streams of stock vLLM and of steerscope, each with its own defaults, on one GPU in one run.

    . bench/gpu/env.sh && python3 -m bench.gpu.streams --out streams.json

Four engines start side by side, each in a process of its own, and take turns: over HTTP vLLM's OpenAI server and
`steerscope serve`, as libraries vLLM's AsyncLLM and steerscope's engine. Nothing is steered or captured. All get the
same weights (made up), the same prompts of token ids, and memory for keys and values in bytes. Sizes of batches are
not set: that is what is measured.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.stream_client import play
from steerscope.bench.one import hardware, paired, versions
from steerscope.bench.shapes import shape_config

KINDS = ("stock-http", "ours-http", "stock-library", "ours-library")
NARROW = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}  # of vLLM without a usage context: `ours-narrow`
PREFIX = "@streams "  # of a child's lines that are meant for its parent
START_S, ROUND_S = 420.0, 120.0
FIGURES = ("tokens_per_s", "first_token_p50_s", "first_token_p99_s", "last_first_token_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen2.5-3b")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help=f"of {', '.join(KINDS)}, ours-narrow")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15, help="of each number of streams, at most")
    parser.add_argument("--seconds", type=float, default=210.0, help="for all rounds; fewer rounds if they take longer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-bytes", type=int, default=8 << 30, help="memory for keys and values of each engine")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of vLLM, as JSON, for all")
    parser.add_argument("--child", choices=(*KINDS, "ours-narrow"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args, Path(scratch))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tell(table(result))


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- the engines, each in a process of its own


def options_of(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    made = {"load_format": "dummy", "dtype": args.dtype, "kv_cache_memory_bytes": args.cache_bytes}
    # vLLM refuses to start when less than this share is free, also where the cache has a size in bytes.
    made["gpu_memory_utilization"] = 0.9 / len(args.kinds)
    return made | (NARROW if kind == "ours-narrow" else {}) | args.options


def child(args: argparse.Namespace) -> None:
    if args.child == "ours-http":
        serve_ours(args)
    elif args.child == "stock-library":
        asyncio.run(library(stock_engine(args)))
    else:
        asyncio.run(library(our_engine(args)))


def serve_ours(args: argparse.Namespace) -> None:
    from steerscope.engines.load import load_engine
    from steerscope.serving.app import create_app
    from steerscope.serving.run import serve_app
    from steerscope.serving.settings import ServerSettings

    serve_app(
        create_app(
            lambda: load_engine(args.model, engine="vllm", vllm=options_of(args, args.child)),
            ServerSettings(port=args.port, model_name="model"),
        )
    )


Stream = Callable[[list[int], int, str], AsyncIterator[int]]  # prompt, tokens, name → how many tokens came


def our_engine(args: argparse.Namespace) -> tuple[Stream, dict[str, Any]]:
    from steerscope.engines.load import load_engine
    from steerscope.engines.results import TokenEvent, TokenPrompt
    from steerscope.specs import Sampling

    engine: Any = load_engine(args.model, engine="vllm", vllm=options_of(args, args.child))

    async def stream(ids: list[int], tokens: int, name: str) -> AsyncIterator[int]:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        async for event in engine.stream(TokenPrompt(ids), sampling, request_id=name):
            yield isinstance(event, TokenEvent)

    sizes = {name: getattr(engine.settings, name) for name in ("slots", "groups")}
    pool = [worker["pool_bytes"] for worker in engine.describe()]
    return stream, described(engine._llm.vllm_config) | sizes | {"pool_bytes": pool}


def stock_engine(args: argparse.Namespace) -> tuple[Stream, dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    given = AsyncEngineArgs(model=str(args.model), **options_of(args, args.child))
    engine = AsyncLLM.from_engine_args(given, usage_context=UsageContext.OPENAI_API_SERVER)

    async def stream(ids: list[int], tokens: int, name: str) -> AsyncIterator[int]:
        kind = RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, output_kind=kind)
        async for output in engine.generate({"prompt_token_ids": ids}, params, name):
            yield len(output.outputs[0].token_ids)

    return stream, described(engine.vllm_config)


def described(config: Any) -> dict[str, Any]:
    scheduler = config.scheduler_config
    names = "max_num_seqs", "max_num_batched_tokens", "async_scheduling"
    return {name: getattr(scheduler, name, None) for name in names} | {"context": config.model_config.max_model_len}


async def library(made: tuple[Stream, dict[str, Any]]) -> None:
    """Rounds as lines of JSON on stdin, their times as lines on stdout."""
    stream, about = made
    tell(PREFIX + json.dumps(about))
    for turn in range(1 << 30):
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return
        asked = json.loads(line)
        tell(PREFIX + json.dumps(await play_library(stream, asked["prompts"], asked["tokens"], turn)))


async def play_library(stream: Stream, prompts: list[list[int]], tokens: int, turn: int) -> dict[str, Any]:
    gc.collect()
    firsts: list[float] = []
    start = time.perf_counter()

    async def one(i: int, ids: list[int]) -> int:
        count = 0
        async for came in stream(ids, tokens, f"{turn}.{i}"):
            if came and not count:
                firsts.append(time.perf_counter() - start)
            count += came
        return count

    counts = await asyncio.gather(*(one(i, ids) for i, ids in enumerate(prompts)))
    return {"total_s": time.perf_counter() - start, "first_tokens_s": firsts, "tokens": counts}


# --- the run


class Running:
    """One engine's process."""

    def __init__(self, kind: str, args: argparse.Namespace, scratch: Path, port: int) -> None:
        self.kind, self.port, self.about = kind, port, dict[str, Any]()
        self.log = args.out.parent / f"{args.out.stem}-{kind}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ, VLLM_CACHE_ROOT=str(scratch / f"cache-{kind}"))
        command = [sys.executable, __file__, *sys.argv[1:], "--child", kind]
        command += ["--model", str(scratch / "model"), "--port", str(port)]
        if kind.startswith("stock"):
            environment["VLLM_PLUGINS"] = ""
        if kind == "stock-http":
            command = self._vllm_serve(args, scratch)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if kind.endswith(("library", "narrow")) else self.log.open("w"),
            stderr=self.log.open("w") if kind.endswith(("library", "narrow")) else subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def _vllm_serve(self, args: argparse.Namespace, scratch: Path) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(scratch / "model")]
        command += ["--served-model-name", "model", "--port", str(self.port)]
        for name, value in options_of(args, self.kind).items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        return command

    def wait(self, until: float) -> None:
        if self.kind.endswith("http"):
            self._wait_http(until)
        else:
            self.about = self._line()

    def _wait_http(self, until: float) -> None:
        from urllib.request import urlopen

        path = "ready" if self.kind == "ours-http" else "health"
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5):
                    return
            except OSError:  # also an answer that is not 200
                time.sleep(0.5)
        raise SystemExit(f"{self.kind} did not start: see {self.log}")

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(PREFIX):
                return json.loads(line.removeprefix(PREFIX))
        raise SystemExit(f"{self.kind} has ended: see {self.log}")

    def round(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        if self.kind.endswith("http"):
            found = play("127.0.0.1", self.port, [_body(ids, tokens) for ids in prompts])
        else:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self.process.stdin.flush()
            found = self._line()
        if set(found["tokens"]) != {tokens}:
            raise SystemExit(f"{self.kind}: streams of {sorted(set(found['tokens']))} tokens instead of {tokens}")
        firsts = np.array(found["first_tokens_s"])
        return {
            "total_s": found["total_s"],
            "tokens_per_s": sum(found["tokens"]) / found["total_s"],
            "first_token_p50_s": float(np.quantile(firsts, 0.5)),
            "first_token_p99_s": float(np.quantile(firsts, 0.99)),
            "last_first_token_s": float(firsts.max()),
        }

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _body(ids: list[int], tokens: int) -> str:
    asked = {"model": "model", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}})


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    vocabulary = make_model(args.shape, scratch / "model")
    began = time.monotonic()
    engines: list[Running] = []
    try:
        for i, kind in enumerate(args.kinds):
            engines.append(Running(kind, args, scratch, 18_300 + i))
        for engine in engines:
            engine.wait(began + START_S)
        started = time.monotonic() - began
        cells = rounds(args, engines, vocabulary)
        memory = gpu_memory(engines)
    finally:
        for engine in engines:
            engine.close()
    if torch.cuda.is_available():
        torch.cuda.init()  # the engines have ended: their memory is not shared with this process
    configuration = {name: getattr(args, name) for name in ("shape", "prompt", "tokens", "dtype", "cache_bytes")}
    about = {engine.kind: engine.about | {"gpu_bytes": memory.get(engine.kind)} for engine in engines}
    found = {"configuration": configuration | {"options": args.options}, "versions": versions(), "hardware": hardware()}
    return found | {"start_s": started, "engines": about, "cells": cells}


def make_model(shape: str, folder: Path) -> int:
    """A folder with a config, and a byte-level tokenizer with a piece of text for every id. Returns how many ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = shape_config(shape)
    config.save_pretrained(folder)
    pieces = [*pre_tokenizers.ByteLevel.alphabet()]
    pieces += [f"Ġw{i}" for i in range(config.vocab_size - len(pieces))]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return config.vocab_size


def rounds(args: argparse.Namespace, engines: list[Running], vocabulary: int) -> list[dict[str, Any]]:
    """Each engine in turn, another one first each time. Two rounds before that are not counted."""
    chance, end = np.random.default_rng(0), time.monotonic() + args.seconds
    cells = []
    for left, streams in zip(range(len(args.streams), 0, -1), args.streams, strict=True):
        until = time.monotonic() + (end - time.monotonic()) / left
        found: dict[str, list[dict[str, float]]] = {engine.kind: [] for engine in engines}
        for turn in range(-2, args.rounds):
            if turn > 2 and time.monotonic() > until:
                break
            prompts = chance.integers(256, vocabulary, (streams, args.prompt)).tolist()
            for i in range(len(engines)):
                engine = engines[(turn + i) % len(engines)]
                measured = engine.round(prompts, args.tokens)
                if turn >= 0:
                    found[engine.kind].append(measured)
        cells.append({"streams": streams, "rounds": found, "summary": summary(found)})
        tell(f"{streams} streams: {min(map(len, found.values()))} rounds")
    return cells


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and for ours the ratio of times to the stock engine of the same kind, with its 95 % interval."""
    made: dict[str, Any] = {}
    for kind, measured in found.items():
        made[kind] = {name: float(np.median([one[name] for one in measured])) for name in FIGURES}
        stock = "stock-http" if kind.endswith("http") else "stock-library"
        if kind != stock and stock in found:
            times = [[one["total_s"] for one in found[name]] for name in (stock, kind)]
            made[kind]["time_ratio"] = {name: paired(*times)[name] for name in ("median", "interval")}
    return made


def gpu_memory(engines: list[Running]) -> dict[str, int]:
    """Bytes of device memory per engine, by its processes; empty where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        used = {int(pid): int(size) << 20 for pid, size in (line.split(",") for line in lines)}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}
    return {engine.kind: sum(used.get(pid, 0) for pid in family(engine.process.pid)) for engine in engines}


def family(pid: int) -> list[int]:
    """A process and those it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for started in task.read_text().split():
            found += family(int(started))
    return found


def table(result: dict[str, Any]) -> str:
    lines = ["| streams | engine | tokens/s | first token p50, ms | p99 | last | time / stock (95 %) |"]
    lines.append("|---|---|---|---|---|---|---|")
    for cell in result["cells"]:
        for kind, one in cell["summary"].items():
            times = " | ".join(f"{1e3 * one[name]:.0f}" for name in FIGURES[1:])
            ratio = one.get("time_ratio")
            told = f"{ratio['median']:.3f} ({ratio['interval'][0]:.3f}–{ratio['interval'][1]:.3f})" if ratio else ""
            lines.append(f"| {cell['streams']} | {kind} | {one['tokens_per_s']:,.0f} | {times} | {told} |")
    lines += [f"{kind}: {json.dumps(about)}" for kind, about in result["engines"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
