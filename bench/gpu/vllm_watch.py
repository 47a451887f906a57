"""Readings and rules of the vLLM engine against the transformers engine, in mixed batches, whole and streamed.

    python -m bench.gpu.vllm_watch --shape gemma-3-1b --out watch.json

One process, one configuration. Watched and unwatched requests run together; every text is fed once more, whole, to the
transformers engine with the same watch, and each reading is compared. Then the same requests as streams: a token must
carry the reading of the row it was sampled from; half of them are left early, and nothing may be left behind.
"""

import argparse
import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.vllm_rows import start_vllm
from bench.random_packs import make_pack
from steerscope.bench.shapes import SHAPES, NoTokenizer, load_model
from steerscope.engines.api import Engine
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Sampling, Watch
from steerscope.specs.watch import flag, steer, stop, when

LIMITS = {"float32": 1e-3, "bfloat16": 0.15}  # of a probability; what rows rounded to bf16 do to random lenses
PACK = "random"
_LEFT = ("running", "waiting", "slots_in_use", "worker_slots_in_use", "worker_requests", "capture_bytes")


def watches(hidden: int) -> list[Watch | None]:
    """Kinds of requests; the rules hold on about every second row."""
    often, push = when("0.0", above=0.5), Add(vector=np.ones(hidden, dtype=np.float32), scale=0.05, layers=0)
    return [
        Watch(pack=PACK, top_k=5),
        None,
        Watch(pack=PACK, top_k=3, tokens="generated"),
        Watch(pack=PACK, top_k=8, levels=[1], tokens="generated", rules=[often.then(flag("often"))]),
        Watch(pack=PACK, top_k=2, rules=[when("0.1", above=0.5, for_tokens=3).then(stop("thrice"))]),
        Watch(pack=PACK, top_k=4, tokens="generated", rules=[often.then(steer(push, name="push"))]),
    ]


def requests(engine: SyncEngine, count: int) -> tuple[list[TokenPrompt], list[Sampling], list[Watch | None]]:
    rng, kinds = np.random.default_rng(0), watches(engine.facts.hidden)
    vocab = min(engine.facts.vocab, 30000)
    prompts = [TokenPrompt(rng.integers(2, vocab, int(rng.integers(3, 90))).tolist()) for _ in range(count)]
    samplings = [Sampling(max_tokens=int(rng.integers(4, 40)), ignore_eos=True) for _ in range(count)]
    return prompts, samplings, [kinds[i % len(kinds)] for i in range(count)]


def by_row(done: Generation) -> dict[int, dict[str, float]]:
    return {one.position: {c.id: c.probability for c in one.concepts} for one in done.readings}


def distance(found: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]], top_k: int) -> float:
    """The worst difference of a score, rank by rank and of the concepts that both name."""
    worst = 0.0
    for row, mine in found.items():
        theirs = wanted[row]
        ranks = zip(sorted(mine.values()), sorted(theirs.values()), strict=True)
        worst = max([worst, *(abs(a - b) for a, b in ranks), *(abs(mine[c] - theirs[c]) for c in mine.keys() & theirs)])
        assert len(mine) <= top_k
    return worst


def against(reference: SyncEngine, done: Sequence[Generation], asked: Sequence[Watch | None]) -> dict[str, Any]:
    """Every text as one prompt: its readings are those of the prompt's rows, as far as no steering was switched."""
    worst, readings, missing = 0.0, 0, 0
    for one, watch in zip(done, asked, strict=True):
        if watch is None:
            assert not one.readings
            continue
        rows = len(one.prompt_token_ids) + len(one.token_ids) - 1
        first = len(one.prompt_token_ids) if watch.tokens == "generated" else 0
        missing += [reading.position for reading in one.readings] != list(range(first, rows))
        if any(firing.action == "steer" for firing in one.firings):
            continue
        plain = Watch(pack=PACK, top_k=watch.top_k, levels=watch.levels)
        fed = TokenPrompt([*one.prompt_token_ids, *one.token_ids[:-1]])
        forced = reference.generate(fed, Sampling(max_tokens=1, ignore_eos=True), watch=plain)
        worst = max(worst, distance(by_row(one), by_row(forced), watch.top_k))
        readings += len(one.readings)
    return {"readings": readings, "worst": worst, "missing": missing}


def rules_hold(done: Sequence[Generation]) -> dict[str, Any]:
    stopped = [one for one in done if one.finish_reason == "rule"]
    exact = all(one.firings[-1].token + 1 == len(one.token_ids) for one in stopped)
    return {"fired": sum(len(one.firings) for one in done), "stopped": len(stopped), "exact": exact}


async def streamed(engine: Engine, prompts: list, samplings: list, asked: list) -> dict[str, Any]:
    """Each token with its reading; every second stream is left after a few tokens."""
    late = wrong = left = 0

    async def one(i: int) -> None:
        nonlocal late, wrong, left
        watch, seen, length = asked[i], 0, len(prompts[i].token_ids)
        async with aclosing(engine.stream(prompts[i], samplings[i], watch=watch)) as events:
            async for event in events:
                if isinstance(event, EndEvent):
                    wrong += watch is not None and seen != len(event.generation.readings)
                elif isinstance(event, TokenEvent):
                    watched = watch is not None and (event.index > 0 or watch.tokens != "generated")
                    late += watched != (event.reading is not None)
                    wrong += event.reading is not None and event.reading.position != length + event.index - 1
                    seen += len(event.readings)
                    if i % 2 and event.index == 3:
                        left += 1
                        return

    await asyncio.gather(*(one(i) for i in range(len(prompts))))
    return {"streams": len(prompts), "left": left, "late": late, "wrong": wrong}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    model = load_model(args.shape, args.device, dtype)
    model.save_pretrained(folder)
    reference = HFEngine(model, NoTokenizer(), name="reference").sync  # type: ignore[arg-type]
    engine = start_vllm(folder, args)
    facts = engine.facts
    pack = make_pack([7, 60, 200], facts.hidden, (128, 64), layer=facts.layers // 2)
    for one in (reference, engine):
        one.register_pack(PACK, pack, any_model=True)
    prompts, samplings, asked = requests(engine, args.requests)
    result: dict[str, Any] = {}
    for turn in ("first", "again"):  # the second time, graphs are there
        done = engine.generate(prompts, samplings, watch=asked)
        result[turn] = against(reference, done, asked) | rules_hold(done)
    result["streams"] = asyncio.run(streamed(engine.aio, prompts, samplings, asked))
    engine.generate(prompts[1], samplings[1])  # what was left is known to be over with the next steps
    for _ in range(50):
        stats = engine.stats()
        result["left_over"] = {name: stats[name] for name in _LEFT if stats.get(name)}
        if not result["left_over"]:
            break
        time.sleep(0.1)
    engine.close()
    reference.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=list(LIMITS))
    parser.add_argument("--requests", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=256, help="max_num_batched_tokens: prompts come in parts")
    args = parser.parse_args()
    args.eager, args.utilisation = False, None
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    result: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "shape": args.shape}
    result |= {"dtype": args.dtype, "requests": args.requests, "tokens_per_step": args.tokens}
    result["device"] = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    with tempfile.TemporaryDirectory() as scratch:
        result |= measure(args, Path(scratch) / "model")
    rounds, streams = (result["first"], result["again"]), result["streams"]
    result["holds"] = all(r["worst"] <= LIMITS[args.dtype] and not r["missing"] and r["exact"] for r in rounds)
    result["holds"] &= not result["left_over"] and not streams["late"] and not streams["wrong"]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))  # noqa: T201
    gc.collect()


if __name__ == "__main__":
    main()
