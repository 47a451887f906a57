"""Asking a model behind any OpenAI-compatible server, many prompts at once.

Busy and broken servers are asked again with longer and longer pauses; a prompt that is refused costs only itself, but
the same refusal of `same_refusals` prompts in a row is about the settings, not the prompts. What cannot be mended ends
the asking with all replies that were had. Every request is counted by what became of it, so that
nothing is lost unseen and the bill is known.
"""

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from typing import cast

import httpx

from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

_REFUSED = (400, 413, 422)  # this prompt, too long for example; others may do
_SHOWN = 300  # characters of an error
_REQUEST_NUMBER = re.compile(r"\s*\(?request[ _-]?id[:= ]\s*[\w-]+\)?", re.I)
_GO_ON = "mend that and go on with --resume (eval score: give it again), what was judged is kept"
# What a user may set, and the least it can be.
_WHOLE = {"max_tokens": 1, "max_completion_tokens": 1, "at_once": 1, "tries": 1, "same_refusals": 0}
_FRACTIONAL = {"temperature": 0, "pause_s": 0, "timeout_s": 0.001}
_OPTIONAL = ("max_completion_tokens", "temperature")
SETTINGS = (*_WHOLE, *_FRACTIONAL)


@dataclass(frozen=True, slots=True)
class NoReply:
    reason: str
    refusal: str | None = None  # the endpoint's words, where it refused the prompt


@dataclass(slots=True)
class Tally:
    """What became of all requests: `ok`, a status, `timeout`, `unreachable` or `unreadable`; and tokens."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str | None = None  # the last one, and how many prompts in a row got it
    refused_alike: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str, usage: object = None) -> None:
        used = usage if isinstance(usage, dict) else {}
        with self._lock:
            self.outcomes[outcome] += 1
            self.prompt_tokens += _whole(used.get("prompt_tokens"))
            self.completion_tokens += _whole(used.get("completion_tokens"))

    def heard(self, reply: str | NoReply) -> int:
        """Count equal refusals in a row, over all calls of an endpoint; anything else that was said ends the row."""
        refusal = reply.refusal if isinstance(reply, NoReply) else None
        self.refused_alike = self.refused_alike + 1 if refusal and refusal == self.refusal else int(bool(refusal))
        self.refusal = refusal or self.refusal
        return self.refused_alike


def _whole(number: object) -> int:
    return number if isinstance(number, int) else 0


class AskingFailed(SteerscopeError):
    """An endpoint that cannot go on; `replies` holds what it had said, in order."""

    def __init__(self, message: str, replies: "Sequence[str | NoReply]") -> None:
        super().__init__(message)
        self.replies = replies


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` is what OpenAI's clients call the base URL, http://host:port/v1. Models that think need more `max_tokens`;
    newer ones of OpenAI's take `max_completion_tokens` instead, and no `temperature` (None: it is not sent)."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 16
    max_completion_tokens: int | None = None  # sent in place of max_tokens
    temperature: float | None = 0.0
    at_once: int = 8
    tries: int = 5
    pause_s: float = 1.0  # before the second try; doubled each time
    timeout_s: float = 120.0
    same_refusals: int = 8  # in a row end the asking; 0: they never do
    tally: Tally = field(default_factory=Tally, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if not _is_address(self.url):
            what = f"{self.url!r} is not an address"
            problems.append(Problem("judge", what, "write it like http://127.0.0.1:8000/v1, or keyword, or none"))
        if not self.model:
            problems.append(Problem("judge model", "is not named", "name a model that the endpoint serves"))
        problems += [problem for name in SETTINGS if (problem := _setting_problem(name, getattr(self, name)))]
        if problems:
            raise InvalidRequest(problems)

    @property
    def name(self) -> str:
        return f"{self.model} at {self.url.rstrip('/')}"

    @property
    def changed(self) -> tuple[str, ...]:
        """Settings that replies depend on, where they are not the usual ones: a reply under others is another one."""
        replies = ("max_tokens", "max_completion_tokens", "temperature")
        usual = {one.name: one.default for one in fields(self)}
        return tuple(f"{name}={getattr(self, name)}" for name in replies if getattr(self, name) != usual[name])

    def ask(
        self, prompts: Sequence[str], heard: Callable[[str, str | NoReply], None] = lambda *_: None
    ) -> list[str | NoReply]:
        """All replies, in order; `heard` is told each prompt with its reply as soon as it is there."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with httpx.Client(headers=headers, timeout=self.timeout_s) as client, ThreadPoolExecutor(self.at_once) as pool:
            asked = [pool.submit(self._ask, client, prompt) for prompt in prompts]
            own = dict(zip(asked, prompts, strict=True))
            try:
                for one in as_completed(asked):
                    if one.exception():
                        break
                    heard(own[one], one.result())
                    if self.tally.heard(one.result()) == self.same_refusals:
                        break
            finally:
                pool.shutdown(cancel_futures=True)  # those that are under way are waited for
        failures = [None if one.cancelled() else one.exception() for one in asked]
        replies: list[str | NoReply] = [
            NoReply("was not judged") if one.cancelled() or failure else one.result()
            for one, failure in zip(asked, failures, strict=True)
        ]
        if failure := next(filter(None, failures), None):
            raise AskingFailed(str(failure), replies) from failure
        if self.same_refusals and self.tally.refused_alike >= self.same_refusals:
            self.tally.refused_alike = 0  # asked once more, it has as many again
            said = f"refuses {self.same_refusals} prompts in a row with the same words: {self.tally.refusal}"
            hint = "if these prompts are refused for what is in them, set same_refusals to 0"
            raise AskingFailed(f"the judge {self.name} {said}; {_GO_ON}; {hint}", replies)
        return replies

    def _ask(self, client: httpx.Client, prompt: str) -> str | NoReply:
        body: dict[str, object] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_completion_tokens is None:
            body["max_tokens"] = self.max_tokens
        else:
            body["max_completion_tokens"] = self.max_completion_tokens
        found = ""
        for left in reversed(range(self.tries)):
            pause = self.pause_s * 2 ** (self.tries - 1 - left)
            try:
                response = client.post(f"{self.url.rstrip('/')}/chat/completions", json=body)
            except httpx.HTTPError as error:
                self.tally.count("timeout" if isinstance(error, httpx.TimeoutException) else "unreachable")
                found = f"cannot be reached: {error or type(error).__name__}"
            else:
                if response.status_code == 200:
                    return self._content(response)
                self.tally.count(str(response.status_code))
                found = f"answers {response.status_code}: {response.text[:200]}"
                if response.status_code in _REFUSED:
                    return NoReply(f"the judge {found}", f"{response.status_code}: {_words(response)}")
                if response.status_code not in (408, 409, 429) and response.status_code < 500:
                    break
                after = response.headers.get("retry-after", "")
                pause = max(pause, min(60.0, float(after))) if after.isdigit() else pause
            if left:
                time.sleep(pause)
        raise SteerscopeError(f"the judge {self.name} {found}; {_GO_ON}")

    def _content(self, response: httpx.Response) -> str | NoReply:
        try:
            data = response.json()
            text = str(data["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError):
            self.tally.count("unreadable")
            return NoReply(f"the judge's answer is no completion: {response.text[:60]!r}")
        self.tally.count("ok", data.get("usage"))
        return text


def _setting_problem(name: str, value: object) -> Problem | None:
    whole = name in _WHOLE
    least = _WHOLE[name] if whole else _FRACTIONAL[name]
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if (value is None and name in _OPTIONAL) or (fits and least <= cast("float", value) < math.inf):
        return None
    wanted = f"a {'whole ' if whole else ''}number of {least:g} or more{', or none' if name in _OPTIONAL else ''}"
    return Problem(f"judge {name}", f"cannot be {value!r:.60}", f"give {wanted}")


def _words(response: httpx.Response) -> str:
    """What an error says, without the number of the request that some endpoints put beside it or behind it."""
    try:
        error = response.json()["error"]
        said = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        said = response.text
    return _REQUEST_NUMBER.sub("", said)[:_SHOWN]


def _is_address(url: str) -> bool:
    try:
        return url.startswith(("http://", "https://")) and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False
