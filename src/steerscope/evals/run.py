"""Answers to the same questions under several conditions: unsteered, prompted, steered at many scales.

    OUT/run.json          what was asked, of which model
    OUT/vectors/          the vectors as they were added
    OUT/rollouts.jsonl    answers, added in whole batches: a killed run goes on where it stopped
    OUT/rollouts.parquet  the same as a table

Seeds follow from the question and the number of the answer, not from the condition: conditions are compared under the
same luck. A choice of two is not answered: the probabilities of its letters are read instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from steerscope.engines.plan import Prompt
from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.evals.items import Item
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Ledger, Record, digest, write_json
from steerscope.extraction.personas.rollouts import (
    Progress,
    RolloutSettings,
    ask_each,
    conversation,
    silent,
    takes_system,
)
from steerscope.extraction.personas.run import ModelFacts
from steerscope.files import atomic_path, reading
from steerscope.specs.base import Spec
from steerscope.specs.chat import Message
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, RequestFailed
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering
from steerscope.vectors.files import load as load_vector
from steerscope.vectors.files import save as save_vector
from steerscope.vectors.vector import SteeringVector

UNSTEERED, PROMPTED, OPPOSITE = "unsteered", "prompted", "opposite"


class Condition(Spec):
    """How a model is asked. Conditions of one `series` differ in where they are `at`, a scale or a percentile."""

    name: str
    steering: Steering = Steering()
    told: tuple[str, ...] = ()  # system messages, in turns over the answers to a question
    series: str | None = None
    at: float | None = None


class EvalRun(Spec):
    """What is asked: every question under every condition, `n` times.

    ```python
    from pathlib import Path

    import steerscope as ss
    from steerscope.evals.conditions import baselines, steered
    from steerscope.evals.items import load_items
    from steerscope.evals.report import write_report
    from steerscope.evals.run import EvalRun, generate
    from steerscope.evals.scorers import refusal, repetition
    from steerscope.evals.scoring import score

    vectors = {"happy": ss.load_vector("happy.safetensors").at(19)}
    conditions = (*baselines(None, "smollm2-135m"), *steered(vectors, [-1.7, 1.7]))
    asked = EvalRun(conditions=conditions, items=tuple(load_items("questions")[:2]))
    with ss.load("smollm2-135m") as model:
        run, _ = generate(model, asked, Path("evals"), vectors=vectors)
    score(Path("evals"), run, [refusal(), repetition()])
    print(write_report(Path("evals"))["score"])
    ```
    """

    conditions: tuple[Condition, ...] = Field(min_length=1)
    items: tuple[Item, ...] = Field(min_length=1)
    n: int = Field(default=1, ge=1)
    rollouts: RolloutSettings = RolloutSettings()
    persona: Persona | None = None
    vectors: dict[str, str] = Field(default_factory=dict)  # names of files, and a hash of each
    marks: dict[str, float] = Field(default_factory=dict)  # places on the axis of scales, with their meaning
    model: ModelFacts | None = None  # set by the run

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n > 1 and self.rollouts.temperature == 0:
            raise ValueError(f"{self.n} greedy answers are the same; give a temperature, or ask once")
        names = [one.name for one in self.conditions]
        if len(set(names)) < len(names):
            raise ValueError(f"conditions have the same name ({', '.join(names)}); rename the vectors")
        return self


@dataclass(frozen=True, slots=True)
class Rollout:
    id: str
    condition: Condition
    item: Item
    sample: int
    told: str


def wanted(run: EvalRun) -> list[Rollout]:
    """A choice is read once: there is nothing to sample."""
    found = []
    for condition in run.conditions:
        names = [op.vector for op in condition.steering.ops if isinstance(op.vector, str)]
        steering = digest(condition.steering.to_json(), [run.vectors.get(name) for name in names])
        for item in run.items:
            first = int(digest(item.question)[:8], 16)  # else all would begin with the same message
            for sample in range(1 if item.choices else run.n):
                own = condition.told[(first + sample) % len(condition.told)] if condition.told else ""
                told = "\n".join(filter(None, (own, item.system)))
                id = digest(steering, told, item.model_dump(), sample)
                found.append(Rollout(id, condition, item, sample, told))
    return found


def load_run(out: Path) -> EvalRun:
    path = out / "run.json"
    if not path.is_file():
        raise BadFile(f"{out} holds no answers: it has no run.json; make some with steerscope eval rollouts")
    with reading(path, "run of answers"):
        return EvalRun.from_json(path.read_bytes())


def load_vectors(out: Path, run: EvalRun) -> dict[str, SteeringVector]:
    return {name: load_vector(out / "vectors" / f"{name}.safetensors") for name in run.vectors}


def answers_of(out: Path, run: EvalRun) -> list[Record]:
    """All answers there are, in the order of the run. Conditions that ask the same share an answer; each has its own
    name on it."""
    records = Ledger(out / "rollouts.jsonl").records
    return [{**records[one.id], "condition": one.condition.name} for one in wanted(run) if one.id in records]


def generate(
    engine: SyncEngine,
    run: EvalRun,
    out: Path,
    *,
    vectors: dict[str, SteeringVector] | None = None,
    resume: bool = False,
    batch: int = 32,
    progress: Progress = silent,
) -> tuple[EvalRun, list[str]]:
    """Ask what is not answered yet; what failed is told and tried by the next."""
    run = _begin(engine, run, out, vectors or {}, resume)
    for name, vector in load_vectors(out, run).items():
        engine.register(name, vector)
    ledger, failures = Ledger(out / "rollouts.jsonl"), list[str]()
    everything = list({one.id: one for one in wanted(run)}.values())
    missing = [one for one in everything if one.id not in ledger.records]
    done = len(everything) - len(missing)
    progress("answers", done, len(everything))
    system = takes_system(engine)
    for start in range(0, len(missing), batch):
        part = missing[start : start + batch]
        reason = _answer(engine, run, part, system, ledger)
        failures += [reason] if reason else []
        done += len(part)
        progress("answers", done, len(everything))
    if failures and not ledger.records:
        raise RequestFailed(failures[0])
    _write_table(out, answers_of(out, run))
    return run, failures


def _answer(engine: SyncEngine, run: EvalRun, part: Sequence[Rollout], system: bool, ledger: Ledger) -> str | None:
    asked = [_asked(engine, run, one, system) for one in part]
    done, reason = ask_each(
        lambda a, b: engine.generate(
            [prompt for prompt, _, _ in asked[a:b]],
            [sampling for _, sampling, _ in asked[a:b]],
            steer=[one.condition.steering for one in part[a:b]],
        ),
        [one.item.question for one in part],
    )
    ledger.append(
        [
            _line(one, found, letters)
            for one, (_, _, letters), found in zip(part, asked, done, strict=True)
            if found and found.finish_reason != "cancelled"
        ]
    )
    return reason


def _asked(
    engine: SyncEngine, run: EvalRun, one: Rollout, system: bool
) -> tuple[Prompt, Sampling, tuple[int, int] | None]:
    chat = conversation(one.told, one.item.question, system)
    if one.item.choices is None:
        seed = int(digest(run.rollouts.seed, one.item.question, one.sample)[:12], 16)
        return engine.aio.render(chat), Sampling.parse({**run.rollouts.model_dump(), "seed": seed}), None
    prompt, letters = _letters(engine, chat, one.item.choices)
    return prompt, Sampling(max_tokens=1, logprobs=20), letters


def _letters(engine: SyncEngine, chat: list[Message], choices: tuple[str, str]) -> tuple[Prompt, tuple[int, int]]:
    """The prompt up to where two answers part, and the token of each there."""
    full = [
        engine.aio.render([*chat, Message(role="assistant", content=text)], continue_final_message=True).token_ids
        for text in choices
    ]
    same = next(i for i, (one, other) in enumerate(zip(*full, strict=False)) if one != other)
    return Prompt(list(full[0][:same])), (full[0][same], full[1][same])


def _line(one: Rollout, found: Generation, letters: tuple[int, int] | None) -> Record:
    record: dict[str, Any] = {
        "id": one.id,
        "condition": one.condition.name,
        "dataset": one.item.dataset,
        "question": one.item.question,
        "sample": one.sample,
        "system": one.told,
        "text": found.text,
        "token_ids": list(found.token_ids),
        "finish_reason": found.finish_reason,
    }
    if one.item.expected:
        record["expected"] = list(one.item.expected)
    if letters:
        top = dict(found.choices[0].logprobs[0].top)
        least = min(top.values())  # a letter that is not among the likeliest is at most as likely as the last of them
        record["logprobs"] = [top.get(letter, least) for letter in letters] if set(letters) & set(top) else None
    return record


def _write_table(out: Path, records: Sequence[Record]) -> None:
    names = ("id", "condition", "dataset", "question", "sample", "system", "text", "finish_reason")
    columns = {name: [record[name] for record in records] for name in names}
    columns["tokens"] = [len(record["token_ids"]) for record in records]
    with atomic_path(out / "rollouts.parquet") as temporary:
        pq.write_table(pa.table(columns), temporary)


def _begin(engine: SyncEngine, run: EvalRun, out: Path, vectors: dict[str, SteeringVector], resume: bool) -> EvalRun:
    """Check everything before the first answer, and say in the folder what it is going to hold."""
    hashes = {name: digest(vector.to_spec().model_dump_json()) for name, vector in vectors.items()}
    run = run.model_copy(update={"model": ModelFacts.of(engine), "vectors": hashes})
    problems = list(_unfit(engine, vectors))
    if (out / "run.json").is_file():
        before = load_run(out)
        if not resume:
            problems.append(Problem(str(out), "holds answers already", "go on with --resume, or choose another folder"))
        problems += _differences(before, run, out)
        run = _joined(before, run)
    if problems:
        raise InvalidRequest(problems)
    (out / "vectors").mkdir(parents=True, exist_ok=True)
    for name, vector in vectors.items():
        save_vector(vector, out / "vectors" / f"{name}.safetensors")
    write_json(out / "run.json", run.model_dump(mode="json"))
    return run


def _unfit(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> Iterator[Problem]:
    for name, vector in vectors.items():
        if vector.hidden != engine.facts.hidden:
            what = f"has {vector.hidden} numbers, {engine.facts.name} has {engine.facts.hidden}"
            yield Problem(name, what, "use a vector of this model")
        beyond = [layer for layer in vector.layers or () if layer >= engine.facts.layers]
        if beyond:
            yield Problem(name, f"has layers {beyond}", f"the model ends with layer {engine.facts.layers - 1}")


def _differences(before: EvalRun, run: EvalRun, out: Path) -> Iterator[Problem]:
    assert run.model is not None
    changed = [name for name in before.vectors.keys() & run.vectors.keys() if before.vectors[name] != run.vectors[name]]
    same = {
        f"model ({before.model})": before.model is None or before.model.same(run.model),
        f"sampling ({before.rollouts})": before.rollouts == run.rollouts,
        f"persona ({before.persona and before.persona.name})": before.persona == run.persona,
        f"vector under the name {', '.join(sorted(changed))}": not changed,
    }
    for what, fits in same.items():
        if not fits:
            yield Problem(
                str(out), f"its answers were given with another {what}", "keep to it, or choose another folder"
            )


def _joined(before: EvalRun, run: EvalRun) -> EvalRun:
    """A run only ever grows."""
    conditions = {one.name: one for one in (*before.conditions, *run.conditions)}
    items = {(one.dataset, one.system, one.question): one for one in (*before.items, *run.items)}
    update = {
        "conditions": tuple(conditions.values()),
        "items": tuple(items.values()),
        "n": max(before.n, run.n),
        "vectors": before.vectors | run.vectors,
        "marks": before.marks | run.marks,
    }
    return run.model_copy(update=update)
