"""A persona run: answers and scores in one folder.

    OUT/run.json               settings and model
    OUT/responses/NAME.jsonl   answers; OUT/activations/ their means
    OUT/scores/NAME.jsonl      scores of the judge
    OUT/vectors/roles/NAME.pt, OUT/vectors/traits/NAME.pt, OUT/vectors/default_vectors.pt
    OUT/steering/NAME.safetensors, axis.safetensors, axis-contrast.safetensors, capping_config.pt
    OUT/summary.json           number of answers behind each file

Answers and scores are only ever added; `build` makes all other files from them, without the model.

Every instruction of a persona is combined with every question. The engine reduces the rows of the generated tokens on
the device, in the pass that writes them, so an answer costs [layers, hidden] numbers whatever its length (the last
token has no row). Seeds depend on what is asked and not on the order: a resumed run gives the same answers.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor

from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.extraction import runs
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.judges import Judge, Judged, NoScore
from steerscope.files import atomic_path, lock_folder, reading
from steerscope.specs import Capture, Message, Problem
from steerscope.specs.errors import BadFile, RequestFailed

_JUDGE_BATCH = 64
_RESERVED = ("axis", "axis-contrast", "default_vectors")
_MEAN = Capture(layers="all", tokens="generated", reduce="mean")
Label = Literal["pos", "neg", "default"]


@dataclass(frozen=True, slots=True)
class PersonaRollout:
    persona: str
    label: Label
    prompt_index: int
    question_index: int
    system: str
    question: str

    @property
    def key(self) -> str:
        """As in the files of the public sets."""
        return f"{self.label}_p{self.prompt_index}_q{self.question_index}"

    @property
    def id(self) -> str:
        return runs.digest(self.persona, self.label, self.prompt_index, self.system, self.question)


def rollouts(persona: Persona, questions: Sequence[str], model: str, *, default: bool = False) -> list[PersonaRollout]:
    """All rollouts of a persona: pos, and for a trait also neg."""
    prompts: list[tuple[Label, int, str]] = []
    for i, instruction in enumerate(persona.instructions):
        prompts.append(("default" if default else "pos", i, instruction.pos.replace("{model_name}", model)))
        if instruction.neg is not None:
            prompts.append(("neg", i, instruction.neg))
    return [
        PersonaRollout(persona.name, label, i, j, system, question)
        for j, question in enumerate(questions)
        for label, i, system in prompts
    ]


class PersonaRun(runs.AnswerRun):
    """What is asked of a model: personas, questions, and how answers are sampled."""

    kind: ClassVar[str] = "persona run"
    personas: tuple[Persona, ...] = Field(min_length=1)
    default: Persona
    shared: tuple[str, ...]
    ask: Literal["shared", "own", "both"] = "shared"  # which questions
    judge: str | None = None

    def questions(self, persona: Persona) -> list[str]:
        """The default is asked all questions, so that every answer can be compared with one of the default's."""
        if persona.name == self.default.name:
            return list(dict.fromkeys(q for one in self.personas for q in self.questions(one)))
        parts = {"shared": self.shared, "own": persona.questions, "both": (*self.shared, *persona.questions)}
        return list(dict.fromkeys(parts[self.ask]))

    def asked(self, persona: Persona) -> list[PersonaRollout]:
        assert self.model is not None
        default = persona.name == self.default.name
        return rollouts(persona, self.questions(persona), self.model.name, default=default)

    def judged(self, persona: Persona) -> list[PersonaRollout]:
        """Rollouts that need a score; a trait's scores are compared with those of the default's answers."""
        own = self.asked(persona)
        if persona.kind == "roles":
            return own
        questions = set(self.questions(persona))
        return own + [one for one in self.asked(self.default) if one.question in questions]

    def joined(self, before: Any) -> Self:
        """New definitions replace old ones of the same name."""
        update = {
            "personas": tuple({one.name: one for one in (*before.personas, *self.personas)}.values()),
            "shared": tuple(dict.fromkeys(before.shared + self.shared)),
            "ask": self.ask if self.ask == before.ask else "both",
        }
        return self.model_copy(update=update)

    @property
    def all_personas(self) -> tuple[Persona, ...]:
        return (self.default, *self.personas)

    def problems(self) -> list[Problem]:
        names = [one.name for one in self.personas]
        faults = [
            ("is there twice", "names are files: rename one", {name for name in names if names.count(name) > 1}),
            (
                "is the name of another file of a run",
                "rename it",
                {name for name in names if name.lower() in _RESERVED},
            ),
            ("is what all are compared with", "leave it out", {self.default.name}.intersection(names)),
        ]
        found = [
            Problem("personas", f"{name} {what}", remedy) for what, remedy, some in faults for name in sorted(some)
        ]
        unasked = [one.name for one in self.personas if not self.questions(one)]
        return found + [Problem(name, "has no questions", "ask the shared ones") for name in unasked]


def load_run(out: Path) -> PersonaRun:
    run = PersonaRun.load(out)
    if run is None:
        raise BadFile(f"{out} holds no persona run: it has no run.json")
    return run


# --- files


class Shards:
    """Activations [n, layers, hidden], float32, one file per batch, named by the hash of its bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._intact: dict[str, bool] = {}

    def write(self, persona: str, means: Tensor) -> str:
        data = safetensors.torch.save({"means": means.contiguous()})
        name = f"{persona}-{hashlib.sha256(data).hexdigest()[:24]}.safetensors"
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(self._folder / name) as temporary:
            temporary.write_bytes(data)
        self._intact[name] = True
        return name

    def holds(self, record: runs.Record) -> bool:
        """Whether the shard of an answer is intact; an answer without a row needs none."""
        name = record.get("shard")
        if name is None:
            return True
        if name not in self._intact:
            path = self._folder / name
            inside = path.is_file() and path.parent == self._folder
            self._intact[name] = inside and runs.file_digest(path)[:24] in name
        return self._intact[name]

    def read(self, records: Sequence[runs.Record]) -> Tensor:
        """Return [records, layers, hidden], in their order."""
        shards = {}
        for name in {record["shard"] for record in records}:
            with reading(self._folder / name, "shard of activations"):
                shards[name] = safetensors.torch.load_file(self._folder / name)["means"]
        return torch.stack([shards[record["shard"]][record["row"]] for record in records])


class Folder:
    """The ledgers and shards of a run. A batch writes its shard before its lines, so a line always finds its row."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.shards = Shards(out / "activations")

    def answers(self, persona: Persona) -> runs.Ledger:
        return runs.Ledger(self.out / "responses" / f"{persona.name}.jsonl", self.shards.holds)

    def scores(self, persona: Persona) -> runs.Ledger:
        return runs.Ledger(self.out / "scores" / f"{persona.name}.jsonl")


# --- answers


def generate(
    engine: SyncEngine,
    run: PersonaRun,
    out: Path,
    *,
    judge: Judge | None = None,
    resume: bool = False,
    batch: int = 32,
    progress: runs.Progress = runs.no_progress,
) -> tuple[PersonaRun, list[str]]:
    """Make the missing answers and scores; return the run and what failed, which the next run tries again."""
    run = run.model_copy(update={"model": runs.ModelFacts.of(engine), "judge": judge.name if judge else None})
    problems = run.problems() + (judge.check(run.personas) if judge else [])
    run = run.begin(out, resume, problems)
    with lock_folder(out):
        run.save(out)
        failures = _answer(engine, run, Folder(out), batch, progress)
        if judge is not None:
            failures += judge_answers(run, out, judge, progress)
    return run, failures


def _answer(engine: SyncEngine, run: PersonaRun, folder: Folder, batch: int, progress: runs.Progress) -> list[str]:
    failures = list[str]()
    total = sum(len(run.asked(one)) for one in run.all_personas)
    n_done = n_answered = 0
    for persona in run.all_personas:
        ledger = folder.answers(persona)
        reasons = list[str]()
        for n in answer_all(engine, run.asked(persona), run.rollouts, ledger, folder.shards, batch, reasons):
            n_done += n
            progress("answers", n_done, total)
        failures += [f"{persona.name}: {reason}" for reason in reasons]
        n_answered += len(ledger.records)
        if failures and not n_answered:  # the default comes first, and without it there are no vectors
            raise RequestFailed(failures[0])
    return failures


def answer_all(
    engine: SyncEngine,
    wanted: Sequence[PersonaRollout],
    settings: runs.RolloutSettings,
    ledger: runs.Ledger,
    shards: Shards,
    batch: int,
    failures: list[str],
) -> Iterator[int]:
    """Answer what the ledger lacks; yields how many were there, then the size of each batch."""
    with_system = runs.takes_system(engine)

    def chat(one: PersonaRollout) -> list[Message]:
        return runs.conversation(one.system, one.question, with_system)

    def generate(part: Sequence[PersonaRollout]) -> Sequence[Generation]:
        return engine.chat([chat(one) for one in part], [settings.sampling(one.id) for one in part], capture=_MEAN)

    def records_of(part: Sequence[PersonaRollout], done: Sequence[Generation | None]) -> list[runs.Record]:
        return _records(part, [chat(one) for one in part], done, shards)

    return runs.answer_missing({one.id: one for one in wanted}, ledger, batch, generate, records_of, failures)


def _records(
    part: Sequence[PersonaRollout], chats: Sequence[list[Message]], done: Sequence[Generation | None], shards: Shards
) -> list[runs.Record]:
    """Write the means of a batch as a shard; return the lines of its answers."""
    means: list[Tensor] = []
    records: list[dict[str, Any]] = []
    for one, chat, found in zip(part, chats, done, strict=True):
        if found is None:
            continue
        row = None
        if found.rows.n:  # an answer of one token has no row
            row = len(means)
            means.append(torch.stack([found.rows[layer] for layer in found.rows.layers]))
        messages = [*chat, Message(role="assistant", content=found.text)]
        record = {name: getattr(one, name) for name in ("id", "label", "prompt_index", "question_index", "question")}
        record |= {"system_prompt": one.system, "conversation": [message.model_dump() for message in messages]}
        records.append(record | {"tokens": len(found.token_ids), "finish_reason": found.finish_reason, "row": row})
        if found.capture:
            found.capture.close()
    shard = shards.write(part[0].persona, torch.stack(means)) if means else None
    return [record | {"shard": None if record["row"] is None else shard} for record in records]


def text_of(record: runs.Record) -> str:
    return record["conversation"][-1]["content"]


# --- scores


def judge_answers(run: PersonaRun, out: Path, judge: Judge, progress: runs.Progress = runs.no_progress) -> list[str]:
    """Make the missing scores; return which personas have answers without one."""
    folder = Folder(out)
    unjudged = list[str]()
    n_done = 0
    total = sum(len(run.judged(one)) for one in run.personas)
    texts = {id: text_of(record) for one in run.all_personas for id, record in folder.answers(one).records.items()}
    for persona in run.personas:
        wanted = [one for one in run.judged(persona) if one.id in texts]
        n_done += len(run.judged(persona)) - len(wanted)
        reasons = list[str]()
        for n in _judge_persona(persona, wanted, texts, judge, folder.scores(persona), reasons):
            n_done += n
            progress("scores", n_done, total)
        if reasons:
            unjudged.append(f"{persona.name}: {len(reasons)} of {len(wanted)} answers have no score: {reasons[0]}")
    return unjudged


def _judge_persona(
    persona: Persona,
    wanted: Sequence[PersonaRollout],
    texts: dict[str, str],
    judge: Judge,
    ledger: runs.Ledger,
    reasons: list[str],
) -> Iterator[int]:
    """Store scores; reasons of answers that have none are added to `reasons`."""
    items = {score_id(judge.name, persona, one, texts[one.id]): one for one in wanted}
    ids = {one.id: id for id, one in items.items()}

    def work(part: Sequence[PersonaRollout]) -> Iterator[list[runs.Record]]:
        judged = judge(persona, [Judged(one.question, texts[one.id]) for one in part])
        for group in runs.groups(judged):
            reasons.extend(score.reason for _, score in group if isinstance(score, NoScore))
            records: list[runs.Record] = [
                {"id": ids[one.id], "key": one.key, "question": one.question, "score": score, "judge": judge.name}
                for one, score in ((part[i], score) for i, score in group)
                if not isinstance(score, NoScore)
            ]
            if records:
                yield records

    return runs.store_missing(items, ledger, _JUDGE_BATCH, work)


def score_id(judge: str, persona: Persona, one: PersonaRollout, text: str) -> str:
    """Identify a judgement by the judge, the answer, and the measure."""
    return runs.digest(judge, persona.keywords.model_dump(), persona.eval_prompt, one.id, text)
