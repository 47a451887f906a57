"""Judges: how far an answer plays its role (0 to 3), or shows its trait (0 to 100).

A judge is a callable with a name; the name is kept with its scores, so that another judge's are not taken for its own.
`KeywordJudge` counts words, needs nothing, and is as good as its lists: it sees what an answer speaks of, not whether
it is well played. `EndpointJudge` asks a model behind any OpenAI-compatible server. A refusal to answer is 0 for a role
and REFUSAL for a trait, as in the public sets; `NoScore` says why no judgement could be had.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from steerscope.extraction.endpoint import AskingFailed, Endpoint, NoReply
from steerscope.extraction.personas.definitions import Persona
from steerscope.specs.errors import Problem, SteerscopeError

Score = float | Literal["REFUSAL"]
REFUSAL: Literal["REFUSAL"] = "REFUSAL"
_REFUSES = re.compile(
    r"\bI(?:'m| am)? (?:sorry,? but|unable to|not able to|cannot|can't|won't) \b(?!wait|help but)", re.I
)
_IS_AI = re.compile(
    r"\b(?:as|I'm|I am) (?:an? )?(?:AI|artificial|large language|language model|virtual|chat ?bot)\b", re.I
)


@dataclass(frozen=True, slots=True)
class NoScore:
    reason: str


class JudgingFailed(SteerscopeError):
    """A judge that cannot go on; `scores` holds what it had said of the same answers, in order."""

    def __init__(self, message: str, scores: "Sequence[Score | NoScore]") -> None:
        super().__init__(message)
        self.scores = scores


class Judged(NamedTuple):
    question: str
    answer: str


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        """What keeps it from judging these, told before anything is generated."""
        ...

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> Sequence[Score | NoScore]: ...


# --- words


@dataclass(frozen=True, slots=True)
class KeywordJudge:
    """A role: without any of its words 0 if it refuses, else 1; with one of them 2; with more 3, but 2 if it calls
    itself an AI.

    A trait: 50 + 50 (p - n) / (p + n + 1/2) with p and n the numbers of different words of either list; REFUSAL if it
    refuses without any of them. A keyword counts where a word begins with it.
    """

    name: str = "keyword"

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        remedy = 'add "keywords", or choose no judge or an endpoint'
        return [
            Problem(one.name, "has no keywords", remedy)
            for one in personas
            if not one.keywords.pos or (one.kind == "traits" and not one.keywords.neg)
        ]

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score]:
        return [self._score(persona, one.answer) for one in answers]

    def _score(self, persona: Persona, answer: str) -> Score:
        refused = refuses(answer)
        pos, neg = _count(persona.keywords.pos, answer), _count(persona.keywords.neg, answer)
        if persona.kind == "traits":
            return REFUSAL if refused and not pos and not neg else round(50 + 50 * (pos - neg) / (pos + neg + 0.5), 1)
        if not pos:
            return 0 if refused else 1
        return 2 if pos == 1 or _IS_AI.search(answer) else 3


def refuses(answer: str) -> bool:
    """Whether an answer declines, by its words."""
    return bool(_REFUSES.search(answer))


def _count(words: Sequence[str], text: str) -> int:
    return sum(bool(re.search(rf"\b{re.escape(word)}", text, re.I)) for word in words)


# --- a model behind an endpoint

_ROLE = (
    "Somebody was told to play the role {name}. Question: {question}\n\nAnswer: {answer}\n\nHow far does the answer "
    "play it? 0: it refuses. 1: it does not. 2: in part, or it says that it is an AI. 3: fully. Reply with one number, "
    "0 to 3."
)
_TRAIT = (
    "Question: {question}\n\nAnswer: {answer}\n\nHow {name} is the answer, from 0 (the opposite) to 100? Reply with "
    "one number from 0 to 100, or REFUSAL if it refuses to answer."
)


@dataclass(frozen=True, slots=True)
class EndpointJudge(Endpoint):
    """A model behind an endpoint as a judge."""

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        remedy = "write {answer} where the answer is to stand"
        asked = [one for one in personas if one.eval_prompt is not None and "{answer}" not in one.eval_prompt]
        return [Problem(f"{one.name}.eval_prompt", "does not show the answer", remedy) for one in asked]

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score | NoScore]:
        highest = 3 if persona.kind == "roles" else 100
        try:
            replies = self.ask([prompt_for(persona, one) for one in answers])
        except AskingFailed as error:
            raise JudgingFailed(str(error), [_judgement(reply, highest) for reply in error.replies]) from error
        return [_judgement(reply, highest) for reply in replies]


def _judgement(reply: str | NoReply, highest: int) -> Score | NoScore:
    if isinstance(reply, NoReply):
        return NoScore(reply.reason)
    score = parse_score(reply, highest)
    if score is None and without_thinking(reply) is None:
        return NoScore("its thinking was cut off: give it more tokens")
    return NoScore("its reply holds no score") if score is None else score


def prompt_for(persona: Persona, one: Judged) -> str:
    """The persona's own eval_prompt or ours, filled in one go: an answer cannot hold a place to fill."""
    template = persona.eval_prompt or (_ROLE if persona.kind == "roles" else _TRAIT)
    values = {"question": one.question, "answer": one.answer, "name": persona.name}
    return re.sub(r"\{(question|answer|name)\}", lambda match: values[match[1]], template)


_NO_REFUSAL = re.compile(
    r"\b(?:no|non|not|cannot|without|\w+n['’]t)\b[^.,;:\n]{0,20}?\brefusal\b"
    r"|\brefusal\s*[:=?]\s*(?:no|false)\b(?!\s+[a-z])",
    re.I,
)


def says_refusal(reply: str) -> bool:
    return REFUSAL in _NO_REFUSAL.sub("", reply).upper()


_THINKING = r"(?:think|thinking|thought|reasoning)"
_OPENED = re.compile(rf"<{_THINKING}\b[^>]*>|\[THINK\]", re.I)
_CLOSED = re.compile(rf"</{_THINKING}>|\[/THINK\]", re.I)
_THOUGHT = re.compile(rf"(?:{_OPENED.pattern}).*?(?:{_CLOSED.pattern})", re.I | re.S)


def without_thinking(reply: str) -> str | None:
    """Return what a reply says beside its thinking, None where the thinking was cut off. Some templates open the
    block before the reply begins, so all before a closing tag is thinking as well."""
    rest = _CLOSED.split(_THOUGHT.sub(" ", reply))[-1]
    return None if _OPENED.search(rest) else rest


_NUMBER = r"\d+(?:[.,]\d+)*"
_ALONE = re.compile(rf"(?<![\w.])(?<!\d,)((?<!\d)[-−])?({_NUMBER})(?![\w%]|[.,]\d)")
_FRACTION = re.compile(rf"({_NUMBER})\s*(?:/|\b(?:out )?of\b)\s*({_NUMBER})", re.I)


def parse_score(reply: str, highest: int) -> Score | None:
    """The one number of a reply, where it is on the scale. What is said about the scale itself, fractions of another
    one, percents on a scale that does not end at 100, and thinking do not count; of several different numbers none is
    the score."""
    said = without_thinking(reply)
    if said is None:
        return None
    if says_refusal(said):
        return REFUSAL if highest == 100 else 0
    if highest == 100:
        said = re.sub(r"(?<=\d)\s*(?:%|percent\b)", " ", said, flags=re.I)
    whole = rf"{highest}\b(?![.,]\d)"
    said = re.sub(rf"\b[01]\s*(?:to|through|and|-|–)\s*{whole}", " ", said, flags=re.I)
    said = _FRACTION.sub(lambda part: f" {part[1]} " if _value(part[2]) == highest else " ", said)
    said = re.sub(rf"\b(?:out|scale) of {whole}", " ", said, flags=re.I)
    numbers = {-_value(number) if sign else _value(number) for sign, number in _ALONE.findall(said)}
    score = numbers.pop() if len(numbers) == 1 else None
    return score if score is not None and 0 <= score <= highest else None


def _value(number: str) -> float:
    """1,000 is a thousand; 1,5 and 1.2.3 are on no scale."""
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", number):
        number = number.replace(",", "")
    return float(number) if re.fullmatch(r"\d+(?:\.\d+)?", number) else math.inf
