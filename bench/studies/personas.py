"""Personas on the real model, from definitions to caps: `python -m bench.studies.personas --out FILE`.

Three roles and two traits in one run, timed; the same run again with resume, which must ask the model nothing and leave
every file as it was; every file read back by the loaders of persona files. Then the other shipped roles join the same
folder. Then, for each persona, how well the difference of means tells its answers to questions that had no part in it
from those of its opposite (a trait) or of the default (a role); and what caps on the axis do to the roles that lie
farthest from the default.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score

from bench.machine import commit, machine
from steerscope.engines.load import load
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.build import Answers, build, cap_layers, floor, gather, thresholds
from steerscope.extraction.personas.definitions import Persona, load_default, load_personas, load_questions, names
from steerscope.extraction.personas.judges import Judged, KeywordJudge
from steerscope.extraction.personas.run import Folder, PersonaRun, generate, load_run, rollouts
from steerscope.extraction.runs import RolloutSettings, conversation
from steerscope.specs import Sampling, Steering
from steerscope.vectors.files import load as load_vector
from steerscope.vectors.legacy import load_capping, load_persona
from steerscope.vectors.vector import SteeringVector

MODEL = "smollm2-135m"
ROLES, TRAITS, QUESTIONS = ("pirate", "nurse", "wizard"), ("cheerful", "formal"), 8


def asked(roles: Sequence[str]) -> PersonaRun:
    personas = (*load_personas("roles", roles), *load_personas("traits", TRAITS))
    return PersonaRun(
        personas=personas,
        default=load_default(),
        shared=tuple(load_questions()[:QUESTIONS]),
        rollouts=RolloutSettings(max_tokens=48),
    )


def hashes(out: Path) -> dict[str, str]:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def timed(engine: SyncEngine, run: PersonaRun, out: Path, *, resume: bool) -> dict[str, object]:
    requests, tokens = _work(engine)
    began, cpu = time.perf_counter(), time.process_time()
    _, failures = generate(engine, run, out, judge=KeywordJudge(), resume=resume)
    summary = build(out)
    seconds = time.perf_counter() - began
    now_requests, now_tokens = _work(engine)
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "requests": now_requests - requests,
        "tokens": now_tokens - tokens,
        "failures": len(failures),
        "summary": summary,
    }


def _work(engine: SyncEngine) -> tuple[int, int]:
    stats = engine.stats()
    return int(stats["finished"]), int(stats["tokens"])


def read_back(out: Path) -> dict[str, object]:
    """What the loaders of persona files and capping configs make of the folder."""
    found: dict[str, object] = {}
    for kind in ("roles", "traits"):
        for path in sorted((out / "vectors" / kind).glob("*.pt")):
            vector = load_persona(path)
            found[path.stem] = {"key": vector.provenance["key"], "layers": len(vector.directions)}
    caps = load_capping(out / "steering" / "capping_config.pt")
    return {"vectors": found, "experiments": {name: len(steering.ops) for name, steering in caps.items()}}


def heldout(answers: Answers, positive: str, negative: str) -> dict[str, float]:
    """Each question in turn is left out of the difference of means and then told apart by it, at the middle layer. The
    control has the labels of the other questions exchanged at random."""
    layer = answers.means.shape[1] // 2
    index = answers.select(positive, negative)
    rows = answers.means[torch.tensor(index), layer].double()
    truth = torch.tensor([answers.asked[i].label == positive for i in index])
    questions = torch.tensor([hash_of(answers.asked[i].question) for i in index])

    def auroc(labels: torch.Tensor) -> float:
        scores = torch.empty(len(rows), dtype=torch.float64)
        for question in questions.unique():
            rest, out = questions != question, questions == question
            pos, neg = rows[rest & labels].mean(0), rows[rest & ~labels].mean(0)
            direction = (pos - neg) / (pos - neg).norm()
            scores[out] = (rows[out] - (pos + neg) / 2) @ direction
        return float(roc_auc_score(truth.tolist(), scores.tolist()))

    generator = torch.Generator().manual_seed(0)
    control = [auroc(truth[torch.randperm(len(truth), generator=generator)]) for _ in range(100)]
    found = {"auroc": auroc(truth), "shuffled": statistics.mean(control), "shuffled_highest_of_100": max(control)}
    return {"layer": layer, "answers": len(rows), **{name: round(value, 4) for name, value in found.items()}}


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def measures(out: Path) -> dict[str, object]:
    run, folder, found = load_run(out), Folder(out), dict[str, object]()
    default = gather(run, folder, run.default)
    for persona in run.personas:
        answers = gather(run, folder, persona)
        if persona.kind == "traits":
            found[persona.name] = heldout(answers, "pos", "neg")
            continue
        both = Answers([*answers.asked, *default.asked], torch.cat([answers.means, default.means]), ())
        found[persona.name] = heldout(both, "pos", "default")
    return found


def caps(engine: SyncEngine, out: Path) -> dict[str, object]:
    """The three roles farthest from the default answer questions that were not asked before: as they are, held by caps
    of the axis, and held by caps of random directions at the same percentile of the default's projections."""
    run, summary = load_run(out), json.loads((out / "summary.json").read_text())["axis"]
    wild, questions = list(summary["projections"])[:3], load_questions()[QUESTIONS : 2 * QUESTIONS]
    axis = load_vector(out / "steering" / "axis.safetensors")
    rows = gather(run, Folder(out), run.default).means
    layers = cap_layers(None, engine.facts.layers)
    steers: dict[str, Steering | None] = {"none": None}
    for percentile in (25, 75):
        steers[f"axis p{percentile}"] = floor(axis, thresholds(axis.at(list(layers)), rows, percentile))
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        directions: dict[int | None, torch.Tensor] = {
            k: torch.randn(engine.facts.hidden, generator=generator) for k in layers
        }
        other = SteeringVector(directions).normalised()
        steers[f"random {seed} p75"] = floor(other, thresholds(other, rows, 75))
    found: dict[str, object] = {"roles": wild, "questions": len(questions), "layers": list(layers)}
    for name, steer in steers.items():
        found[name] = _played(engine, load_personas("roles", wild), questions, steer)
    return found


def _played(
    engine: SyncEngine, roles: Sequence[Persona], questions: Sequence[str], steer: Steering | None
) -> dict[str, float]:
    scores: list[float] = []
    for role in roles:
        asked = [one for one in rollouts(role, questions, MODEL) if one.prompt_index == 0]
        chats = [conversation(one.system, one.question, True) for one in asked]
        samplings = [Sampling(max_tokens=48, temperature=0.7, top_p=0.9, seed=i) for i in range(len(asked))]
        done = engine.chat(chats, samplings, steer=steer)
        judged = [Judged(one.question, answer.text) for one, answer in zip(asked, done, strict=True)]
        scores += [float(score) for score in KeywordJudge()(role, judged) if isinstance(score, int | float)]
    return {
        "mean_score": round(statistics.mean(scores), 3),
        "fully_played": sum(s == 3 for s in scores),
        "answers": len(scores),
    }


def first(engine: SyncEngine, out: Path) -> dict[str, object]:
    found = timed(engine, asked(ROLES), out, resume=False)
    before = hashes(out)
    again = timed(engine, asked(ROLES), out, resume=True)
    resumed = {"requests": again["requests"], "tokens": again["tokens"], "same_files": hashes(out) == before}
    return {**found, "resumed": resumed, "read_back": read_back(out)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="keep the run here; default: a temporary folder")
    parser.add_argument("--resume", action="store_true", help="only what the output lacks; needs the same --work")
    args = parser.parse_args()
    console = Console(stderr=True)
    result: dict[str, object] = {"model": MODEL, "machine": machine(), "questions": QUESTIONS}
    if args.resume:
        result = json.loads(args.out.read_text())
    with tempfile.TemporaryDirectory() as temporary, load(MODEL, progress=console.print) as engine:
        out = args.work or Path(temporary) / "run"
        stages = {
            "first": lambda: first(engine, out),
            "all_roles": lambda: timed(engine, asked(names("roles")), out, resume=True),
            "heldout": lambda: measures(out),
            "caps": lambda: caps(engine, out),
        }
        for name, stage in stages.items():
            if name not in result:
                result[name] = {"commit": commit(), **stage()}
                console.print_json(data=result[name])
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
