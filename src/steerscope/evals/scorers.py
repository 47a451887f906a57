"""Scorers: callables from answers to named numbers.

A scorer's `name` is that of its file of scores; `identity` is all that its numbers depend on beside the answer, so that
scores of another rubric or another training set are never taken for its own. Where a number cannot be given, `why`
tells the reason, and it is counted.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from steerscope.evals.run import EvalRun
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Record, digest
from steerscope.extraction.personas.judges import REFUSAL, Judged, KeywordJudge, refuses
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

Json = str | int | float | None | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class Scored:
    values: dict[str, float]
    why: str | None = None


Keep = Callable[[Record, Scored], None]


class Interrupted(SteerscopeError):
    """A scorer that cannot go on; `scores` holds what it had, None where it had not."""

    def __init__(self, message: str, scores: "Sequence[Scored | None]") -> None:
        super().__init__(message)
        self.scores = scores


class Scorer(Protocol):
    """Any callable from answers to named numbers; `identity` says when a score that is kept is still right."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def about(self) -> dict[str, Json]:
        """What a reader of the scores should know, told after scoring; numbers under `spent` are added up over runs."""
        ...

    def __call__(self, answers: Sequence[Record]) -> Sequence[Scored | None]:
        """None: could not be scored now, and is tried again by the next run."""
        ...


@runtime_checkable
class PaidScorer(Scorer, Protocol):
    """One whose scores cost: each is kept as soon as it is there, whatever becomes of those after it."""

    def one_by_one(self, answers: Sequence[Record], keep: Keep) -> Sequence[Scored | None]: ...


@dataclass(frozen=True, slots=True)
class PlainScorer:
    """One that looks at each answer alone."""

    name: str
    identity: str
    score: Callable[[Record], Scored]
    told: dict[str, Json] = field(default_factory=dict)

    def about(self) -> dict[str, Json]:
        return self.told

    def __call__(self, answers: Sequence[Record]) -> list[Scored]:
        return [self.score(answer) for answer in answers]


def keywords(persona: Persona) -> PlainScorer:
    """The words of a trait (0 to 100) or role (0 to 3), as the personas' judge counts them."""
    judge = KeywordJudge()
    if problems := judge.check([persona]):
        raise InvalidRequest(problems)

    def score(answer: Record) -> Scored:
        (found,) = judge(persona, [Judged(answer["question"], answer["text"])])
        return Scored({}, "refusal") if found == REFUSAL else _open(answer, {"keywords": float(found)})

    return PlainScorer("keywords", digest(persona.name, persona.keywords.model_dump()), score)


def regex(pattern: str) -> PlainScorer:
    """1 where the pattern occurs, whatever the case, else 0."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InvalidRequest([Problem("regex", f"{pattern!r}: {error}", "correct the pattern")]) from None
    return PlainScorer(
        "regex",
        pattern,
        lambda answer: _open(answer, {"regex": float(bool(compiled.search(answer["text"])))}),
        {"of": pattern},
    )


def refusal() -> PlainScorer:
    """1 where the answer declines, by its words."""
    return PlainScorer("refusal", "1", lambda answer: _open(answer, {"refusal": float(refuses(answer["text"]))}))


def correct() -> PlainScorer:
    """Of questions whose answer is known: `correct` is 1 where it is given; of choices also the probability that the
    wanted one has among the two."""

    def score(answer: Record) -> Scored:
        if answer.get("expected"):
            there = any(re.search(rf"\b{re.escape(one)}\b", answer["text"], re.I) for one in answer["expected"])
            return Scored({"correct": float(there)})
        if "logprobs" not in answer:
            return Scored({})
        if answer["logprobs"] is None:
            return Scored({}, "neither choice is likely")
        wanted, other = answer["logprobs"]
        chance = 1 / (1 + math.exp(min(700.0, other - wanted)))
        return Scored({"choice": chance, "correct": float(chance > 0.5)})

    return PlainScorer("correct", "1", score)


def repetition(size: int = 3) -> PlainScorer:
    """The share of an answer's word triples that occurred in it before."""

    def score(answer: Record) -> Scored:
        words = answer["text"].lower().split()
        grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        again = sum(count - 1 for count in Counter(grams).values())
        return _open(answer, {"repetition": again / len(grams)} if grams else {})

    return PlainScorer("repetition", str(size), score)


def default_scorers(run: EvalRun) -> list[PlainScorer]:
    """Return the scorers that need no settings and apply to the run."""
    found = [refusal(), repetition()]
    if any(item.choices or item.expected for item in run.items):
        found.append(correct())
    if run.persona and run.persona.keywords.pos:
        found.append(keywords(run.persona))
    return found


def _open(answer: Record, values: dict[str, float]) -> Scored:
    """A choice of two has no text to look at."""
    return Scored({}) if "logprobs" in answer else Scored(values)
