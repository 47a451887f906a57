"""A persona run: answers and scores in one folder.

    OUT/run.json               settings and model
    OUT/responses/NAME.jsonl   answers; OUT/activations/ their means
    OUT/scores/NAME.jsonl      scores of the judge
    OUT/vectors/roles/NAME.pt, OUT/vectors/traits/NAME.pt, OUT/vectors/default_vectors.pt
    OUT/steering/NAME.safetensors, axis.safetensors, axis-contrast.safetensors, capping_config.pt
    OUT/summary.json           number of answers behind each file

Answers and scores are only ever added; `build` makes all other files from them, without the model.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from steerscope.engines.sync import SyncEngine
from steerscope.extraction import runs
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Folder
from steerscope.extraction.personas.judges import Judge, Judged, NoScore
from steerscope.extraction.personas.rollouts import PersonaRollout, answer_all, rollouts, text_of
from steerscope.files import lock_folder
from steerscope.specs.errors import BadFile, Problem, RequestFailed

_JUDGE_BATCH = 64
_RESERVED = ("axis", "axis-contrast", "default_vectors")


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
        personas = {one.name: one for one in (*before.personas, *self.personas)}
        return self.model_copy(
            update={
                "personas": tuple(personas.values()),
                "shared": tuple(dict.fromkeys(before.shared + self.shared)),
                "ask": self.ask if self.ask == before.ask else "both",
            }
        )

    @property
    def all_personas(self) -> tuple[Persona, ...]:
        return (self.default, *self.personas)

    def problems(self) -> list[Problem]:
        names = [one.name for one in self.personas]
        found = [
            Problem("personas", f"{name} is there twice", "names are files: rename one")
            for name in sorted(set(names))
            if names.count(name) > 1
        ]
        found += [
            Problem("personas", f"{name} is the name of another file of a run", "rename it")
            for name in names
            if name.lower() in _RESERVED
        ]
        if self.default.name in names:
            found.append(Problem("personas", f"{self.default.name} is what all are compared with", "leave it out"))
        unasked = [one.name for one in self.personas if not self.questions(one)]
        return found + [Problem(name, "has no questions", "ask the shared ones") for name in unasked]


def load_run(out: Path) -> PersonaRun:
    run = PersonaRun.load(out)
    if run is None:
        raise BadFile(f"{out} holds no persona run: it has no run.json")
    return run


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
        ledger, reasons = folder.answers(persona), list[str]()
        for n in answer_all(engine, run.asked(persona), run.rollouts, ledger, folder.shards, batch, reasons):
            n_done += n
            progress("answers", n_done, total)
        failures += [f"{persona.name}: {reason}" for reason in reasons]
        n_answered += len(ledger.records)
        if failures and not n_answered:  # the default comes first, and without it there are no vectors
            raise RequestFailed(failures[0])
    return failures


def judge_answers(run: PersonaRun, out: Path, judge: Judge, progress: runs.Progress = runs.no_progress) -> list[str]:
    """Make the missing scores; return which personas have answers without one."""
    folder, unjudged, n_done = Folder(out), list[str](), 0
    total = sum(len(run.judged(one)) for one in run.personas)
    texts = {id: text_of(record) for one in run.all_personas for id, record in folder.answers(one).records.items()}
    for persona in run.personas:
        wanted = [one for one in run.judged(persona) if one.id in texts]
        n_done += len(run.judged(persona)) - len(wanted)
        reasons = list[str]()
        for n in _judge_persona(persona, wanted, texts, judge, folder, reasons):
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
    folder: Folder,
    reasons: list[str],
) -> Iterator[int]:
    """Store scores; reasons of answers that have none are added to `reasons`."""
    items = {score_id(judge.name, persona, one, texts[one.id]): one for one in wanted}
    ids = {one.id: id for id, one in items.items()}

    def work(part: Sequence[PersonaRollout]) -> Iterator[list[runs.Record]]:
        judged = judge(persona, [Judged(one.question, texts[one.id]) for one in part])
        for group in runs.groups(judged):
            records: list[runs.Record] = []
            for i, score in group:
                if isinstance(score, NoScore):
                    reasons.append(score.reason)
                else:
                    about = {"id": ids[part[i].id], "key": part[i].key, "question": part[i].question}
                    records.append({**about, "score": score, "judge": judge.name})
            if records:
                yield records

    return runs.store_missing(items, folder.scores(persona), _JUDGE_BATCH, work)


def score_id(judge: str, persona: Persona, one: PersonaRollout, text: str) -> str:
    """Identify a judgement by the judge, the answer, and the measure."""
    return runs.digest(judge, persona.keywords.model_dump(), persona.eval_prompt, one.id, text)
