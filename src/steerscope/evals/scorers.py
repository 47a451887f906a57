"""Scorers: callables from answers to named numbers.

The file of a scorer's scores has its `name`; `identity` is everything its numbers depend on besides the answer, so
that scores of another rubric or another training set are never reused. `why` gives the reason where there is no number.

`JudgeScorer` asks a model behind an OpenAI-compatible endpoint: any provider's, or `steerscope serve`. A rubric is a
text with `{question}` and `{answer}` in it; a judgement is a number from 0 to 100, or from 0 to 3. Equal answers are
judged once. Refusals and replies without a number are stored with their text, and counted; a prompt without a reply is
counted and asked again by the next run.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from steerscope.evals.run import EvalRun
from steerscope.extraction.endpoint import Endpoint, NoReply
from steerscope.extraction.personas import judges
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import Record, Results, digest
from steerscope.files import reading
from steerscope.specs.errors import InvalidRequest, Problem

Json = str | int | float | None | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class Scored:
    values: dict[str, float]
    why: str | None = None


NOT_SCORED = Scored({})


def score_texts(answers: Sequence[Record], score: Callable[[list[Record]], Iterable[Scored]]) -> list[Scored]:
    """Score the answers that have a text; a choice of two has none, so it has no score."""
    scores = [NOT_SCORED] * len(answers)
    places = [i for i, one in enumerate(answers) if "logprobs" not in one]
    for i, found in zip(places, score([answers[i] for i in places]), strict=True):
        scores[i] = found
    return scores


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
    """A scorer of one answer at a time, of texts only unless `with_choices`."""

    name: str
    identity: str
    score: Callable[[Record], Scored]
    facts: dict[str, Json] = field(default_factory=dict)
    with_choices: bool = False

    def about(self) -> dict[str, Json]:
        return self.facts

    def __call__(self, answers: Sequence[Record]) -> list[Scored]:
        if self.with_choices:
            return [self.score(one) for one in answers]
        return score_texts(answers, lambda texts: map(self.score, texts))


def keywords(persona: Persona) -> PlainScorer:
    """The words of a trait (0 to 100) or role (0 to 3), as the personas' judge counts them."""
    judge = judges.KeywordJudge()
    if problems := judge.check([persona]):
        raise InvalidRequest(problems)

    def score(answer: Record) -> Scored:
        (found,) = judge(persona, [judges.Judged(answer["question"], answer["text"])])
        return Scored({}, "refusal") if found == judges.REFUSAL else Scored({"keywords": float(found)})

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
    return PlainScorer("refusal", "1", lambda one: Scored({"refusal": float(judges.refuses(one["text"]))}))


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


class JudgeScorer:
    """`judge`: the endpoint's judgement of each answer."""

    name = "judge"

    def __init__(
        self,
        endpoint: Endpoint,
        persona: Persona,
        highest: Literal[3, 100] | None = None,
        prices: tuple[float, float] | None = None,
    ) -> None:
        """`highest`: by default 3 for our own rubric of a role, else 100. `prices`: of a million prompt and completion
        tokens."""
        if problems := judges.check_rubric(persona, "rubric"):
            raise InvalidRequest(problems)
        default = 3 if persona.kind == "roles" and persona.eval_prompt is None else 100
        self.endpoint = endpoint
        self._persona = persona
        self._prices = prices
        self._highest = highest or default

    @property
    def identity(self) -> str:
        shown = judges.prompt_for(self._persona, judges.Judged("{question}", "{answer}"))
        return digest(self.endpoint.name, shown, self._highest, *self.endpoint.changed)

    def about(self) -> dict[str, Json]:
        usage = self.endpoint.usage
        spent: dict[str, Json] = {f"requests: {outcome}": count for outcome, count in sorted(usage.outcomes.items())}
        spent |= {"prompt tokens": usage.prompt_tokens, "completion tokens": usage.completion_tokens}
        if self._prices:
            cost = usage.prompt_tokens * self._prices[0] + usage.completion_tokens * self._prices[1]
            spent["cost"] = round(cost / 1e6, 6)
        facts: dict[str, Json] = {"judge": self.endpoint.name, "scale": self._highest, "spent": spent}
        if usage.refusal:
            facts["last refusal"] = usage.refusal
        return facts

    def __call__(self, answers: Sequence[Record]) -> Iterator[tuple[int, Scored | None]]:
        same: dict[str, list[int]] = {}
        for i, one in enumerate(answers):
            if "logprobs" in one:
                yield i, NOT_SCORED
            else:
                prompt = judges.prompt_for(self._persona, judges.Judged(one["question"], one["text"]))
                same.setdefault(prompt, []).append(i)
        prompts = list(same)
        for number, reply in self.endpoint.ask(prompts):
            score = self._scored(reply)
            for i in same[prompts[number]]:
                yield i, score

    def _scored(self, reply: str | NoReply) -> Scored | None:
        if isinstance(reply, NoReply):
            return None
        score = judges.parse_score(reply, self._highest)
        text = judges.without_thinking(reply)
        if text is None:
            return Scored({}, f"thinking cut off in {reply[:80]!r}")
        if judges.says_refusal(text) or (score is None and judges.refuses(text)):
            return Scored({}, f"refusal in {reply[:80]!r}")
        return Scored({}, f"no score in {reply[:80]!r}") if score is None else Scored({"judge": float(score)})


def rubric(path: Path | None, persona: Persona | None) -> Persona:
    """Return the persona to judge by: with a file as its rubric, or as it is."""
    if path is not None:
        with reading(path, "rubric"):
            text = path.read_text(encoding="utf-8")
        base = persona or Persona.parse({"name": "good", "instruction": [{"pos": "good", "neg": "good"}]})
        return base.model_copy(update={"eval_prompt": text})
    if persona is None:
        raise InvalidRequest([Problem("rubric", "there is none", "give --rubric FILE, or a run with --trait")])
    return persona
