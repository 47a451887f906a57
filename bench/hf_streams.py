"""What streams of the transformers engine wait for: places in the batch, and long prompts of others.

    python -m bench.hf_streams --out bench/results/hf_streams.json

Bursts: streams that begin together, for several `max_batch`. Arrivals: streams that run while one long prompt arrives,
for several `prefill_chunk`. Times are processor time of this process, of one thread, so that other programs on the
machine do not count. A GPU is not waited for by processor time: this is a program for CPUs.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from steerscope.bench.one import hardware, versions, write
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenEvent, TokenPrompt
from steerscope.models import DEFAULT_MODEL, resolve
from steerscope.specs import Sampling

FIRST_TOKENS, MOST_TOKENS = 8, 4000  # of each running stream before the long prompt arrives, and in all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-batch", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--streams", type=int, default=64, help="that begin together")
    parser.add_argument("--prompt-tokens", type=int, default=45, help="of each of these")
    parser.add_argument("--tokens", type=int, default=32, help="that each of these generates")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8192, 512, 256, 128])
    parser.add_argument("--running", type=int, default=8, help="streams while the long prompt arrives")
    parser.add_argument("--long-tokens", type=int, default=4000, help="of the long prompt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bursts = [asyncio.run(burst(args, max_batch)) for max_batch in args.max_batch]
    arrivals = [asyncio.run(arrival(args, chunk)) for chunk in args.chunks]
    configuration = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    about = {"configuration": configuration, "versions": versions(), "hardware": hardware()}
    write(args.out, about | {"bursts": bursts, "arrivals": arrivals})


def load(args: argparse.Namespace, **options: Any) -> HFEngine:
    return HFEngine.from_pretrained(resolve(args.model), name=args.model, **options)


def prompt(engine: HFEngine, n_tokens: int, seed: int) -> TokenPrompt:
    draw = torch.Generator().manual_seed(seed)
    return TokenPrompt(torch.randint(1000, engine.facts.vocab, (n_tokens,), generator=draw).tolist())


async def times_of(engine: HFEngine, text: TokenPrompt, n_tokens: int, times: list[float]) -> None:
    """Stream a text, and note when each token came."""
    async for event in engine.stream(text, Sampling(max_tokens=n_tokens, ignore_eos=True)):
        if isinstance(event, TokenEvent):
            times.append(time.process_time())


async def burst(args: argparse.Namespace, max_batch: int) -> dict[str, Any]:
    async with load(args, max_batch=max_batch) as engine:
        await times_of(engine, prompt(engine, args.prompt_tokens, 0), 4, [])
        streams: list[list[float]] = [[] for _ in range(args.streams)]
        began = time.process_time()
        work = enumerate(streams, 1)
        await asyncio.gather(
            *(times_of(engine, prompt(engine, args.prompt_tokens, i), args.tokens, times) for i, times in work)
        )
        ended = time.process_time()
    first = [times[0] - began for times in streams]
    tokens_per_s = sum(map(len, streams)) / (ended - began)
    found = {"max_batch": max_batch, "first_token_s": first, "tokens_per_s": tokens_per_s}
    median, last = statistics.median(first), max(first)
    sys.stdout.write(
        f"max_batch {max_batch}: first token {median:.1f} s, last {last:.1f} s; {tokens_per_s:.1f} tokens/s\n"
    )
    return found


async def arrival(args: argparse.Namespace, chunk: int) -> dict[str, Any]:
    async with load(args, prefill_chunk=chunk) as engine:
        running: list[list[float]] = [[] for _ in range(args.running)]
        tasks = [
            asyncio.ensure_future(times_of(engine, prompt(engine, args.prompt_tokens, i), MOST_TOKENS, times))
            for i, times in enumerate(running)
        ]
        while min(map(len, running)) < FIRST_TOKENS:
            await asyncio.sleep(0.01)
        came, times = time.process_time(), list[float]()
        await times_of(engine, prompt(engine, args.long_tokens, 99), 4, times)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [b - a for stream in running for a, b in itertools.pairwise(stream) if b > came]
    before = [b - a for stream in running for a, b in itertools.pairwise(stream[2:]) if b <= came]
    found = {"chunk": chunk, "longest_gap_s": max(gaps), "first_token_s": times[0] - came}
    found["step_before_s"] = statistics.median(before)
    sys.stdout.write(
        f"prefill_chunk {chunk}: longest gap {max(gaps):.1f} s, first token {found['first_token_s']:.1f} s\n"
    )
    return found


if __name__ == "__main__":
    main()
