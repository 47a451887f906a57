"""A soak of the vLLM engine: random mixes of requests, with every row of every request checked, and a final ledger.

    python -m steerscope.bench.vllm_soak --requests 500 --output soak.json [--seconds 120]

Requests are steered, captured, reduced, stopped by EOS and by stop strings, cancelled half-way, and preempted because
the KV cache is too small for them. Afterwards each text is fed once more to the transformers engine and compared.
"""

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from steerscope.bench.shapes import small_share
from steerscope.engines.facade import SyncEngine
from steerscope.engines.generation import Choice, EndEvent, Generation, TokenPrompt
from steerscope.engines.hf import HFEngine
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering

LAYERS, HIDDEN, VOCAB = 4, 128, 512
ENDS = list(range(1, 13))  # so many EOS tokens that texts do end
SELECTORS = ("all", "prompt", "generated", "last_prompt", "positions=[0:3]", "!last_prompt")


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: Sampling
    steer: Steering
    capture: Capture | None
    cancel_after: int | None  # tokens
    kind: tuple[str, ...]


@dataclass
class Ledger:
    """What became of the requests, and what was wrong with them."""

    ends: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rows: int = 0
    texts: int = 0
    worst: float = 0.0


def make_model(folder: Path, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = ENDS  # type: ignore[assignment]
    model.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="t0", eos_token="t1", pad_token="t1")
    tokenizer.save_pretrained(folder)
    return model.to(device), tokenizer  # type: ignore[arg-type]


def draw(rng: np.random.Generator, prefix: list[int]) -> Request:
    """A random request; many begin alike, so that the prefix cache has something to get wrong."""
    own = rng.integers(20, VOCAB, int(rng.integers(1, 60))).tolist()
    prompt = (prefix[: int(rng.integers(16, len(prefix)))] if rng.random() < 0.5 else []) + own
    kind: list[str] = []
    most = int(rng.integers(1, 48))
    stop: tuple[str, ...] = ()
    if rng.random() < 0.3:
        stop = tuple(f"t{int(rng.integers(20, VOCAB))} t" if rng.random() < 0.3 else f" t{d}" for d in (4, 37))[:2]
        kind.append("stop strings")
    sampling = Sampling(
        max_tokens=most, temperature=float(rng.choice([0.0, 1.0])), seed=int(rng.integers(1 << 30)), stop=stop,
        ignore_eos=bool(rng.random() < 0.3),
    )  # fmt: skip
    ops: list[Add | Cap | Ablate] = []
    for _ in range(int(rng.choice([0, 0, 1, 2]))):
        vector = rng.standard_normal(HIDDEN).astype(np.float32)
        tokens = str(rng.choice(SELECTORS if len(prompt) > 1 else SELECTORS[:4]))
        if tokens == "generated" and most < 2:
            tokens = "all"
        where: Any = {"layers": str(rng.choice(["all", "0", "1-2", "3"])), "tokens": tokens}
        ops.append(
            [Add(vector=vector, scale=0.3, **where), Cap(vector=vector, min=-1, max=1, **where),
             Ablate(vector=vector, **where)][int(rng.integers(3))]
        )  # fmt: skip
        kind.append(type(ops[-1]).__name__)
    capture = None
    if rng.random() < 0.7:
        tokens = str(rng.choice(SELECTORS[:5]))
        if tokens == "generated" and most < 2:
            tokens = "all"
        reduce = [None, None, "mean", "last"][int(rng.integers(4))]
        layers = str(rng.choice(["all", "0", "1,3"]))
        capture = Capture(layers=layers, tokens=tokens, reduce=reduce, before_steering=bool(rng.random() < 0.2))  # type: ignore[arg-type]
        kind.append(f"reduce {reduce}" if reduce else "capture")
    cancel = int(rng.integers(1, 12)) if rng.random() < 0.12 else None
    if cancel:
        kind.append("cancelled")
    return Request(prompt, sampling, Steering(ops=tuple(ops)), capture, cancel, tuple(kind or ["plain"]))


async def run(engine: Any, request: Request, number: int) -> Generation | None:
    """Through the stream, as a client would; a cancellation comes after some tokens."""
    seen, name = 0, f"soak{number}"
    prompt = TokenPrompt(request.prompt)
    events = engine.stream(prompt, request.sampling, steer=request.steer, capture=request.capture, request_id=name)
    async for event in events:
        if isinstance(event, EndEvent):
            return event.generation
        seen += 1
        if request.cancel_after == seen:
            engine.cancel(name)
    return None


def check(reference: SyncEngine, request: Request, done: Generation, ledger: Ledger, limit: float) -> None:
    """Counts, labels and rows of one request against the transformers engine, fed the same text at once."""
    name, choice = done.request_id, done.choices[0]
    ledger.ends[choice.finish_reason] += 1
    ledger.kinds.update(request.kind)
    problem = _end_is_right(request, choice)
    if problem:
        ledger.wrong.append(f"{name}: {problem}")
    if request.capture is None and request.sampling.temperature == 0 and limit < 1e-3 and choice.token_ids:
        _text_is_right(reference, request, choice, ledger, name)  # these may have read the prefix cache
    if request.capture is None or choice.capture is None:
        return
    fed = [*request.prompt, *choice.token_ids[:-1]] if choice.token_ids else []
    rows = choice.capture.fetch()
    wanted, chosen = _expected(reference, request, fed)
    if rows.n != len(chosen):
        ledger.wrong.append(f"{name}: {rows.n} rows instead of {len(chosen)} ({request.kind})")
    elif len(chosen):
        for key, found in rows.items():
            truth = wanted[key]
            truth = (
                truth.mean(0) if request.capture.reduce == "mean" else truth[-1] if request.capture.reduce else truth
            )
            found = found.double().cpu().view(truth.shape)
            far = float(((found - truth).norm(dim=-1) / truth.norm(dim=-1)).max())
            ledger.worst = max(ledger.worst, far)
            if not far < limit:
                ledger.wrong.append(f"{name}: {key} is off by {far:.2g} ({request.kind})")
        ledger.rows += rows.n * len(rows)
    choice.capture.close()


def _text_is_right(reference: SyncEngine, request: Request, choice: Choice, ledger: Ledger, name: str) -> None:
    sampling = Sampling(max_tokens=request.sampling.max_tokens, ignore_eos=True)
    wanted = reference.generate(TokenPrompt(request.prompt), sampling, steer=request.steer).token_ids
    ledger.texts += 1
    if choice.token_ids != wanted[: len(choice.token_ids)]:
        ledger.wrong.append(f"{name}: another text than alone ({request.kind})")


def _end_is_right(request: Request, choice: Choice) -> str | None:
    ids, reason, sampling = choice.token_ids, choice.finish_reason, request.sampling
    if len(ids) > sampling.max_tokens:
        return f"{len(ids)} tokens, max_tokens {sampling.max_tokens}"
    ended = not sampling.ignore_eos and bool(ids) and ids[-1] in ENDS
    if not sampling.ignore_eos and any(token in ENDS for token in ids[:-1]):
        return "text goes on after EOS"
    right = {
        "stop": ended,
        "length": len(ids) == sampling.max_tokens,
        "stop_string": choice.stop_string in tuple(sampling.stop),
        "cancelled": request.cancel_after is not None,
    }[reason]
    return None if right else f"ended with {reason}"


def _expected(reference: SyncEngine, request: Request, fed: list[int]) -> tuple[dict, np.ndarray]:
    """All rows of the captured layers at the captured positions, selectors read against the real prompt."""
    from steerscope.specs.tokens import resolve

    assert request.capture is not None
    if not fed:
        return {}, np.zeros(0, dtype=np.int64)
    p, most = len(request.prompt), len(request.prompt) + request.sampling.max_tokens - 1

    def at(selector: str) -> list[int]:
        positions = resolve(selector, p, None, False, most)
        return [i for i in range(len(fed)) if i in positions]

    ops = []
    for op in request.steer.ops:
        if where := at(op.tokens):
            ops.append(op.model_copy(update={"tokens": f"positions={where}"}))
    plain = request.capture.model_copy(update={"tokens": "all", "reduce": None})
    done = reference.generate(
        TokenPrompt(fed), Sampling(max_tokens=1, ignore_eos=True), steer=Steering(ops=tuple(ops)), capture=plain
    )
    chosen = np.array(at(request.capture.tokens), dtype=np.int64)
    found = {key: tensor[torch.from_numpy(chosen)].double().cpu() for key, tensor in done.rows.items()}
    assert done.capture is not None
    done.capture.close()
    return found, chosen


async def soak(engine: Any, reference: SyncEngine, args: argparse.Namespace, ledger: Ledger) -> list[int]:
    rng = np.random.default_rng(args.seed)
    prefix = rng.integers(20, VOCAB, 64).tolist()
    began, sent, memory = time.perf_counter(), 0, []
    while sent < args.requests and time.perf_counter() - began < args.seconds:
        wave = [draw(rng, prefix) for _ in range(min(args.concurrent, args.requests - sent))]
        done = await asyncio.gather(
            *(run(engine, request, sent + i) for i, request in enumerate(wave)), return_exceptions=True
        )
        for request, found in zip(wave, done, strict=True):
            if isinstance(found, Generation):
                await asyncio.to_thread(check, reference, request, found, ledger, args.limit)
            else:
                ledger.wrong.append(f"{request.kind}: {type(found).__name__}: {found}")
        sent += len(wave)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    return [sent, *memory]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from steerscope.engines.vllm.engine import VLLMEngine

    dtype = getattr(torch, args.dtype)
    model, tokenizer = make_model(folder, dtype, args.device)
    reference = HFEngine(model, tokenizer, name="reference").sync
    options: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 256, "enforce_eager": args.eager}
    options |= {"max_num_seqs": args.concurrent, "max_num_batched_tokens": max(args.chunk, args.concurrent)}
    block = 16 if args.device == "cuda" else 32
    options |= {"enable_prefix_caching": True, "block_size": block, "num_gpu_blocks_override": args.cached // block}
    options |= {"kv_cache_memory_bytes": 64 << 20} | small_share(args.device)
    engine = VLLMEngine(folder, name="soak", capture_budget=256 << 20, **options)
    ledger = Ledger()
    began = time.perf_counter()
    sent, *memory = asyncio.run(soak(engine, reference, args, ledger))
    seconds = time.perf_counter() - began
    probe = engine.sync.generate(TokenPrompt([20, 21]), Sampling(max_tokens=2, ignore_eos=True))  # lets finishes arrive
    assert len(probe.token_ids) == 2
    stats = engine.stats()
    scheduler = engine._llm.vllm_config.scheduler_config
    left = {
        name: stats[name] for name in ("running", "waiting", "slots_in_use", "capture_bytes", "worker_slots_in_use")
    }
    left["shared_bytes"] = engine.room.regions.used
    engine.sync.close()
    reference.close()
    return {
        "sent": sent,
        "seconds": seconds,
        "async_scheduling": bool(getattr(scheduler, "async_scheduling", False)),
        "preempted": stats["worker_recomputed"],
        "ends": dict(ledger.ends),
        "kinds": dict(ledger.kinds),
        "rows": ledger.rows,
        "texts": ledger.texts,
        "worst_row": ledger.worst,
        "wrong": ledger.wrong,
        "left_over": left,
        "rss_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--concurrent", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=32, help="max_num_batched_tokens: prompts come in such pieces")
    parser.add_argument("--cached", type=int, default=768, help="tokens the KV cache holds: too few for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1e-4, help="relative L2 of a row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--graphs", dest="eager", action="store_false", help="compile, and capture graphs on CUDA")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    result: dict[str, Any] = {"vllm": vllm.__version__, "device": args.device, "dtype": args.dtype, "eager": args.eager}
    with tempfile.TemporaryDirectory() as scratch:
        result |= measure(args, Path(scratch) / "model")
    result["holds"] = not result["wrong"] and not any(result["left_over"].values())
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "rss_mib": result["rss_mib"][-1:], "wrong": result["wrong"][:5]}))  # noqa: T201


if __name__ == "__main__":
    main()
