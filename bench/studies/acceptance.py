"""The claims about real models, measured again: `make acceptance` writes what README and docs then quote.

On the embedded SmolLM2: rows against transformers' own hidden states, a mixed batch against the same requests alone,
scale 0 against no steering, and the demo's steering effect against random directions.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from bench.machine import commit, machine
from steerscope.demo.run import measure
from steerscope.engines.hf import HFEngine
from steerscope.engines.load import load
from steerscope.engines.sync import SyncEngine
from steerscope.extraction import load_contrast_set, mean_difference, sentences
from steerscope.progress import ProgressBars
from steerscope.specs import Add, Capture, Sampling, Steering

MODEL = "smollm2-135m"


def parity(engine: SyncEngine, prompts: list[str], tokens: int) -> dict[str, float]:
    """Captured rows against the `hidden_states` of transformers' own `generate`, worst row by relative L2.

    Beside it one plain forward over the same tokens, which adds in another order, and the same forward in float64,
    which tells how far float32 itself is off: no difference below that means anything.
    """
    hf = engine.aio
    assert isinstance(hf, HFEngine)
    precise = copy.deepcopy(hf.model).double()
    norm = hf.model.get_submodule("model.norm")
    last = engine.facts.layers - 1
    worst = {"worst_row": 0.0, "worst_row_against_one_forward": 0.0, "float32_against_float64": 0.0}
    rows, neighbours = 0, []
    for prompt in prompts:
        one = engine.generate(prompt, Sampling(max_tokens=tokens, ignore_eos=True), capture=Capture())
        fed = torch.tensor([[*one.prompt_token_ids, *one.token_ids[:-1]]])
        assert one.rows.n == fed.shape[1]
        with torch.no_grad():
            stepped = _stepped(hf, one.prompt_token_ids, one.token_ids)
            plain = hf.model(fed, output_hidden_states=True).hidden_states
            exact = precise(fed, output_hidden_states=True).hidden_states
            final = norm(one.rows[last].unsqueeze(0))
        for layer in range(last + 1):
            mine = final[0] if layer == last else one.rows[layer]
            pairs = (mine, stepped[layer]), (mine, plain[layer + 1][0]), (plain[layer + 1][0], exact[layer + 1][0])
            for name, (found, wanted) in zip(worst, pairs, strict=True):
                worst[name] = max(worst[name], _difference(found, wanted))
        neighbours += [_difference(one.rows[layer], one.rows[layer + 1]) for layer in range(last)]
        rows += one.rows.n * (last + 1)
    return {"rows": rows, **worst, "neighbouring_layers_differ_by": min(neighbours)}


def _stepped(hf: HFEngine, prompt: list[int], tokens: list[int]) -> list[torch.Tensor]:
    """Per layer the rows that `generate` reports, prompt and steps in one."""
    ids = torch.tensor([prompt])
    done = hf.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(tokens),
        do_sample=False,
        eos_token_id=None,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    assert done.sequences[0, len(prompt) :].tolist() == tokens, "the engines disagree on the text"
    return [torch.cat([step[layer + 1][0] for step in done.hidden_states]) for layer in range(hf.facts.layers)]


def _difference(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest relative L2 distance of any row."""
    return float(((rows.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)).max())


def mixed_batch(engine: SyncEngine, prompts: list[str]) -> dict[str, float]:
    """Sixteen different requests together and alone: tokens, and rows as far as the tokens are the same."""
    data = load_contrast_set()
    vector = mean_difference(engine, data.extraction).normalised()
    samplings = [Sampling(max_tokens=8 + i, temperature=0.8 * (i % 2), seed=i) for i in range(16)]
    steers = [
        Steering.of(
            *([vector.add(20.0 * (-1) ** i, layers="10-14")] if i % 4 else []),
            *([vector.ablate(layers=20)] if i % 3 == 0 else []),
            *([vector.cap(max=5.0, layers="15-18", tokens="generated")] if i % 5 == 0 else []),
        )
        for i in range(16)
    ]
    texts = [prompts[i % len(prompts)] for i in range(16)]
    together = engine.generate(texts, samplings, steer=steers, capture=Capture(layers="4,14,29"))
    worst, same = 0.0, 0
    for i, done in enumerate(together):
        alone = engine.generate(texts[i], samplings[i], steer=steers[i], capture=Capture(layers="4,14,29"))
        same += alone.token_ids == done.token_ids
        common = len(done.prompt_token_ids) + _common(alone.token_ids, done.token_ids) - 1
        for key, rows in done.rows.items():
            other = alone.rows[key]
            worst = max(worst, _difference(rows[:common], other[:common]))
    return {"requests": 16, "same_tokens": same, "worst_row": worst}


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def scale_zero(engine: SyncEngine, prompts: list[str]) -> dict[str, int]:
    """Steering with scale 0 must not change a byte."""
    direction = torch.randn(engine.facts.hidden, generator=torch.Generator().manual_seed(0))
    nothing = Add(vector=direction, scale=0.0, layers="all")
    sampling = Sampling(max_tokens=24, temperature=0.7, seed=5)
    plain, zero = (engine.generate(prompts, sampling, steer=steer) for steer in (None, nothing))
    return {"texts": len(prompts), "identical": sum(a.text == b.text for a, b in zip(plain, zero, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    console = Console(stderr=True)
    data = load_contrast_set()
    prompts = sentences(data.heldout)
    load(MODEL, progress=console.print).close()  # converted once, not timed
    starts = []
    for _ in range(3):
        began = time.perf_counter()
        load(MODEL).close()
        starts.append(time.perf_counter() - began)
    result: dict[str, object] = {"model": MODEL, "commit": commit(), "machine": machine()}
    result["load_seconds"] = statistics.median(starts)
    with load(MODEL, max_batch=16) as engine:
        for name, run in {
            "parity": lambda: parity(engine, prompts[:8], 12),
            "mixed_batch": lambda: mixed_batch(engine, prompts),
            "scale_zero": lambda: scale_zero(engine, prompts),
        }.items():
            console.print(f"{name} …")
            result[name] = run()
            console.print_json(data=result[name])
    console.print("demo …")
    with ProgressBars() as bars, tempfile.TemporaryDirectory() as folder:
        demo = measure(MODEL, bars, Path(folder) / "lenses")
    result["demo"] = {
        "seconds": demo.seconds,
        "heldout_auroc": demo.heldout_auroc,
        "log_odds_gap": demo.control.gap,
        "random_gaps": demo.control.random_gaps,
        "z": demo.control.z,
    }
    console.print_json(data=result["demo"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
