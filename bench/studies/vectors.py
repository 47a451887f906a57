"""Do vectors from the shipped contrast sets do what they say? Measured on the embedded SmolLM2.

`python -m bench.studies.vectors --out bench/results/vector_study.json` makes each vector with `extract` from
the first pairs of a set, which also choose the layer and the scale, over folds. Everything else is measured on what had
no part in that: AUROC on held-out pairs; on test prompts the gap between +scale and −scale in the log-odds of opposite
next words, against that of random directions of the same length at the same layer (one-sided scores mislead: any push
moves them); the same at smaller scales; and what steering costs, as perplexity of plain texts.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from rich.console import Console

from bench.machine import commit, machine
from steerscope.demo.measures import last_rows, word_odds
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.settings import logits
from steerscope.engines.load import load
from steerscope.extraction import Examples, Extraction, extract, load_contrast_set
from steerscope.extraction.data import shipped_sets
from steerscope.specs import Add, Sampling
from steerscope.vectors.vector import SteeringVector

MODEL, RANDOM_DIRECTIONS = "smollm2-135m", 24
PARTS = (0.25, 0.5, 0.75, 1.0)  # of the recommended scale
DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def study(engine: HFEngine, name: str) -> dict[str, object]:
    """One set: quality from its sentences, effect and cost on the test prompts."""
    data, asked = load_contrast_set(name), DATA[name]
    pairs, heldout = Examples.of_pairs(data.extraction), Examples.of_pairs(data.heldout)
    found = extract(engine.sync, pairs, heldout=heldout, name=name)
    signed = [_push(found, sign * part) for part in PARTS for sign in (1, -1)]
    chance = [push for direction in _random(found) for push in (direction.add(1), direction.add(-1))]
    odds = word_odds(engine, asked["prompts"], asked["positive"], asked["negative"], [None, *signed, *chance])
    gaps, random = _gaps(odds[1 : 1 + len(signed)]), _gaps(odds[1 + len(signed) :])
    spread = math.sqrt(sum(gap * gap for gap in random) / len(random))  # about 0: a random sign means nothing
    plain, *costs = perplexities(engine, [None, *signed])
    return {
        "layer": found.layer,
        "scale": found.scale,
        "auroc": next(one.auroc for one in found.quality if one.layer == found.layer),
        "quality": [[one.layer, one.auroc, one.effect, one.halves, one.shuffled, one.random] for one in found.quality],
        "parts": PARTS,
        "gaps": gaps,
        "random_gaps": random,
        "z": gaps[-1] / spread,
        "perplexity": plain,
        "perplexity_ratio": [max(costs[i : i + 2]) / plain for i in range(0, len(costs), 2)],
        "answers": _answers(engine, found, asked["question"]),
    }


def _push(found: Extraction, part: float) -> Add:
    return found.vector.add(found.scale * part, layers=found.layer)


def _random(found: Extraction) -> list[SteeringVector]:
    """Directions of the length that the recommended scale adds, at the same layer."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(RANDOM_DIRECTIONS, found.vector.hidden, generator=generator)
    length = found.scale * float(found.vector[found.layer].norm())
    return [SteeringVector({found.layer: row * length / row.norm()}) for row in drawn]


def _gaps(odds: list[float]) -> list[float]:
    return [up - down for up, down in zip(odds[::2], odds[1::2], strict=True)]


def perplexities(engine: HFEngine, steer: list[Add | None]) -> list[float]:
    """Of the neutral texts under each steering, every token but the first."""
    texts = DATA["neutral"]
    ids = [torch.tensor(engine.tokenize(text).token_ids) for text in texts] * len(steer)
    nats = [
        torch.nn.functional.cross_entropy(logits(engine.model, rows)[:-1], wanted[1:], reduction="none")
        for rows, wanted in zip(last_rows(engine, texts, steer, "all"), ids, strict=True)
    ]
    return [math.exp(torch.cat(nats[i : i + len(texts)]).mean()) for i in range(0, len(nats), len(texts))]


def _answers(engine: HFEngine, found: Extraction, question: str) -> dict[str, object]:
    steers = {"plus": _push(found, 1), "none": None, "minus": _push(found, -1)}
    chat = [{"role": "user", "content": question}]
    done = engine.sync.chat([chat] * len(steers), Sampling(max_tokens=24), steer=list(steers.values()))
    texts = {name: " ".join(one.text.split()) for name, one in zip(steers, done, strict=True)}
    return {"question": question, **texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    console, result = Console(stderr=True), {"model": MODEL, "commit": commit(), "machine": machine(), "sets": {}}
    with load(MODEL, max_batch=64, progress=console.print) as engine:
        assert isinstance(engine.aio, HFEngine)
        for name in shipped_sets():
            result["sets"][name] = study(engine.aio, name)
            shown = {key: value for key, value in result["sets"][name].items() if key != "quality"}
            console.print_json(data={name: shown})
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
