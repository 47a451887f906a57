"""Does learning find a better vector? The shipped set `nostalgic` on the embedded SmolLM2, as docs/learning.md tells.

`python -m bench.studies.learning --out bench/results/learning.json [--work DIR]` sweeps learning rates, and holds
the best vector against the mean difference of the same pairs at the same layer, the model told the best of the trait's
prompts, and the model alone. Learning rate, epoch, the mean difference's scale and the prompt are chosen on the
validation texts; perplexities are of the test texts, and scores of answers to the test questions, which have no part in
that. Then a run is killed and goes on. What is finished in DIR is not done again; each stage names its commit.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench.machine import commit, machine
from bench.studies.learning_judged import judged
from steerscope.analysis.statistics import least_paired_p, mean_interval, permutation
from steerscope.engines.load import load
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.runs import write_json
from steerscope.specs import Sampling
from steerscope.training.course import Course
from steerscope.training.passes import CachedStreams, Learnable
from steerscope.training.settings import TrainSettings
from steerscope.training.sweep import plan, sweep
from steerscope.training.texts import TrainingSample, load_training_set, samples
from steerscope.vectors.files import load as load_vector
from steerscope.vectors.files import save as save_vector
from steerscope.vectors.vector import SteeringVector

MODEL, DATA, LAYER, EPOCHS = "smollm2-135m", "nostalgic", 18, 3
RATES = (0.3, 1.0, 3.0)
STAGES = ("sweep", "average", "test", "judged", "resume")
PARTS = (0.25, 0.5, 1.0, 1.5, 2.0)  # of the scale that is recommended for the mean difference
QUESTIONS = ("What did you do this morning?", "How do you celebrate?")
_SMALL = ("--target-tokens", "200", "--val-tokens", "60", "--epochs", "2", "--batch", "4", "--layers", str(LAYER))


def stage(work: Path, name: str, do: Callable[[], dict[str, object]]) -> dict:
    """What a stage found, with its seconds; from its file where it is finished."""
    path = work / f"{name}.json"
    if not path.is_file():
        began, before = time.monotonic(), _processor()
        found = {**do(), "commit": commit()}
        write_json(path, {**found, "seconds": time.monotonic() - began, "processor_seconds": _processor() - before})
    return json.loads(path.read_text(encoding="utf-8"))


def _processor() -> float:
    import resource

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def swept(engine: Callable[[], SyncEngine], work: Path) -> dict[str, object]:
    """The learning rates; all runs have to end well."""
    settings = [TrainSettings(layers=(LAYER,), epochs=EPOCHS, learning_rate=rate) for rate in RATES]
    runs = plan(work, MODEL, [load_training_set(DATA)], settings)
    done = sweep(runs, lambda _: engine())
    best = min(done, key=lambda one: one.result.steered if one.result else math.inf)
    assert best.result is not None
    rows = [
        {"rate": one.run.settings.learning_rate, **one.result.model_dump()} for one in done if one.result is not None
    ]
    lines = (best.run.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    sizes = {name: (best.run.folder / name).stat().st_size for name in ("vector.safetensors", "checkpoint.safetensors")}
    return {
        "runs": rows,
        "failed": [one.error for one in done if one.result is None],
        "best_rate": best.run.settings.learning_rate,
        "vector": str((best.run.folder / "vector.safetensors").relative_to(work)),
        "prompt": best.result.prompt,
        "bytes": sizes,
        "lines": [json.loads(line) for line in lines],
    }


def averaged(engine: SyncEngine, work: Path) -> dict[str, object]:
    """The mean difference of the training pairs at the same layer, at its best scale on the validation texts."""
    course = Course(engine, load_training_set(DATA), TrainSettings(layers=(LAYER,)))
    vector = course.mean_difference((LAYER,), "resid_post")[LAYER]
    kept = course.passes.keep(course.validation, _added(vector))
    judged = {part: course.passes.nats(course.validation, _added(part * vector), kept) for part in PARTS}
    best = min(judged, key=judged.__getitem__)
    save_vector(SteeringVector({LAYER: best * vector}, method="mean_difference"), work / "averaged.safetensors")
    return {"part": best, "validation": {str(part): math.exp(nats) for part, nats in judged.items()}}


def tested(engine: SyncEngine, work: Path, found: dict) -> dict[str, object]:
    """The four ways on the test texts, text by text."""
    data, vector = load_training_set(DATA), load_vector(work / found["vector"])
    average = load_vector(work / "averaged.safetensors")
    course = Course(engine, data, TrainSettings(layers=(LAYER,)))
    texts, prompted = samples(course.hf, data.test), samples(course.hf, data.test, prompt=found["prompt"])
    kept = course.passes.keep(texts, _added(vector[LAYER]))
    ways = {
        "unsteered": _nats(course, texts, None, kept),
        "mean difference": _nats(course, texts, _added(average[LAYER]), kept),
        "prompted": _nats(course, prompted, None, None),
        "learned": _nats(course, texts, _added(vector[LAYER]), kept),
    }
    tokens = [len(text.targets) for text in texts]
    each = {name: [nats / n for nats, n in zip(way, tokens, strict=True)] for name, way in ways.items()}
    others = [name for name in ways if name != "learned"]
    differ = {name: [a - b for a, b in zip(each[name], each["learned"], strict=True)] for name in others}
    return {
        "texts": len(texts),
        "tokens": sum(tokens),
        "perplexity": {name: math.exp(sum(way) / sum(tokens)) for name, way in ways.items()},
        "learned_better_by": {name: _interval(values) for name, values in differ.items()},
        "p": {name: permutation(each[name], each["learned"], paired=True) for name in others},
        "least_p": {name: least_paired_p(each[name], each["learned"]) for name in others},
        "cosine": vector.cosine(average)[LAYER],
        "norms": {"learned": vector.norms()[LAYER], "mean difference": average.norms()[LAYER]},
        "answers": _answers(engine, work, found),
    }


def _added(vector: torch.Tensor) -> Learnable:
    return Learnable((LAYER,), "resid_post", {LAYER: vector}, len(vector))


def _nats(
    course: Course, texts: Sequence[TrainingSample], ops: Learnable | None, kept: CachedStreams | None
) -> list[float]:
    with torch.no_grad():
        return [float(course.passes.loss([text], ops, kept)) for text in texts]


def _interval(values: list[float]) -> list[float]:
    """Nats per token: the mean over texts, and its 95 % interval."""
    found = mean_interval(values)
    return [found.estimate, found.low, found.high]


def _answers(engine: SyncEngine, work: Path, found: dict) -> list[dict[str, str]]:
    vector = load_vector(work / found["vector"])
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    told = [[{"role": "system", "content": found["prompt"]}, *chat] for chat in chats]
    asked = Sampling(max_tokens=32)
    done = engine.chat([*chats, *told, *chats], asked, steer=[None] * 4 + [vector.add()] * 2)
    texts = [" ".join(one.text.split()) for one in done]
    return [
        {"question": question, "unsteered": texts[i], "prompted": texts[i + 2], "learned": texts[i + 4]}
        for i, question in enumerate(QUESTIONS)
    ]


def resumed(work: Path) -> dict[str, object]:
    """A small run as a command, and the same killed with SIGKILL in the middle and started again."""
    whole, cut = work / "whole", work / "cut"
    command = [sys.executable, "-m", "steerscope.cli.main", "train", "--model", MODEL, "--data", DATA, *_SMALL]
    subprocess.run([*command, "--out", str(whole)], check=True, capture_output=True)
    wanted = (whole / "train.jsonl").read_text(encoding="utf-8").splitlines()
    victim = subprocess.Popen([*command, "--out", str(cut)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(_lines(cut)) <= len(wanted) // 2:
        assert victim.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    at = len(_lines(cut))
    subprocess.run([*command, "--out", str(cut)], check=True, capture_output=True)
    same = {name: (whole / name).read_bytes() == (cut / name).read_bytes() for name in ("train.jsonl", "result.json")}
    vectors = [load_vector(folder / "vector.safetensors") for folder in (whole, cut)]
    same["vector.safetensors"] = vectors[0].equals(vectors[1])  # the order in a file's header is chance
    return {"steps": len(wanted) - 1, "killed_after": at - 1, "same": same}


def _lines(folder: Path) -> list[str]:
    path = folder / "train.jsonl"
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where runs are kept, to go on after a break; default: nowhere")
    args = parser.parse_args()
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
        return study(args.out, args.work)
    with tempfile.TemporaryDirectory() as scratch:
        return study(args.out, Path(scratch))


def study(out: Path, work: Path) -> None:
    console = Console(stderr=True)
    result: dict[str, object] = {"model": MODEL, "data": DATA, "layer": LAYER, "epochs": EPOCHS}
    result |= {"commit": commit(), "machine": machine()}
    found = stage(work, "sweep", lambda: swept(lambda: load(MODEL, progress=console.print), work))
    result["sweep"] = found
    with load(MODEL, progress=console.print) as engine:
        result["average"] = stage(work, "average", lambda: averaged(engine, work))
        result["test"] = stage(work, "test", lambda: tested(engine, work, found))
        learned, average = load_vector(work / found["vector"]), load_vector(work / "averaged.safetensors")
        result["judged"] = stage(work, "judged", lambda: judged(engine, work / "answers", DATA, learned, average))
    result["resume"] = stage(work, "resume", lambda: resumed(work))
    console.print_json(data={key: value for key, value in result.items() if key != "sweep"})
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
