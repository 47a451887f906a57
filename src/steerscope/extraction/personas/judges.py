"""Judges: how far an answer plays its role (0 to 3), or shows its trait (0 to 100).

A judge is a callable with a name; scores are stored under the name, so those of another judge are never reused.
`KeywordJudge` counts words and is as good as its lists: it sees what an answer is about, not how well it is played.
`EndpointJudge` asks a model behind any OpenAI-compatible server. A refusal to answer is 0 for a role and REFUSAL for a
trait, as in the public sets; `NoScore` gives the reason where there is no score.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from steerscope.extraction.endpoint import Endpoint, NoReply
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import Results
from steerscope.specs.errors import Problem

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


class Judged(NamedTuple):
    question: str
    answer: str


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        """Return why it cannot judge these personas; called before anything is generated."""
        ...

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> Results[Score | NoScore]:
        """Return a score for each answer, or yield (index, score) as they arrive, to be stored one by one.

        A judge that cannot go on raises; what it had yielded is stored."""
        ...


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
        pos = _count(persona.keywords.pos, answer)
        neg = _count(persona.keywords.neg, answer)
        if persona.kind == "traits":
            if refuses(answer) and not pos and not neg:
                return REFUSAL
            return round(50 + 50 * (pos - neg) / (pos + neg + 0.5), 1)
        if not pos:
            return 0 if refuses(answer) else 1
        return 2 if pos == 1 or _IS_AI.search(answer) else 3


def refuses(answer: str) -> bool:
    """Whether the words of an answer decline."""
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
        return [problem.under(one.name) for one in personas for problem in check_rubric(one, "eval_prompt")]

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> Iterator[tuple[int, Score | NoScore]]:
        for i, reply in self.ask([prompt_for(persona, one) for one in answers]):
            if isinstance(reply, NoReply):
                yield i, NoScore(reply.reason)
            elif without_thinking(reply) is None:
                yield i, NoScore("its thinking was cut off: give it more tokens")
            else:
                score = parse_score(reply, 3 if persona.kind == "roles" else 100)
                yield i, NoScore("its reply holds no score") if score is None else score


def check_rubric(persona: Persona, field: str) -> list[Problem]:
    if persona.eval_prompt is None or "{answer}" in persona.eval_prompt:
        return []
    return [Problem(field, "does not show the answer", "write {answer} where the answer is to stand")]


def prompt_for(persona: Persona, one: Judged) -> str:
    """Fill the persona's own eval_prompt or ours in one pass, so that an answer cannot contain a placeholder."""
    template = persona.eval_prompt or (_ROLE if persona.kind == "roles" else _TRAIT)
    values = {"question": one.question, "answer": one.answer, "name": persona.name}
    return re.sub(r"\{(question|answer|name)\}", lambda match: values[match[1]], template)


# --- replies

_NO_REFUSAL = re.compile(
    r"\b(?:no|non|not|cannot|without|\w+n['’]t)\b[^.,;:\n]{0,20}?\brefusal\b"
    r"|\brefusal\s*[:=?]\s*(?:no|false)\b(?!\s+[a-z])",
    re.I,
)
_THINKING = r"(?:think|thinking|thought|reasoning)"
_OPENED = re.compile(rf"<{_THINKING}\b[^>]*>|\[THINK\]", re.I)
_CLOSED = re.compile(rf"</{_THINKING}>|\[/THINK\]", re.I)
_THOUGHT = re.compile(rf"(?:{_OPENED.pattern}).*?(?:{_CLOSED.pattern})", re.I | re.S)
_NUMBER = r"\d+(?:[.,]\d+)*"
_ALONE = re.compile(rf"(?<![\w.])(?<!\d,)((?<!\d)[-−])?({_NUMBER})(?![\w%]|[.,]\d)")
_FRACTION = re.compile(rf"({_NUMBER})\s*(?:/|\b(?:out )?of\b)\s*({_NUMBER})", re.I)


def says_refusal(reply: str) -> bool:
    return REFUSAL in _NO_REFUSAL.sub("", reply).upper()


def without_thinking(reply: str) -> str | None:
    """Return a reply without its thinking, None where the thinking was cut off. Some templates open the block before
    the reply begins, so everything before a closing tag is thinking as well."""
    rest = _CLOSED.split(_THOUGHT.sub(" ", reply))[-1]
    return None if _OPENED.search(rest) else rest


def parse_score(reply: str, highest: int) -> Score | None:
    """Return the one number of a reply, if it is on the scale, else None.

    Mentions of the scale, fractions of another one, percents on a scale that does not end at 100, and thinking do not
    count. There is no score where several different numbers remain."""
    text = without_thinking(reply)
    if text is None:
        return None
    if says_refusal(text):
        return REFUSAL if highest == 100 else 0
    if highest == 100:
        text = re.sub(r"(?<=\d)\s*(?:%|percent\b)", " ", text, flags=re.I)
    whole = rf"{highest}\b(?![.,]\d)"
    text = re.sub(rf"\b[01]\s*(?:to|through|and|-|–)\s*{whole}", " ", text, flags=re.I)
    text = _FRACTION.sub(lambda part: f" {part[1]} " if _value(part[2]) == highest else " ", text)
    text = re.sub(rf"\b(?:out|scale) of {whole}", " ", text, flags=re.I)
    numbers = {-_value(number) if sign else _value(number) for sign, number in _ALONE.findall(text)}
    score = numbers.pop() if len(numbers) == 1 else None
    return score if score is not None and 0 <= score <= highest else None


def _value(number: str) -> float:
    """1,000 is a thousand; 1,5 and 1.2.3 are on no scale."""
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", number):
        number = number.replace(",", "")
    return float(number) if re.fullmatch(r"\d+(?:\.\d+)?", number) else math.inf
