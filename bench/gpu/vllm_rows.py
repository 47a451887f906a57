"""Rows and steering of the vLLM engine against transformers, on real shapes with seeded weights of normal scale.

    python -m bench.gpu.vllm_rows --shape qwen2.5-3b --out rows.json [--eager]

One process, one configuration. Mixed requests run together in vLLM; then every text is fed once more, whole, to the
transformers engine with the same steering (teacher forcing), and each row is compared: with transformers in the same
dtype, and both with transformers in float32, which tells how much of a difference is rounding. The comparison itself
is put to the test: a shuffled layer map, a shift by one position, and the stream without what was added last must fail.
"""

import argparse
import copy
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.random_packs import small_share
from steerscope.bench.shapes import SHAPES, NoTokenizer, load_model
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.models import DEFAULT_MODEL
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering

COSINE = 0.999  # of every row with transformers' in the same dtype
FLOOR = {"cuda": 4e-3, "cpu": 1e-4}  # relative L2 that any row may be off: float32 on CUDA means TF32 in attention
MEAN = 1e-5  # relative L2 that a mean may be off
ROUNDING = 1.5  # largest distance of a row from float32, beside the worst of transformers in the same dtype


def requests(facts: Any, count: int, rng: np.random.Generator) -> tuple[list, list[Sampling], list[Steering], Capture]:
    """Different prompts, lengths and steerings; selectors that mean the same when the text is fed as one prompt."""
    prompts, samplings, steers = [], [], []
    for i in range(count):
        prompts.append(TokenPrompt(rng.integers(2, min(facts.vocab, 30000), int(rng.integers(3, 90))).tolist()))
        samplings.append(Sampling(max_tokens=int(rng.integers(2, 24)), ignore_eos=True))
        vector = rng.standard_normal(facts.hidden).astype(np.float32)
        layer = int(rng.integers(0, facts.layers))
        ops = (
            Add(vector=vector, scale=0.1, layers=layer),
            Cap(vector=vector, min=-0.5, max=0.5, layers="all"),
            Ablate(vector=vector, layers=layer, tokens="positions=[0:4]"),
            Add(vector=-vector, scale=0.05, layers="all"),
        )
        steers.append(Steering.of(*(ops[j] for j in range(4) if (i >> j) & 1)))
    return prompts, samplings, steers, Capture()


def differences(rows: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """The worst row: relative L2, and cosine."""
    a, b = rows.double().cpu(), wanted.double().cpu()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()), float(torch.cosine_similarity(a, b, dim=-1).min())


def spread(distances: torch.Tensor) -> dict[str, float]:
    marks = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: float(np.quantile(distances.numpy(), mark)) for name, mark in marks.items()}


def forced(engine: SyncEngine, done: Generation, steer: Steering, capture: Capture, tf32: bool = False) -> Generation:
    """The same text as one prompt."""
    fed = [*done.prompt_token_ids, *done.token_ids[:-1]]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return engine.generate(TokenPrompt(fed), Sampling(max_tokens=1, ignore_eos=True), steer=steer, capture=capture)


def negative_controls(found: Generation, addends: Generation, wanted: Generation, layers: int) -> dict[str, float]:
    """How far off the classic mistakes are: they must be outside the limit, or the comparison proves nothing."""
    pairs = [(layer, (layer + 1) % layers) for layer in range(layers)]
    post = {layer: found.rows[layer].double() for layer in range(layers)}
    return {
        "shuffled_layers": min(differences(post[a], wanted.rows[b])[0] for a, b in pairs),
        "shifted_positions": min(differences(post[a][1:], wanted.rows[a][:-1])[0] for a in range(layers)),
        "residual_without_delta": min(
            differences(post[a] - addends.rows[a, "mlp_out"].double(), wanted.rows[a])[0] for a in range(layers)
        ),
    }


def start_vllm(folder: Path, args: argparse.Namespace) -> SyncEngine:
    from steerscope.engines.vllm.client.engine import VLLMEngine

    options: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 1024, "enforce_eager": args.eager}
    options |= {"max_num_seqs": 64, "max_num_batched_tokens": args.tokens, "skip_tokenizer_init": True}
    if args.utilisation:
        options["gpu_memory_utilization"] = args.utilisation
    else:  # so little that several cells can share a GPU
        options |= {"kv_cache_memory_bytes": 256 << 20} | small_share(args.device)
    return VLLMEngine(folder, tokenizer=NoTokenizer(), capture_budget=4 << 30, **options).sync


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    model = load_model(args.shape, args.device, dtype)
    model.save_pretrained(folder)
    model.to(args.reference)
    exact = copy.deepcopy(model).float()
    reference, truth = (
        HFEngine(one, NoTokenizer(), name="reference", capture_budget=8 << 30).sync  # type: ignore[arg-type]
        for one in (model, exact)
    )
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    engine = start_vllm(folder, args)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "taps": engine.aio.describe()}  # type: ignore[attr-defined]
    prompts, samplings, steers, capture = requests(engine.facts, args.requests, rng)
    together = engine.generate(prompts, samplings, steer=steers, capture=capture)
    compared: dict[str, list[torch.Tensor]] = {name: [] for name in ("same_dtype", "float32", "transformers_float32")}
    cosine = 1.0
    for done, steer in zip(together, steers, strict=True):
        assert done.rows.n == len(done.prompt_token_ids) + len(done.token_ids) - 1
        wanted = forced(reference, done, steer, capture, tf32=True)  # vLLM's attention takes float32 as TF32
        best = forced(truth, done, steer, capture)
        for layer in range(engine.facts.layers):
            mine, theirs, precise = (one.rows[layer].double().cpu() for one in (done, wanted, best))
            for name, (a, b) in zip(compared, ((mine, theirs), (mine, precise), (theirs, precise)), strict=True):
                compared[name].append((a - b).norm(dim=-1) / b.norm(dim=-1))
            cosine = min(cosine, float(torch.cosine_similarity(mine, theirs, dim=-1).min()))
    result["relative_l2"] = {name: spread(torch.cat(parts)) for name, parts in compared.items()}
    result["rows"], result["cosine"] = sum(map(len, compared["float32"])), cosine
    plain = next(i for i, steer in enumerate(steers) if not steer.ops)
    wanted, addends = (forced(reference, together[plain], Steering(), c) for c in (capture, Capture(sites="mlp_out")))
    result["mistakes_would_be"] = negative_controls(together[plain], addends, wanted, engine.facts.layers)
    result["alone"] = alone(engine, prompts, samplings, steers, capture, together)
    result["reduced"] = reduced(engine, prompts, samplings, steers, together)
    result["long_means"] = long_means(engine, rng)
    result["stats"] = engine.stats()
    if args.rows_out:
        few = {
            f"{i}.{layer}": together[i].rows[layer].float().cpu()
            for i in range(4)
            for layer in range(engine.facts.layers)[:8]
        }
        torch.save({"rows": few, "tokens": [done.token_ids for done in together]}, args.rows_out)
    if args.rows_like:
        result["like_earlier"] = like_earlier(torch.load(args.rows_like, weights_only=True), together)
    engine.close()
    reference.close()
    truth.close()
    return result


def alone(
    engine: SyncEngine, prompts: list, samplings: list, steers: list, capture: Capture, together: list
) -> dict[str, float]:
    """The same requests one by one, as far as their tokens agree."""
    far, same = 0.0, 0
    for i in range(8):
        one = engine.generate(prompts[i], samplings[i], steer=steers[i], capture=capture)
        pairs = zip(one.token_ids, together[i].token_ids, strict=True)
        common = next((j for j, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
        same += common == len(one.token_ids)
        upto = len(one.prompt_token_ids) + common - 1
        for layer in range(engine.facts.layers):
            far = max(far, differences(one.rows[layer][:upto], together[i].rows[layer][:upto])[0])
    return {"requests": 8, "same_tokens": same, "relative_l2": far}


def reduced(engine: SyncEngine, prompts: list, samplings: list, steers: list, together: list) -> dict[str, float]:
    """Means made on the device against the mean of the rows, where the tokens are the same."""
    done = engine.generate(prompts, samplings, steer=steers, capture=Capture(reduce="mean"))
    far, compared = 0.0, 0
    for mean, full in zip(done, together, strict=True):
        if mean.token_ids == full.token_ids:
            compared += 1
            for layer in range(engine.facts.layers):
                wanted = full.rows[layer].double().mean(0)
                far = max(far, float((mean.rows[layer].double().view(-1) - wanted).norm() / wanted.norm()))
    return {"compared": compared, "relative_l2": far}


def long_means(engine: SyncEngine, rng: np.random.Generator) -> dict[str, float]:
    """The same of long prompts, more than one step takes, none of which is steered: taps sum their rows."""
    sizes = [700, 64, 130, 512, 333, 90, 620, 3]
    prompts = [TokenPrompt(rng.integers(2, min(engine.facts.vocab, 30000), size).tolist()) for size in sizes]
    samplings, nobody = [Sampling(max_tokens=5 + i, ignore_eos=True) for i in range(len(sizes))], [Steering()] * 8
    together = engine.generate(prompts, samplings, capture=Capture())
    found = reduced(engine, prompts, samplings, nobody, together)
    for one in together:
        assert one.capture is not None
        one.capture.close()
    return found


def like_earlier(earlier: dict[str, Any], together: list) -> dict[str, float]:
    same = sum(a == b.token_ids for a, b in zip(earlier["tokens"], together, strict=True))
    far = 0.0
    for name, rows in earlier["rows"].items():
        i, layer = map(int, name.split("."))
        prompt = len(together[i].prompt_token_ids)
        far = max(far, differences(together[i].rows[layer][:prompt].float(), rows[:prompt])[0])
    return {"same_tokens": same, "requests": len(together), "prompt_rows_relative_l2": far}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=[*SHAPES, DEFAULT_MODEL], default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reference", default=None, help="the references' device, where vLLM needs the other's memory")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--utilisation", type=float, help="of the GPU's memory; a small KV cache unless given")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rows-out", type=Path, help="keep some rows for another run to compare")
    parser.add_argument("--rows-like", type=Path, help="rows kept by another run")
    args = parser.parse_args()
    args.reference = args.reference or args.device
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    result: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "shape": args.shape}
    result |= {"dtype": args.dtype, "eager": args.eager, "tokens_per_step": args.tokens, "requests": args.requests}
    result["device"] = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    with tempfile.TemporaryDirectory() as scratch:
        result |= measure(args, Path(scratch) / "model")
    far = {name: found["worst"] for name, found in result["relative_l2"].items()}
    limit = max(ROUNDING * far["transformers_float32"], FLOOR[args.device])
    result["holds"] = far["float32"] <= limit and result["cosine"] >= COSINE
    result["holds"] &= min(result["mistakes_would_be"].values()) > 2 * limit
    result["holds"] &= max(result[name]["relative_l2"] for name in ("reduced", "long_means")) <= MEAN
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("taps",)}))  # noqa: T201
    gc.collect()


if __name__ == "__main__":
    main()
