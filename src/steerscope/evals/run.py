"""Answers to the same questions under several conditions: unsteered, prompted, steered at many scales.

    OUT/run.json          settings and model
    OUT/vectors/          the vectors as they were added
    OUT/rollouts.jsonl    answers, appended in batches

Seeds depend on the question and the number of the answer and not on the condition, so conditions are compared under
the same luck. A choice of two is not answered: the probabilities of its letters are read instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from steerscope.engines.plan import Prompt
from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.evals.items import Item
from steerscope.extraction import runs
from steerscope.extraction.personas.definitions import Persona
from steerscope.files import lock_folder
from steerscope.specs import Message, Problem, Sampling, Steering
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile, RequestFailed
from steerscope.vectors.files import load as load_vector
from steerscope.vectors.files import save as save_vector
from steerscope.vectors.vector import SteeringVector

UNSTEERED = "unsteered"
PROMPTED = "prompted"
OPPOSITE = "opposite"
Vectors = dict[str, SteeringVector]


class Condition(Spec):
    """How a model is asked. Conditions of one `series` differ in where they are `at`, a scale or a percentile."""

    name: str
    steering: Steering = Steering()
    told: tuple[str, ...] = ()  # system messages, alternating over the answers to a question
    series: str | None = None
    at: float | None = None


class EvalRun(runs.AnswerRun):
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
    persona: Persona | None = None
    vectors: dict[str, str] = Field(default_factory=dict)  # names of files, and a hash of each
    marks: dict[str, float] = Field(default_factory=dict)  # places on the axis of scales, with their meaning

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n > 1 and self.rollouts.temperature == 0:
            raise ValueError(f"{self.n} greedy answers are the same; give a temperature, or ask once")
        names = [one.name for one in self.conditions]
        if len(set(names)) < len(names):
            raise ValueError(f"conditions have the same name ({', '.join(names)}); rename the vectors")
        return self

    def changes(self, before: Any) -> list[str]:
        found = super().changes(before)
        if before.persona != self.persona:
            found.append(f"persona ({before.persona and before.persona.name})")
        shared = before.vectors.keys() & self.vectors.keys()
        changed = sorted(name for name in shared if before.vectors[name] != self.vectors[name])
        if changed:
            found.append(f"vector under the name {', '.join(changed)}")
        return found

    def joined(self, before: Any) -> Self:
        conditions = {one.name: one for one in (*before.conditions, *self.conditions)}
        items = {(one.dataset, one.system, one.question): one for one in (*before.items, *self.items)}
        update = {
            "conditions": tuple(conditions.values()),
            "items": tuple(items.values()),
            "n": max(before.n, self.n),
            "vectors": before.vectors | self.vectors,
            "marks": before.marks | self.marks,
        }
        return self.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class EvalRollout:
    id: str
    condition: Condition
    item: Item
    sample: int
    system: str

    @property
    def question(self) -> str:
        return self.item.question


def wanted(run: EvalRun) -> list[EvalRollout]:
    """All rollouts of a run. A choice is read once, because nothing is sampled."""
    found = []
    for condition in run.conditions:
        names = [op.vector for op in condition.steering.ops if isinstance(op.vector, str)]
        steering = runs.digest(condition.steering.to_json(), [run.vectors.get(name) for name in names])
        for item in run.items:
            first = int(runs.digest(item.question)[:8], 16)  # questions begin with different messages
            for sample in range(1 if item.choices else run.n):
                own = condition.told[(first + sample) % len(condition.told)] if condition.told else ""
                system = "\n".join(filter(None, (own, item.system)))
                id = runs.digest(steering, system, item.model_dump(), sample)
                found.append(EvalRollout(id, condition, item, sample, system))
    return found


def load_run(out: Path) -> EvalRun:
    run = EvalRun.load(out)
    if run is None:
        raise BadFile(f"{out} holds no answers: it has no run.json; make some with steerscope eval rollouts")
    return run


def load_vectors(out: Path, run: EvalRun) -> Vectors:
    return {name: load_vector(out / "vectors" / f"{name}.safetensors") for name in run.vectors}


def answers_of(out: Path, run: EvalRun) -> list[runs.Record]:
    """Return all answers in the order of the run, each under the name of its condition. Conditions that ask the same
    share an answer."""
    records = runs.Ledger(out / "rollouts.jsonl").records
    return [{**records[one.id], "condition": one.condition.name} for one in wanted(run) if one.id in records]


def generate(
    engine: SyncEngine,
    run: EvalRun,
    out: Path,
    *,
    vectors: Vectors | None = None,
    resume: bool = False,
    batch: int = 32,
    progress: runs.Progress = runs.no_progress,
) -> tuple[EvalRun, list[str]]:
    """Make the missing answers; return the run and what failed, which the next run tries again."""
    vectors = vectors or {}
    hashes = {name: runs.digest(vector.to_spec().model_dump_json()) for name, vector in vectors.items()}
    run = run.model_copy(update={"model": runs.ModelFacts.of(engine), "vectors": hashes})
    run = run.begin(out, resume, list(_unfit(engine, vectors)))
    with lock_folder(out):
        (out / "vectors").mkdir(exist_ok=True)
        for name, vector in vectors.items():
            save_vector(vector, out / "vectors" / f"{name}.safetensors")
        run.save(out)
        for name, vector in load_vectors(out, run).items():
            engine.register(name, vector)
        failures = _answer(engine, run, out, batch, progress)
    return run, failures


def _answer(engine: SyncEngine, run: EvalRun, out: Path, batch: int, progress: runs.Progress) -> list[str]:
    ledger = runs.Ledger(out / "rollouts.jsonl")
    failures = list[str]()
    with_system = runs.takes_system(engine)
    letters: dict[str, tuple[int, int] | None] = {}  # of the rollouts that were asked

    def generate(part: Sequence[EvalRollout]) -> Sequence[Generation]:
        asked = [_request(engine, run, one, with_system) for one in part]
        letters.update((one.id, tokens) for one, (_, _, tokens) in zip(part, asked, strict=True))
        prompts = [prompt for prompt, _, _ in asked]
        return engine.generate(
            prompts, [sampling for _, sampling, _ in asked], steer=[one.condition.steering for one in part]
        )

    def records_of(part: Sequence[EvalRollout], done: Sequence[Generation | None]) -> list[runs.Record]:
        return [_record(one, found, letters[one.id]) for one, found in zip(part, done, strict=True) if found]

    items = {one.id: one for one in wanted(run)}
    n_done = 0
    for n in runs.answer_missing(items, ledger, batch, generate, records_of, failures):
        n_done += n
        progress("answers", n_done, len(items))
    if failures and not ledger.records:
        raise RequestFailed(failures[0])
    return failures


def _request(
    engine: SyncEngine, run: EvalRun, one: EvalRollout, with_system: bool
) -> tuple[Prompt, Sampling, tuple[int, int] | None]:
    """Return a prompt, its sampling, and the tokens of the letters of a choice."""
    chat = runs.conversation(one.system, one.item.question, with_system)
    if one.item.choices is None:
        return engine.aio.render(chat), run.rollouts.sampling(one.item.question, one.sample), None
    prompt, letters = _letters(engine, chat, one.item.choices)
    return prompt, Sampling(max_tokens=1, logprobs=20), letters


def _letters(engine: SyncEngine, chat: list[Message], choices: tuple[str, str]) -> tuple[Prompt, tuple[int, int]]:
    """Return the prompt up to the first token that differs between two answers, and that token of each."""
    full = [
        engine.aio.render([*chat, Message(role="assistant", content=text)], continue_final_message=True).token_ids
        for text in choices
    ]
    same = next(i for i, (one, other) in enumerate(zip(*full, strict=False)) if one != other)
    return Prompt(list(full[0][:same])), (full[0][same], full[1][same])


def _record(one: EvalRollout, found: Generation, letters: tuple[int, int] | None) -> runs.Record:
    record: dict[str, Any] = {
        "id": one.id,
        "condition": one.condition.name,
        "dataset": one.item.dataset,
        "question": one.item.question,
        "sample": one.sample,
        "system": one.system,
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


def _unfit(engine: SyncEngine, vectors: Vectors) -> Iterator[Problem]:
    for name, vector in vectors.items():
        if vector.hidden != engine.facts.hidden:
            what = f"has {vector.hidden} numbers, {engine.facts.name} has {engine.facts.hidden}"
            yield Problem(name, what, "use a vector of this model")
        beyond = [layer for layer in vector.layers or () if layer >= engine.facts.layers]
        if beyond:
            yield Problem(name, f"has layers {beyond}", f"the model ends with layer {engine.facts.layers - 1}")
