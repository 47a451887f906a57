"""Bodies of the OpenAI routes, and the `steerscope` object in them.

A field that OpenAI's API has is known here. One that the engines cannot honour is taken at the value that changes
nothing and refused at any other; a field nobody knows is refused.
"""

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from steerscope.serving.fields import (
    NOTHING,
    Content,
    NoChoice,
    NoEffort,
    NoTools,
    OnlyText,
    Plain,
    Prompts,
    StopTexts,
    Unsupported,
    only,
    some,
)
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Steering
from steerscope.specs.tokens import Tokens
from steerscope.specs.watch import MOST_RULES, Rule, Watch

MOST_LOGPROBS = 20
MOST_PROMPTS = 128
MOST_CHOICES = 256  # of all prompts together


def _steering(value: object) -> object:
    """A vector's name stands for adding it once, where it has layers."""
    return Steering(ops=(Add(vector=value),)) if isinstance(value, str) else value


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


if TYPE_CHECKING:
    Steer = Steering
    Names = tuple[str, ...]
else:
    Steer = Annotated[Steering, BeforeValidator(_steering)]
    Names = Annotated[tuple[str, ...], BeforeValidator(_several), Field(max_length=64)]


class Asked(Spec):
    """What a request asks of steerscope. `project` names vectors on which each generated token's rows are projected;
    `prompt` selects tokens of the prompt that are told too, and projected."""

    steer: Steer | None = None
    capture: Capture | None = None
    watch: Watch | None = None
    rules: tuple[Rule, ...] = Field(default=(), max_length=MOST_RULES)
    project: Names = ()
    prompt: Tokens | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rules and self.watch is None:
            raise ValueError("rules need readings; add watch with the name of a pack")
        if self.rules and self.watch is not None and self.watch.rules:
            raise ValueError("rules are given twice; give them here or in watch")
        return self

    @property
    def whole_watch(self) -> Watch | None:
        if self.watch is None or not self.rules:
            return self.watch
        return Watch.parse({**dict(self.watch), "rules": self.rules})


class StreamOptions(Spec):
    include_usage: bool | None = False
    include_obfuscation: bool | None = None  # OpenAI pads chunks against listeners on the wire; here nothing is padded


class Body(Spec):
    """What both routes have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: StopTexts = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Unsupported = None
    # beyond OpenAI's, named as vLLM names them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    ignore_eos: bool | None = None
    steerscope: Asked | None = None

    @classmethod
    def read(cls, data: dict[str, object]) -> Self:
        """The body, or everything that is wrong with it, the limits of sampling included."""
        problems: list[Problem] = []
        body: Self | None = None
        try:
            body = cls.parse(data)
            problems += body.misfits()
        except InvalidRequest as error:
            problems += error.problems
        known = {problem.field.partition("[")[0] for problem in problems}
        try:
            _sampling(
                {name: value for name in _SAMPLING if name not in known and (value := data.get(name)) is not None}
            )
        except InvalidRequest as error:
            problems += error.problems
        if problems or body is None:
            raise InvalidRequest(problems)
        return body

    def misfits(self) -> list[Problem]:
        """Fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            return [Problem("stream_options", "nothing is streamed", "set stream, or leave it out")]
        return []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def most(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many tokens beside the chosen one are told with their log probabilities; None: none are told."""
        raise NotImplementedError

    def sampling(self, room: int) -> Sampling:
        """`room` is how many tokens fit when the body does not say; OpenAI samples at temperature 1 by default."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        most = max(1, room) if self.most is None else self.most
        return _sampling({"temperature": 1.0, **given, "max_tokens": most, "logprobs": self.alternatives})


_SAMPLING = ("temperature", "top_p", "n", "stop", "seed", "top_k", "min_p", "repetition_penalty", "repetition_window")
_SAMPLING += ("ignore_eos", "frequency_penalty", "presence_penalty", "max_tokens", "max_completion_tokens")


def _sampling(given: dict[str, Any]) -> Sampling:
    given = dict(given)
    if isinstance(given.get("seed"), int):
        given["seed"] %= 1 << 63  # OpenAI's seeds may be negative
    if given.get("top_k") == -1:  # vLLM's word for all
        given["top_k"] = 0
    renamed = given.pop("max_completion_tokens", None)
    if renamed is not None and "max_tokens" not in given:
        given["max_tokens"] = renamed
    return Sampling.parse(given)


class ChatMessage(Spec):
    role: str = Field(min_length=1)
    content: Content = None
    # what OpenAI's messages may have; an answer that is sent back has them as null
    name: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        extra = ("name", "refusal", "tool_calls", "tool_call_id", "function_call", "audio", "annotations")
        problems = [
            Problem(name, "cannot be shown to this model", "leave it out, or put it into the content")
            for name in extra
            if getattr(self, name) not in NOTHING
        ]
        if self.content is None:
            problems.append(Problem("content", "is missing", "give text"))
        if problems:
            raise InvalidRequest(problems)
        return self

    def plain(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


class ChatBody(Body):
    messages: Annotated[tuple[ChatMessage, ...], BeforeValidator(some)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Plain] = Field(default_factory=dict)
    # these say nothing about the answer
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    # these would
    tools: NoTools = None
    functions: NoTools = None
    tool_choice: NoChoice = None
    function_call: NoChoice = None
    response_format: OnlyText = None
    modalities: OnlyText = None
    audio: Unsupported = None
    prediction: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Annotated[Any, only((None,), "leave it out: it is not supported")] = None
    reasoning_effort: NoEffort = None
    verbosity: NoEffort = None

    def misfits(self) -> list[Problem]:
        problems = super().misfits()
        if self.top_logprobs and not self.logprobs:
            problems.append(Problem("top_logprobs", "needs logprobs", "set logprobs to true"))
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            problems.append(Problem("max_completion_tokens", "differs from max_tokens", "give one of them"))
        return problems

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False
    best_of: int | None = None
    suffix: Annotated[Any, only((None, ""), "leave it out: text is only written at the end")] = None

    def misfits(self) -> list[Problem]:
        problems = super().misfits()
        if self.best_of not in (None, self.n or 1):
            problems.append(Problem("best_of", f"{self.best_of} cannot be honoured", "leave it out, and use n"))
        if self.echo and self.logprobs is not None:
            problems.append(Problem("echo", "a prompt has no log probabilities here", "leave echo or logprobs out"))
        if not self.prompt or len(self.prompts) > MOST_PROMPTS:
            what = f"{len(self.prompts)} prompts" if self.prompt else "there is none"
            problems.append(Problem("prompt", what, f"give 1 to {MOST_PROMPTS}"))
        elif (choices := len(self.prompts) * (self.n or 1)) > MOST_CHOICES:
            what = f"{choices} choices of {len(self.prompts)} prompts"
            problems.append(Problem("n", what, f"ask for at most {MOST_CHOICES} in one request"))
        return problems

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
