"""Scorers: callables from answers to named numbers.

The file of a scorer's scores has its `name`; `identity` is everything its numbers depend on besides the answer, so
that scores of another rubric or another training set are never reused. `why` gives the reason where there is no number.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from steerscope.evals.run import EvalRun
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.judges import REFUSAL, Judged, KeywordJudge, refuses
from steerscope.extraction.runs import Record, Results, digest
from steerscope.specs.errors import InvalidRequest, Problem

Json = str | int | float | None | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class Scored:
    values: dict[str, float]
    why: str | None = None


NOT_SCORED = Scored({})


class Scorer(Protocol):
    """Any callable from answers to named numbers."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def about(self) -> dict[str, Json]:
        """Facts for readers of the scores, called after scoring; numbers under `spent` are added up over runs."""
        ...

    def __call__(self, answers: Sequence[Record]) -> Results[Scored | None]:
        """Return a score for each answer, or yield (index, score) as they arrive, to be stored one by one.

        None: not scored now; the next run tries again. A scorer that cannot go on raises `Interrupted`."""
        ...


@dataclass(frozen=True, slots=True)
class PlainScorer:
    """A scorer of one answer at a time. A choice of two has no text, so it has no score unless `with_choices`."""

    name: str
    identity: str
    score: Callable[[Record], Scored]
    facts: dict[str, Json] = field(default_factory=dict)
    with_choices: bool = False

    def about(self) -> dict[str, Json]:
        return self.facts

    def __call__(self, answers: Sequence[Record]) -> list[Scored]:
        return [self.score(one) if self.with_choices or "logprobs" not in one else NOT_SCORED for one in answers]


def keywords(persona: Persona) -> PlainScorer:
    """The words of a trait (0 to 100) or role (0 to 3), as the personas' judge counts them."""
    judge = KeywordJudge()
    if problems := judge.check([persona]):
        raise InvalidRequest(problems)

    def score(answer: Record) -> Scored:
        (found,) = judge(persona, [Judged(answer["question"], answer["text"])])
        return Scored({}, "refusal") if found == REFUSAL else Scored({"keywords": float(found)})

    return PlainScorer("keywords", digest(persona.name, persona.keywords.model_dump()), score)


def regex(pattern: str) -> PlainScorer:
    """1 where the pattern occurs, whatever the case, else 0."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InvalidRequest([Problem("regex", f"{pattern!r}: {error}", "correct the pattern")]) from None
    return PlainScorer(
        "regex", pattern, lambda one: Scored({"regex": float(bool(compiled.search(one["text"])))}), {"of": pattern}
    )


def refusal() -> PlainScorer:
    """1 where the words of the answer decline."""
    return PlainScorer("refusal", "1", lambda one: Scored({"refusal": float(refuses(one["text"]))}))


def correct() -> PlainScorer:
    """`correct` is 1 where the known answer is given. `choice` is the probability of the wanted one of two."""
    return PlainScorer("correct", "1", _correct, with_choices=True)


def _correct(answer: Record) -> Scored:
    if answer.get("expected"):
        found = any(re.search(rf"\b{re.escape(one)}\b", answer["text"], re.I) for one in answer["expected"])
        return Scored({"correct": float(found)})
    if "logprobs" not in answer:
        return NOT_SCORED
    if answer["logprobs"] is None:
        return Scored({}, "neither choice is likely")
    wanted, other = answer["logprobs"]
    probability = 1 / (1 + math.exp(min(700.0, other - wanted)))
    return Scored({"choice": probability, "correct": float(probability > 0.5)})


def repetition(size: int = 3) -> PlainScorer:
    """The share of an answer's word triples that occurred in it before."""

    def score(answer: Record) -> Scored:
        words = answer["text"].lower().split()
        grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        repeated = sum(count - 1 for count in Counter(grams).values())
        return Scored({"repetition": repeated / len(grams)} if grams else {})

    return PlainScorer("repetition", str(size), score)


def default_scorers(run: EvalRun) -> list[PlainScorer]:
    """Return the scorers that need no settings and apply to the run."""
    found = [refusal(), repetition()]
    if any(item.choices or item.expected for item in run.items):
        found.append(correct())
    if run.persona and run.persona.keywords.pos:
        found.append(keywords(run.persona))
    return found
