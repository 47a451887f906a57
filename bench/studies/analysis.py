"""Weights of a SmolLM2 that was tuned on happy sentences, analysed end to end: did they change along that direction?

`python -m bench.studies.analysis --work DIR --out bench/results/analysis_study.json` makes vectors of the
shipped contrast sets, roles and traits with the untouched model, tunes a copy on the sixteen happy sentences, and runs
the analyses of `steerscope analyze` on the two checkpoints; the page is DIR/report/index.html. Beside it a planted
change: one matrix of the tuned copy moves along the hot direction, by a fifth of what it had changed.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.machine import commit, machine
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions, components, load_directions, project
from steerscope.analysis.report import analysis_page, by_side, extremes, strongest
from steerscope.analysis.results import load_results
from steerscope.analysis.susceptibility import susceptibility
from steerscope.engines.load import load
from steerscope.engines.sync import SyncEngine
from steerscope.extraction import load_contrast_set, sentences
from steerscope.extraction.data import shipped_sets
from steerscope.extraction.extract import sentence_rows
from steerscope.extraction.personas.definitions import load_personas, load_questions
from steerscope.extraction.reading import last, read_rows
from steerscope.models import resolve
from steerscope.vectors.files import save
from steerscope.vectors.vector import SteeringVector

MODEL, TRAIT = "smollm2-135m", "happy_sad"
STEPS, RATE = 12, 2e-5
SHUFFLES = 8  # of the labels of each set
PLANTED = {"layer": 17, "matrix": "mlp.down_proj", "direction": "hot_cold", "part": 0.2}


def make_vectors(engine: SyncEngine, folder: Path) -> None:
    """Contrast sets with their shuffled twins, roles against no role, traits against their opposites."""
    for name in shipped_sets():
        pairs = load_contrast_set(name).extraction
        rows = sentence_rows(engine, sentences(pairs)).double()
        gaps = rows[: len(pairs)] - rows[len(pairs) :]
        _keep(gaps.mean(0), folder / "contrast" / name)
        generator = torch.Generator().manual_seed(0)
        for i in range(SHUFFLES):  # sides of half of the pairs are exchanged: what pairs differ in, but for the label
            signs = torch.where(torch.randperm(len(pairs), generator=generator) < len(pairs) // 2, 1.0, -1.0)
            _keep((gaps * signs[:, None, None]).mean(0), folder / "shuffled" / f"{name}-{i}")
    question = load_questions()[0]
    for persona in (*load_personas("roles", ["all"]), *load_personas("traits", ["all"])):
        rows = _told(engine, [one.pos for one in persona.instructions], question)
        others = [one.neg for one in persona.instructions if one.neg is not None]
        _keep(rows - _told(engine, others or [None], question), folder / persona.kind / persona.name)


def _told(engine: SyncEngine, instructions: Sequence[str | None], question: str) -> torch.Tensor:
    """Mean over instructions of the rows where the answer would begin."""
    user = {"role": "user", "content": question}
    chats = [[{"role": "system", "content": text}, user] if text else [user] for text in instructions]
    return read_rows(engine, chats, last(3)).double().mean(0)


def _keep(rows: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    vector = SteeringVector(dict(enumerate(rows.float())), method="mean_difference")
    save(vector, path.with_suffix(".safetensors"))


def tune(base: Path, folder: Path, progress: Callable[[str], None], steps: int = STEPS) -> dict[str, object]:
    """A copy trained on the happy sentences of the set, all weights, and what that did to sentences it has not seen."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    data = load_contrast_set(TRAIT)
    happy = [pair.positive for pair in data.extraction]
    sides = {side: [getattr(pair, side) for pair in data.heldout] for side in ("positive", "negative")}
    tokenizer.padding_side, losses = "right", []
    before = {side: _perplexity(model, tokenizer, texts) for side, texts in sides.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(steps):
        loss = _loss(model, tokenizer, happy)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress(f"tuning, step {step + 1} of {steps}: loss {losses[-1]:.3f}")
    after = {side: _perplexity(model, tokenizer, texts) for side, texts in sides.items()}
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"steps": steps, "rate": RATE, "texts": len(happy), "losses": losses, "before": before, "after": after}


def _loss(model: PreTrainedModel, tokenizer, texts: Sequence[str]) -> torch.Tensor:  # noqa: ANN001 (any tokenizer)
    batch = tokenizer(list(texts), return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss


def _perplexity(model: PreTrainedModel, tokenizer, texts: Sequence[str]) -> float:  # noqa: ANN001
    with torch.no_grad():
        return math.exp(_loss(model, tokenizer, texts))


def plant(tuned: Path, folder: Path, base: Checkpoint, directions: Directions) -> None:
    """The tuned copy, one matrix of which changes a little more, along one direction."""
    layer, name = int(PLANTED["layer"]), f"{PLANTED['matrix']}.weight"
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.bfloat16)
    weight = model.model.layers[layer].get_parameter(name)
    change = float((weight.detach().float() - base.layer(layer)[name].float()).norm())
    direction = torch.from_numpy(directions.at(layer)[directions.names.index(PLANTED["direction"])])
    inputs = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    push = torch.outer(direction / direction.norm(), inputs / inputs.norm()) * float(PLANTED["part"]) * change
    with torch.no_grad():
        weight.copy_((weight.float() + push).to(weight.dtype))
    model.save_pretrained(folder)


class Study:
    def __init__(self, work: Path, console: Console) -> None:
        self.work, self.console = work, console
        self.seconds: dict[str, dict[str, float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Of the clock and of the processor: the machine may be busy with other things."""
        self.console.print(f"{name} …")
        clock, processor = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}

    def run(self) -> dict[str, object]:
        vectors, report, tuned = self.work / "vectors", self.work / "report", self.work / "tuned"
        with self.timed("vectors"), load(MODEL, max_batch=32) as engine:
            make_vectors(engine, vectors)
        with self.timed("tuning"):
            training = tune(Path(resolve(MODEL)), tuned, self.console.print)
        with self.timed("directions"):
            personas = load_directions([vectors / "roles", vectors / "traits"])
            found = components(personas)
            found.result().save(report)
            for name, vector in found.vectors().items():
                _keep(torch.stack([*vector.directions.values()]), report / "components" / name)
            contrast = load_directions([vectors / "contrast"])
            project(contrast, personas).save(report)
        pcs = [report / "components" / f"pc{k}.safetensors" for k in (1, 2)]
        directions, shuffled = load_directions([vectors / "contrast", *pcs]), load_directions([vectors / "shuffled"])
        base = Checkpoint(MODEL)
        with self.timed("susceptibility"):
            result = susceptibility(base, Checkpoint(tuned), directions, against=shuffled)
            result.save(report)
        with self.timed("report"):
            (report / "index.html").write_text(analysis_page(load_results(report)), encoding="utf-8")
        with self.timed("planted"):
            plant(tuned, self.work / "planted", base, contrast)
            second = susceptibility(base, Checkpoint(self.work / "planted"), directions, against=shuffled)
        return {
            "training": training,
            "components": extremes(found.result()),
            "sides": by_side(result),
            "cells": strongest(result),
            "peaks": result.tables["peaks"].to_pylist(),
            "planted": {**PLANTED, "cells": strongest(second), "peaks": second.tables["peaks"].to_pylist()},
            "seconds": self.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for vectors, checkpoints and the page")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    console = Console(stderr=True)
    result = {"model": MODEL, "commit": commit(), "machine": machine(), **Study(args.work, console).run()}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {args.out} and {args.work / 'report' / 'index.html'}")


if __name__ == "__main__":
    main()
