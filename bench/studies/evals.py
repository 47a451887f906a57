"""Does judging work? Every part of evals on the embedded SmolLM2, and its statistics on simulated runs.

    python -m bench.studies.evals --out bench/results/eval_study.json [--caps CAPPING_CONFIG.pt] [--work DIR]

The trait is `cheerful`, its vector the mean difference of the shipped happy and sad sentences, beside a random
direction of the same length. The classifier is trained on the same sentences; others are trained on prompted answers to
the personas' questions, and on those to some wordings of the prompt, to be tested on another. The served model
itself is asked as a judge. Caps, where given, are measured on jailbreak prompts and on facts. Then 200 runs are
simulated in which nothing differs, and 200 each in which one condition does.
"""

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score

from bench.machine import commit, machine
from steerscope.engines.load import load
from steerscope.engines.sync import SyncEngine
from steerscope.evals import scorers as s
from steerscope.evals.classifier import Classifier, Embedder, Labelled, load_labelled
from steerscope.evals.conditions import baselines, caps, prepared, steered
from steerscope.evals.forced import ModelScorer
from steerscope.evals.items import load_items
from steerscope.evals.report import write_report
from steerscope.evals.run import (
    OPPOSITE,
    PROMPTED,
    UNSTEERED,
    Condition,
    EvalRun,
    answers_of,
    generate,
    load_run,
    load_vectors,
)
from steerscope.evals.scorers import JudgeScorer
from steerscope.evals.scoring import compare, score
from steerscope.extraction import Examples, extract, load_contrast_set
from steerscope.extraction.endpoint import Endpoint
from steerscope.extraction.personas.definitions import load_personas
from steerscope.extraction.runs import RolloutSettings
from steerscope.vectors.vector import SteeringVector

MODEL, TRAIT, PARTS = "smollm2-135m", "cheerful", (-1.0, -0.5, 0.5, 1.0)
SAMPLING = RolloutSettings(max_tokens=32)
ASKED, SIMULATED = 12, 200
RUBRIC = "Question: {question}\n\nAnswer: {answer}\n\nHow cheerful is the answer, from 0 to 100? Reply with one number."


def vectors(engine: SyncEngine) -> tuple[dict[str, SteeringVector], float]:
    """Both of length 1 at the layer that was found best, and the length that was recommended there."""
    data = load_contrast_set("happy_sad")
    found = extract(
        engine, Examples.of_pairs(data.extraction), heldout=Examples.of_pairs(data.heldout), name="happy_sad"
    )
    drawn = torch.randn(found.vector.hidden, generator=torch.Generator().manual_seed(0))
    both = {"happy": found.vector.at(found.layer), "random": SteeringVector({found.layer: drawn})}
    length = found.scale * float(found.vector[found.layer].norm())
    return prepared(both, normalize=True)[0], round(length, 1)


def held_in(engine: SyncEngine, out: Path) -> EvalRun:
    persona = load_personas("traits", [TRAIT])[0]
    run = EvalRun(
        conditions=tuple(baselines(persona, MODEL)),
        items=tuple(load_items("personas")),
        rollouts=SAMPLING,
        persona=persona,
    )
    return generate(engine, run, out, resume=True)[0]


def main_run(engine: SyncEngine, out: Path) -> EvalRun:
    persona = load_personas("traits", [TRAIT])[0]
    both, length = vectors(engine)
    scales = [round(part * length, 2) for part in PARTS]
    run = EvalRun(
        conditions=(*baselines(persona, MODEL), *steered(both, scales)),
        items=tuple(load_items("questions")[:ASKED]),
        rollouts=SAMPLING,
        persona=persona,
        marks={"recommended": length},
    )
    return generate(engine, run, out, vectors=both, resume=True)[0]


def other_wordings(held: Path, asked: Path) -> dict[str, Any]:
    """Trained on answers to all wordings of the prompt but one, tested on answers to that one, to other questions."""
    embed = Embedder()
    found = {}
    for index, one in enumerate(load_personas("traits", [TRAIT])[0].instructions):
        train = [row for row in _prompted(held) if row["system"] not in (one.pos, one.neg)]
        test = [row for row in _prompted(asked) if row["system"] in (one.pos, one.neg)]
        labels = [row["condition"] == PROMPTED for row in test]
        data = Labelled(
            tuple(row["text"] for row in train),
            tuple(row["condition"] == PROMPTED for row in train),
            tuple(row["question"] for row in train),
        )
        said = Classifier(data, embed).probabilities([row["text"] for row in test])
        auroc = float(roc_auc_score(labels, said)) if 0 < sum(labels) < len(labels) else None
        found[str(index)] = {"trained": len(train), "tested": len(test), "auroc": auroc}
    return found


def _prompted(out: Path) -> list[Mapping[str, Any]]:
    return [row for row in answers_of(out, load_run(out)) if row["condition"] in (PROMPTED, OPPOSITE)]


@contextlib.contextmanager
def served(engine: SyncEngine) -> Iterator[str]:
    """Our own server over the same engine."""
    from steerscope.serving.app import create_app
    from steerscope.serving.run import Server
    from steerscope.serving.settings import ServerSettings

    server = Server(create_app(engine.aio, ServerSettings(port=0)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and server.serving.ready):
        time.sleep(0.05)
    try:
        yield f"{server.address}/v1"
    finally:
        server.should_exit = True
        thread.join(60)


def scored(engine: SyncEngine, out: Path, run: EvalRun) -> None:
    assert run.persona is not None
    own = [s.keywords(run.persona), s.refusal(), s.repetition(), Classifier(load_labelled("happy_sad"))]
    score(out, run, [*own, ModelScorer(engine, load_vectors(out, run))])


def judged(url: str, out: Path, run: EvalRun) -> None:
    assert run.persona is not None
    rubric = run.persona.model_copy(update={"eval_prompt": RUBRIC})
    score(out, run, [JudgeScorer(Endpoint(url, MODEL), rubric)])


def capped(engine: SyncEngine, files: Sequence[str], out: Path) -> None:
    run = EvalRun(
        conditions=(Condition(name=UNSTEERED), *caps(files)),
        items=(*load_items("jailbreak"), *load_items("facts")),
        rollouts=SAMPLING,
    )
    run, _ = generate(engine, run, out, resume=True)
    score(out, run, [s.refusal(), s.correct(), s.repetition(), ModelScorer(engine, {})])


def _brief(summary: dict[str, Any]) -> dict[str, Any]:
    """Numbers rounded, and without what is the same for every run."""
    rows = [
        {key: round(value, 5) if isinstance(value, float) else value for key, value in one.items()}
        for one in summary["conditions"]
    ]
    return {"answers": summary["answers"], "scorers": summary["scorers"], "conditions": rows}


def simulated(effect: float, runs: int = SIMULATED, questions: int = ASKED, conditions: int = 4) -> dict[str, float]:
    """Scores of questions that differ from each other, answers that scatter, and one condition that is `effect`
    standard deviations of a question's mean away; the share of runs in which a difference is found."""
    random, first, any_ = np.random.default_rng(0), 0, 0
    names = [UNSTEERED, *(f"c{i}" for i in range(conditions))]
    run = EvalRun(conditions=tuple(Condition(name=name) for name in names), items=tuple(load_items("questions")[:1]))
    for _ in range(runs):
        level = random.normal(size=questions)
        rows = [
            {
                "condition": name,
                "dataset": "d",
                "question": str(question),
                "scores": {"x": level[question] + random.normal() + (effect if name == "c0" else 0.0)},
            }
            for name in names
            for question in range(questions)
        ]
        found = {one["condition"]: one["p_corrected"] < 0.05 for one in compare(rows, run, "x") if "p" in one}
        first += found["c0"]
        any_ += any(found.values())
    return {
        "effect": effect,
        "runs": runs,
        "found_in_the_planted_condition": first / runs,
        "found_anywhere": any_ / runs,
    }


def measure(work: Path, cap_files: Sequence[str], console: Console) -> None:
    """All that needs the model; what is there already is not done again."""
    held, asked = work / "held-in", work / "run"
    with load(MODEL, progress=console.print) as engine:
        held_in(engine, held)
        run = main_run(engine, asked)
        scored(engine, asked, run)
        if cap_files:
            capped(engine, cap_files, work / "caps")
        with served(engine) as url:
            judged(url, asked, run)


def gathered(work: Path) -> dict[str, Any]:
    """The result, from what lies in the folders."""
    found = {"evaluation": _brief(write_report(work / "run"))}
    if (work / "caps").is_dir():
        found["caps"] = _brief(write_report(work / "caps", "refusal"))
    found["prompted"] = Classifier(load_labelled(work / "held-in")).about()
    found["wordings"] = other_wordings(work / "held-in", work / "run")
    return {**found, "simulated": [simulated(effect) for effect in (0.0, 1.0, 2.0)]}


def caps_alone(work: Path, files: Sequence[str], out: Path, console: Console) -> dict[str, Any]:
    """What is known, with caps measured now."""
    with load(MODEL, progress=console.print) as engine:
        capped(engine, files, work / "caps")
    found = _brief(write_report(work / "caps", "refusal")) | {"commit": commit(), "machine": machine()}
    return json.loads(out.read_text(encoding="utf-8")) | {"caps": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="keep the runs here; what is there is not done again")
    parser.add_argument("--caps", nargs="*", default=[], help="capping configs of a persona run")
    parser.add_argument("--gather", action="store_true", help="only write down what --work holds")
    parser.add_argument(
        "--only-caps", action="store_true", help="measure these alone, and put them into what --out holds"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {"model": MODEL, "trait": TRAIT, "commit": commit(), "machine": machine()}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        if args.only_caps:
            result = caps_alone(work, args.caps, args.out, Console(stderr=True))
        else:
            if not args.gather:
                measure(work, args.caps, Console(stderr=True))
            result |= gathered(work)
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
