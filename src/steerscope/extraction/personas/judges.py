"""Judges: how far an answer plays its role (0 to 3), or shows its trait (0 to 100).

A judge is a callable with a name; the name is kept with its scores, so that another judge's are not taken for its own.
`KeywordJudge` counts words, needs nothing, and is as good as its lists: it sees what an answer speaks of, not whether
it is well played. `EndpointJudge` asks a model behind any OpenAI-compatible server. A refusal to answer is 0 for a role
and REFUSAL for a trait, as in the public sets; None says that no judgement could be had.
"""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import httpx

from steerscope.extraction.personas.definitions import Persona
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

Score = float | Literal["REFUSAL"]
REFUSAL: Literal["REFUSAL"] = "REFUSAL"
_REFUSES = re.compile(
    r"\bI(?:'m| am)? (?:sorry,? but|unable to|not able to|cannot|can't|won't) \b(?!wait|help but)", re.I
)
_IS_AI = re.compile(
    r"\b(?:as|I'm|I am) (?:an? )?(?:AI|artificial|large language|language model|virtual|chat ?bot)\b", re.I
)


class Judged(NamedTuple):
    question: str
    answer: str


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        """What keeps it from judging these, told before anything is generated."""
        ...

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score | None]: ...


# --- words


@dataclass(frozen=True, slots=True)
class KeywordJudge:
    """A role: 0 refuses, 1 has none of the words, 2 has one or calls itself an AI, 3 has two or more.

    A trait: 50 + 50 (p - n) / (p + n + 1/2) with p and n the numbers of different words of either list. A keyword
    counts where a word begins with it.
    """

    name: str = "keyword"

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        remedy = 'add "keywords", or choose no judge or an endpoint'
        return [
            Problem(one.name, "has no keywords", remedy)
            for one in personas
            if not one.keywords.pos or (one.kind == "traits" and not one.keywords.neg)
        ]

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score | None]:
        return [self._score(persona, one.answer) for one in answers]

    def _score(self, persona: Persona, answer: str) -> Score:
        refuses = bool(_REFUSES.search(answer))
        pos, neg = _count(persona.keywords.pos, answer), _count(persona.keywords.neg, answer)
        if persona.kind == "traits":
            return REFUSAL if refuses and not pos and not neg else round(50 + 50 * (pos - neg) / (pos + neg + 0.5), 1)
        if not pos:
            return 0 if refuses else 1
        return 2 if pos == 1 or _IS_AI.search(answer) else 3


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
class EndpointJudge:
    """`url` is what OpenAI's clients call the base URL, http://host:port/v1."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    at_once: int = 8
    tries: int = 5
    pause_s: float = 1.0  # before the second try; doubled each time

    def __post_init__(self) -> None:
        problems = []
        if not self.url.startswith(("http://", "https://")):
            what = f"{self.url!r} is not an address"
            problems.append(Problem("judge", what, "write it like http://127.0.0.1:8000/v1, or keyword, or none"))
        if not self.model:
            problems.append(Problem("judge model", "is not named", "name a model that the endpoint serves"))
        if problems:
            raise InvalidRequest(problems)

    @property
    def name(self) -> str:
        return f"{self.model} at {self.url.rstrip('/')}"

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        remedy = "write {answer} where the answer is to stand"
        asked = [one for one in personas if one.eval_prompt is not None and "{answer}" not in one.eval_prompt]
        return [Problem(f"{one.name}.eval_prompt", "does not show the answer", remedy) for one in asked]

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score | None]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        prompts = [prompt_for(persona, one) for one in answers]
        with httpx.Client(headers=headers, timeout=120.0) as client, ThreadPoolExecutor(self.at_once) as pool:
            replies = list(pool.map(lambda prompt: self._ask(client, prompt), prompts))
        return [parse_score(reply, 3 if persona.kind == "roles" else 100) for reply in replies]

    def _ask(self, client: httpx.Client, prompt: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": 16,
        }
        found = ""
        for left in reversed(range(self.tries)):
            pause = self.pause_s * 2 ** (self.tries - 1 - left)
            try:
                response = client.post(f"{self.url.rstrip('/')}/chat/completions", json=body)
            except httpx.HTTPError as error:
                found = f"cannot be reached: {error or type(error).__name__}"
            else:
                if response.status_code == 200:
                    return _content(response)
                found = f"answers {response.status_code}: {response.text[:200]}"
                if response.status_code not in (408, 409, 429) and response.status_code < 500:
                    break
                after = response.headers.get("retry-after", "")
                pause = max(pause, min(60.0, float(after))) if after.isdigit() else pause
            if left:
                time.sleep(pause)
        raise SteerscopeError(
            f"the judge {self.name} {found}; mend that and go on with --resume, what was judged is kept"
        )


def _content(response: httpx.Response) -> str:
    try:
        return str(response.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError):
        return ""


def prompt_for(persona: Persona, one: Judged) -> str:
    """The persona's own eval_prompt or ours, filled in one go: an answer cannot hold a place to fill."""
    template = persona.eval_prompt or (_ROLE if persona.kind == "roles" else _TRAIT)
    values = {"question": one.question, "answer": one.answer, "name": persona.name}
    return re.sub(r"\{(question|answer|name)\}", lambda match: values[match[1]], template)


def parse_score(reply: str, highest: int) -> Score | None:
    """The first number that is on the scale."""
    if REFUSAL in reply.upper():
        return REFUSAL if highest == 100 else 0
    numbers = (float(number) for number in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w%]|\.\d)", reply))
    return next((number for number in numbers if number <= highest), None)
