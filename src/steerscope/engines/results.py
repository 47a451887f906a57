"""What an engine returns: generations, events of a stream, and the job that a running text reports to.

They are not frozen: frozen ones would take twice as long to make, while a device waits.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from steerscope.capture.budget import Reservation
from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.engines.plan import Applied, Plan, Prompt
from steerscope.lenses.readings import Firing, Reading
from steerscope.specs.errors import InvalidRequest, Problem, RequestFailed

T = TypeVar("T")
FinishReason = Literal["stop", "length", "stop_string", "cancelled", "rule"]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids."""

    token_ids: Sequence[int]


PromptLike = str | TokenPrompt | Prompt  # text, ids, or what `tokenize` and `render` made of them


@dataclass(slots=True)
class Timings:
    """Seconds: waiting to be admitted, until the first token, and in all."""

    queued: float
    first_token: float
    total: float


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities as the model gives them, before penalties, temperature and filters: of the
    token that was sampled, and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Choice:
    """One completion."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | None
    seed: int
    timings: Timings
    capture: CaptureHandle | None
    readings: Sequence[Reading] = ()  # of the rows that were watched, prompt and generated
    firings: tuple[Firing, ...] = ()  # of rules, in the order of the rows
    rule: str | None = None  # which one ended it
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where they were asked for


def _first(field: T) -> T:
    """Return a property: this field of the first choice."""
    return property(lambda generation: field.__get__(generation.choices[0]))  # type: ignore


@dataclass(slots=True)
class Generation:
    """The answer to one prompt: `n` choices; all of the first one is also at the top (`text`, `rows`, `readings`, …).
    `steered` tells where each op really acted."""

    request_id: str
    prompt: Prompt
    choices: tuple[Choice, ...]
    steered: tuple[Applied, ...] = ()  # where each op really acted

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return a copy, made on demand: copies of many long prompts would delay all answers."""
        return list(self.prompt.token_ids)

    text = _first(Choice.text)
    token_ids = _first(Choice.token_ids)
    finish_reason = _first(Choice.finish_reason)
    stop_string = _first(Choice.stop_string)
    timings = _first(Choice.timings)
    capture = _first(Choice.capture)
    readings = _first(Choice.readings)
    firings = _first(Choice.firings)
    rule = _first(Choice.rule)

    @property
    def rows(self) -> Rows:
        """The captured rows of the first choice; an error when nothing was captured."""
        if self.capture is None:
            raise InvalidRequest([Problem("capture", "nothing was captured", "pass capture=Capture(...)")])
        return self.capture.fetch()


@dataclass(slots=True)
class TokenEvent:
    """One sampled token. The texts of all events of a choice concatenate to its text."""

    choice: int
    index: int
    token_id: int
    text: str
    reading: Reading | None = None  # of the row it was sampled from, if that row was watched
    readings: Sequence[Reading] = ()  # all that became known with it: with the first token, also the prompt's
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class RuleEvent:
    """A rule changed; the token it came with is the next event of the choice."""

    choice: int
    firing: Firing


@dataclass(slots=True)
class EndEvent:
    """The last event of a stream."""

    generation: Generation


Event = TokenEvent | RuleEvent | EndEvent
Outcome = TokenEvent | RuleEvent | Choice | RequestFailed  # what a running sequence reports: tokens, then its end
Sink = Callable[[Outcome], None]


@dataclass(slots=True)
class EngineJob:
    """A plan on its way through an engine. `report` may be called from any thread."""

    plan: Plan
    report: Sink
    stream: bool
    held: Reservation | None
    cancelled: bool = False
    abandoned: bool = False  # its call has ended: what it still reports is closed
    noticed: threading.Event = field(default_factory=threading.Event)  # its engine's: a job was cancelled

    def cancel(self) -> None:
        self.cancelled = True
        self.noticed.set()

    def fail(self, error: RequestFailed) -> None:
        if self.held:
            self.held.release()
        self.report(error)


def singles(plan: Plan) -> list[Plan]:
    """Return a plan for each of its n texts, with a seed of its own; a greedy text needs none."""
    sampling = plan.sampling
    if sampling.n == 1 and (sampling.seed is not None or sampling.greedy):
        return [plan]
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(48)
    return [
        replace(plan, choice=i, sampling=sampling.model_copy(update={"seed": (seed + i) % (1 << 63), "n": 1}))
        for i in range(sampling.n)
    ]


def assembled(plan: Plan, choices: list[Choice]) -> Generation:
    ordered = tuple(choices) if len(choices) == 1 else tuple(sorted(choices, key=lambda choice: choice.index))
    return Generation(plan.request_id, plan.prompt, ordered, plan.template.applied)
