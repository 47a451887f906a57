"""The whole way from definitions to vectors, in one folder.

    OUT/run.json               what was asked, of which model
    OUT/responses/NAME.jsonl   answers; OUT/activations/ their means
    OUT/scores/NAME.jsonl      what the judge said
    OUT/vectors/roles/NAME.pt, OUT/vectors/traits/NAME.pt, OUT/vectors/default_vectors.pt
    OUT/steering/NAME.safetensors, axis.safetensors, axis-contrast.safetensors, capping_config.pt
    OUT/summary.json           how many answers stand behind each, and which files were made

Answers and scores are only ever added; everything below them is made anew from them, without the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Ledger, Shards, digest, write_json
from steerscope.extraction.personas.judges import Judge, Judged, JudgingFailed, NoScore
from steerscope.extraction.personas.rollouts import (
    Progress,
    Rollout,
    RolloutSettings,
    answer_all,
    rollouts,
    silent,
    text_of,
)
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, RequestFailed

_JUDGED_AT_ONCE = 64
_RESERVED = ("axis", "axis-contrast", "default_vectors")


class ModelFacts(Spec):
    name: str
    layers: int
    hidden: int
    vocab: int
    engine: str | None = None  # None in older runs, which did not say
    dtype: str | None = None

    @classmethod
    def of(cls, engine: SyncEngine) -> "ModelFacts":
        facts = engine.facts
        return cls(
            name=facts.name,
            layers=facts.layers,
            hidden=facts.hidden,
            vocab=facts.vocab,
            engine=type(engine.aio).__name__,
            dtype=str(engine.aio.dtype).removeprefix("torch."),
        )

    def same(self, other: "ModelFacts") -> bool:
        """As far as both say."""
        mine, theirs = self.model_dump(exclude_none=True), other.model_dump(exclude_none=True)
        return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


class PersonaRun(Spec):
    """What is asked of a model: personas, questions, and how answers are sampled."""

    personas: tuple[Persona, ...] = Field(min_length=1)
    default: Persona
    shared: tuple[str, ...]
    ask: Literal["shared", "own", "both"] = "shared"  # which questions
    rollouts: RolloutSettings = RolloutSettings()
    model: ModelFacts | None = None  # set by the run
    judge: str | None = None

    def questions(self, persona: Persona) -> list[str]:
        """The default answers whatever anybody is asked, so that every answer has one to be compared with."""
        if persona.name == self.default.name:
            return list(dict.fromkeys(q for one in self.personas for q in self.questions(one)))
        parts = {"shared": self.shared, "own": persona.questions, "both": (*self.shared, *persona.questions)}
        return list(dict.fromkeys(parts[self.ask]))

    def asked(self, persona: Persona) -> list[Rollout]:
        assert self.model is not None
        default = persona.name == self.default.name
        return rollouts(persona, self.questions(persona), self.model.name, default=default)

    def judged(self, persona: Persona) -> list[Rollout]:
        """A trait's scores are compared with what its judge says of the default."""
        own = self.asked(persona)
        if persona.kind == "roles":
            return own
        questions = set(self.questions(persona))
        return own + [one for one in self.asked(self.default) if one.question in questions]

    def joined(self, before: "PersonaRun") -> Self:
        """With all that an earlier run asked: a run only ever grows. New definitions take the place of old ones."""
        personas = {one.name: one for one in before.personas} | {one.name: one for one in self.personas}
        return self.model_copy(
            update={
                "personas": tuple(personas.values()),
                "shared": tuple(dict.fromkeys(before.shared + self.shared)),
                "ask": self.ask if self.ask == before.ask else "both",
            }
        )

    @property
    def everybody(self) -> tuple[Persona, ...]:
        return (self.default, *self.personas)


class Folder:
    """Where a run keeps what it has."""

    def __init__(self, out: Path) -> None:
        self.out, self.shards = out, Shards(out / "activations")

    def answers(self, persona: Persona) -> Ledger:
        return Ledger(self.out / "responses" / f"{persona.name}.jsonl", self.shards.holds)

    def scores(self, persona: Persona) -> Ledger:
        return Ledger(self.out / "scores" / f"{persona.name}.jsonl")


def load_run(out: Path) -> PersonaRun:
    path = out / "run.json"
    if not path.is_file():
        raise BadFile(f"{out} holds no persona run: it has no run.json")
    with reading(path, "persona run"):
        return PersonaRun.from_json(path.read_bytes())


def generate(
    engine: SyncEngine,
    run: PersonaRun,
    out: Path,
    *,
    judge: Judge | None = None,
    resume: bool = False,
    batch: int = 32,
    progress: Progress = silent,
) -> tuple[PersonaRun, list[str]]:
    """Answer what is not answered yet and judge what is not judged yet; what failed is told and tried by the next."""
    run = _begin(engine, run, out, judge, resume)
    folder, failures, answered = Folder(out), list[str](), 0
    total, done = sum(len(run.asked(one)) for one in run.everybody), 0
    for persona in run.everybody:
        wanted, ledger = run.asked(persona), folder.answers(persona)
        done += sum(one.id in ledger.records for one in wanted)
        progress("answers", done, total)
        for count, reason in answer_all(engine, wanted, run.rollouts, ledger, folder.shards, batch):
            done += count
            failures += [f"{persona.name}: {reason}"] if reason else []
            progress("answers", done, total)
        answered += len(ledger.records)
        if failures and not answered:  # the default, without which there are no vectors, comes first
            raise RequestFailed(failures[0])
    if judge is not None:
        failures += judge_answers(run, out, judge, progress)
    return run, failures


def judge_answers(run: PersonaRun, out: Path, judge: Judge, progress: Progress = silent) -> list[str]:
    """Judge what is not judged yet; tells which personas have answers that got no score."""
    folder, done, unjudged = Folder(out), 0, list[str]()
    total = sum(len(run.judged(one)) for one in run.personas)
    given = {id: text_of(record) for one in run.everybody for id, record in folder.answers(one).records.items()}
    for persona in run.personas:
        ledger, wanted = folder.scores(persona), run.judged(persona)
        texts = [
            (score_id(judge.name, persona, one, given[one.id]), one, given[one.id]) for one in wanted if one.id in given
        ]
        missing = [each for each in texts if each[0] not in ledger.records]
        done += len(wanted) - len(missing)
        reasons: list[str] = []
        for start in range(0, len(missing), _JUDGED_AT_ONCE):
            part = missing[start : start + _JUDGED_AT_ONCE]
            failure = None
            try:
                scores = judge(persona, [Judged(one.question, text) for _, one, text in part])
            except JudgingFailed as error:
                scores, failure = error.scores, error
            ledger.append(
                [
                    {"id": id, "key": one.key, "question": one.question, "score": score, "judge": judge.name}
                    for (id, one, _), score in zip(part, scores, strict=True)
                    if not isinstance(score, NoScore)
                ]
            )
            if failure is not None:
                raise failure
            reasons += [score.reason for score in scores if isinstance(score, NoScore)]
            done += len(part)
            progress("scores", done, total)
        if reasons:
            unjudged.append(f"{persona.name}: {len(reasons)} of {len(texts)} answers have no score: {reasons[0]}")
    return unjudged


def score_id(judge: str, persona: Persona, one: Rollout, text: str) -> str:
    """Of a judgement: who judged what, and by which measure."""
    return digest(judge, persona.keywords.model_dump(), persona.eval_prompt, one.id, text)


def _begin(engine: SyncEngine, run: PersonaRun, out: Path, judge: Judge | None, resume: bool) -> PersonaRun:
    """Check everything before the first answer, and say in the folder what it is going to hold."""
    model = ModelFacts.of(engine)
    run = run.model_copy(update={"model": model, "judge": judge.name if judge else None})
    problems = _problems(run)
    if (out / "run.json").is_file():
        before = load_run(out)
        run = run.joined(before)
        if not resume:
            problems.append(Problem(str(out), "holds a run already", "go on with --resume, or choose another folder"))
        same = before.model is None or before.model.same(model), before.rollouts == run.rollouts
        whats = ("model", before.model, model), ("sampling", before.rollouts, run.rollouts)
        for fits, (name, old, new) in zip(same, whats, strict=True):
            if not fits:
                what = f"its answers were given with another {name} ({old}), not with {new}"
                problems.append(Problem(str(out), what, "keep to it, or choose another folder"))
    problems += judge.check(run.personas) if judge else []
    if problems:
        raise InvalidRequest(problems)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "run.json", run.model_dump(mode="json"))
    return run


def _problems(run: PersonaRun) -> list[Problem]:
    names = [one.name for one in run.personas]
    twice: Sequence[str] = sorted({name for name in names if names.count(name) > 1})
    problems = [Problem("personas", f"{name} is there twice", "names are files: rename one") for name in twice]
    problems += [
        Problem("personas", f"{name} is the name of another file of a run", "rename it")
        for name in names
        if name.lower() in _RESERVED
    ]
    if run.default.name in names:
        problems.append(Problem("personas", f"{run.default.name} is what all are compared with", "leave it out"))
    unasked = [one.name for one in run.personas if not run.questions(one)]
    return problems + [Problem(name, "has no questions", "ask the shared ones") for name in unasked]
