"""Ask a model behind any OpenAI-compatible server, with many prompts at once.

Busy and broken servers are asked again with longer and longer pauses. A refused prompt has no reply, but the same
refusal of `same_refusals` prompts in a row means wrong settings and ends the asking, as does any other error that
lasts. Every request is counted by its outcome, with its tokens.
"""

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from typing import cast

import httpx

from steerscope.extraction.runs import Interrupted
from steerscope.specs.errors import InvalidRequest, Problem

_REFUSED = (400, 413, 422)  # of one prompt, for example because it is too long
_SHOWN = 300  # characters of an error
_REQUEST_NUMBER = re.compile(r"\s*\(?request[ _-]?id[:= ]\s*[\w-]+\)?", re.I)
_GO_ON = "mend that and go on with --resume (eval score: give it again), what was judged is kept"
# Settings, their lower bounds, and whether they are whole numbers.
_BOUNDS: dict[str, tuple[float, bool]] = dict.fromkeys(
    ("max_tokens", "max_completion_tokens", "at_once", "tries"), (1, True)
)
_BOUNDS |= {"same_refusals": (0, True), "temperature": (0, False), "pause_s": (0, False), "timeout_s": (0.001, False)}
_OPTIONAL = ("max_completion_tokens", "temperature")
SETTINGS = tuple(_BOUNDS)


@dataclass(frozen=True, slots=True)
class NoReply:
    reason: str
    refusal: str | None = None  # the words of the endpoint, where it refused the prompt


@dataclass(slots=True)
class EndpointUsage:
    """Number of requests by outcome (`ok`, a status, `timeout`, `unreachable` or `unreadable`), and their tokens."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str | None = None  # the last one
    n_same_refusals: int = 0  # in a row, over all calls
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str, usage: object = None) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            for name in ("prompt_tokens", "completion_tokens"):
                spent = usage.get(name) if isinstance(usage, dict) else None
                if isinstance(spent, int):
                    setattr(self, name, getattr(self, name) + spent)

    def count_refusal(self, reply: str | NoReply) -> None:
        """Count equal refusals in a row; any other reply ends the row."""
        refusal = reply.refusal if isinstance(reply, NoReply) else None
        with self._lock:
            before = self.n_same_refusals if refusal == self.refusal else 0
            self.n_same_refusals = 0 if refusal is None else before + 1
            self.refusal = refusal or self.refusal


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
    usage: EndpointUsage = field(default_factory=EndpointUsage, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if not _is_address(self.url):
            remedy = "write it like http://127.0.0.1:8000/v1, or keyword, or none"
            problems.append(Problem("judge", f"{self.url!r} is not an address", remedy))
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
        """Settings that change replies, where they are not the defaults."""
        defaults = {one.name: one.default for one in fields(self)}
        names = ("max_tokens", "max_completion_tokens", "temperature")
        return tuple(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != defaults[name])

    def ask(self, prompts: Sequence[str]) -> Iterator[tuple[int, str | NoReply]]:
        """Yield (index of the prompt, reply) as replies arrive. Raises Interrupted where the endpoint cannot go on,
        after the replies to the requests that were running."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if self.usage.n_same_refusals >= self.same_refusals:
            self.usage.n_same_refusals = 0  # the last call ended with them
        with httpx.Client(headers=headers, timeout=self.timeout_s) as client, ThreadPoolExecutor(self.at_once) as pool:
            waiting = {pool.submit(self._ask, client, prompt): i for i, prompt in enumerate(prompts)}
            try:
                for one in as_completed(list(waiting)):
                    if one.exception():
                        break
                    yield waiting.pop(one), one.result()
            finally:
                pool.shutdown(cancel_futures=True)  # waits for the running requests
        ended = [one for one in waiting if not one.cancelled()]
        failures = [error for one in ended if (error := one.exception()) is not None]
        for one in ended:
            if one.exception() is None:
                yield waiting[one], one.result()
        if failures:
            raise Interrupted(str(failures[0])) from failures[0]

    def _ask(self, client: httpx.Client, prompt: str) -> str | NoReply:
        self._check_refusals()
        reply = self._request(client, prompt)
        self.usage.count_refusal(reply)
        self._check_refusals()
        return reply

    def _check_refusals(self) -> None:
        if self.same_refusals and self.usage.n_same_refusals >= self.same_refusals:
            refused = f"refuses {self.same_refusals} prompts in a row with the same words: {self.usage.refusal}"
            hint = "if these prompts are refused for what is in them, set same_refusals to 0"
            raise Interrupted(f"the judge {self.name} {refused}; {_GO_ON}; {hint}")

    def _request(self, client: httpx.Client, prompt: str) -> str | NoReply:
        error = ""
        for left in reversed(range(self.tries)):
            pause_s = self.pause_s * 2 ** (self.tries - 1 - left)
            try:
                response = client.post(f"{self.url.rstrip('/')}/chat/completions", json=self._body(prompt))
            except httpx.HTTPError as failed:
                self.usage.count("timeout" if isinstance(failed, httpx.TimeoutException) else "unreachable")
                error = f"cannot be reached: {failed or type(failed).__name__}"
            else:
                status = response.status_code
                if status == 200:
                    return self._content(response)
                self.usage.count(str(status))
                error = f"answers {status}: {response.text[:200]}"
                if status in _REFUSED:
                    return NoReply(f"the judge {error}", f"{status}: {_words(response)}")
                if status not in (408, 409, 429) and status < 500:
                    break
                after = response.headers.get("retry-after", "")
                pause_s = max(pause_s, min(60.0, float(after))) if after.isdigit() else pause_s
            if left:
                time.sleep(pause_s)
        raise Interrupted(f"the judge {self.name} {error}; {_GO_ON}")

    def _body(self, prompt: str) -> dict[str, object]:
        body: dict[str, object] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        body |= {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name) is not None}
        return body if "max_completion_tokens" in body else body | {"max_tokens": self.max_tokens}

    def _content(self, response: httpx.Response) -> str | NoReply:
        try:
            data = response.json()
            text = str(data["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError):
            self.usage.count("unreadable")
            return NoReply(f"the judge's answer is no completion: {response.text[:60]!r}")
        self.usage.count("ok", data.get("usage"))
        return text


def _setting_problem(name: str, value: object) -> Problem | None:
    least, whole = _BOUNDS[name]
    optional = name in _OPTIONAL
    if value is None and optional:
        return None
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if fits and least <= cast("float", value) < math.inf:
        return None
    wanted = f"a {'whole ' if whole else ''}number of {least:g} or more{', or none' if optional else ''}"
    return Problem(f"judge {name}", f"cannot be {value!r:.60}", f"give {wanted}")


def _words(response: httpx.Response) -> str:
    """Return the message of an error, without the number of the request that some endpoints add."""
    try:
        error = response.json()["error"]
        words = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        words = response.text
    return _REQUEST_NUMBER.sub("", words)[:_SHOWN]


def _is_address(url: str) -> bool:
    try:
        return url.startswith(("http://", "https://")) and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False
