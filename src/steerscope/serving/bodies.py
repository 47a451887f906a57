"""Bodies of the OpenAI routes, and the `steerscope` object in them.

All fields of OpenAI's API are known here. One that the engines do not support is accepted at the value that changes
nothing and refused at any other; an unknown field is refused.
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
    SomeMessages,
    StopTexts,
    Unsupported,
    only,
)
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Steering
from steerscope.specs.tokens import Tokens
from steerscope.specs.watch import MOST_RULES, Rule, Watch

MAX_LOGPROBS = 20
MAX_PROMPTS = 128
MAX_CHOICES = 256  # of all prompts together


def _vector_to_steering(value: object) -> object:
    """Read a vector's name as adding it once, at its own layers."""
    return Steering(ops=(Add(vector=value),)) if isinstance(value, str) else value


def _one_name(value: object) -> object:
    return (value,) if isinstance(value, str) else value


if TYPE_CHECKING:
    Steer = Steering
    Names = tuple[str, ...]
else:
    Steer = Annotated[Steering, BeforeValidator(_vector_to_steering)]
    Names = Annotated[tuple[str, ...], BeforeValidator(_one_name), Field(max_length=64)]


class SteerscopeOptions(Spec):
    """The `steerscope` object of a request. `project` names vectors on which each generated token's rows are projected;
    `prompt` selects tokens of the prompt that are returned too, and projected."""

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
    include_obfuscation: bool | None = None  # accepted; chunks are never padded here


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
    # extensions, with vLLM's names
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    ignore_eos: bool | None = None
    steerscope: SteerscopeOptions | None = None

    @classmethod
    def read(cls, data: dict[str, object]) -> Self:
        """Return the body, or raise every problem in it, the limits of sampling included."""
        problems: list[Problem] = []
        body: Self | None = None
        try:
            body = cls.parse(data)
            problems += body.misfits()
        except InvalidRequest as error:
            problems += error.problems
        wrong = {problem.field.partition("[")[0] for problem in problems}
        try:
            _sampling({name: data.get(name) for name in _SAMPLING if name not in wrong})
        except InvalidRequest as error:
            problems += error.problems
        if problems or body is None:
            raise InvalidRequest(problems)
        return body

    def misfits(self) -> list[Problem]:
        """Return the problems of fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            return [Problem("stream_options", "nothing is streamed", "set stream, or leave it out")]
        return []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def n_logprobs(self) -> int | None:
        """The number of alternative tokens with log probabilities; None: no log probabilities at all."""
        raise NotImplementedError

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling; `max_tokens` counts when the body has none. OpenAI's default temperature is 1."""
        given = {name: getattr(self, name, None) for name in _SAMPLING}
        return _sampling({**given, "logprobs": self.n_logprobs}, temperature=1.0, max_tokens=max(1, max_tokens))


_SAMPLING = ("temperature", "top_p", "n", "stop", "seed", "top_k", "min_p", "repetition_penalty", "repetition_window")
_SAMPLING += ("ignore_eos", "frequency_penalty", "presence_penalty", "max_tokens", "max_completion_tokens")


def _sampling(given: dict[str, Any], **defaults: object) -> Sampling:
    """Read OpenAI's and vLLM's fields of sampling; null is a field that is left out."""
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(given.get("seed"), int):
        given["seed"] %= 1 << 63  # OpenAI's seeds may be negative
    if given.get("top_k") == -1:  # vLLM's value for all
        given["top_k"] = 0
    if "max_completion_tokens" in given:
        given.setdefault("max_tokens", given.pop("max_completion_tokens"))
    return Sampling.parse(defaults | given)


class ChatMessage(Spec):
    role: str = Field(min_length=1)
    content: Content = None
    # fields of OpenAI's messages; an answer that is sent back has them as null
    name: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [
            Problem(name, "cannot be shown to this model", "leave it out, or put it into the content")
            for name, value in self
            if name not in ("role", "content") and value not in NOTHING
        ]
        if self.content is None:
            problems.append(Problem("content", "is missing", "give text"))
        if problems:
            raise InvalidRequest(problems)
        return self

    def plain(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


class ChatBody(Body):
    messages: Annotated[tuple[ChatMessage, ...], SomeMessages]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Plain] = Field(default_factory=dict)
    # accepted without effect on the answer
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    # these would change the answer
    tools: NoTools = None
    functions: NoTools = None
    tool_choice: NoChoice = None
    function_call: NoChoice = None
    response_format: OnlyText = None
    modalities: OnlyText = None
    audio: Unsupported = None
    prediction: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Annotated[Any, only((None,), "leave it out")] = None
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
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    best_of: int | None = None
    suffix: Annotated[Any, only((None, ""), "leave it out: text is only written at the end")] = None

    def misfits(self) -> list[Problem]:
        problems = super().misfits()
        if self.best_of not in (None, self.n or 1):
            problems.append(Problem("best_of", f"{self.best_of} is not supported", "leave it out, and use n"))
        if self.echo and self.logprobs is not None:
            problems.append(Problem("echo", "a prompt has no log probabilities here", "leave echo or logprobs out"))
        if not self.prompt or len(self.prompts) > MAX_PROMPTS:
            what = f"{len(self.prompts)} prompts" if self.prompt else "there is none"
            problems.append(Problem("prompt", what, f"give 1 to {MAX_PROMPTS}"))
        elif (choices := len(self.prompts) * (self.n or 1)) > MAX_CHOICES:
            what = f"{choices} choices of {len(self.prompts)} prompts"
            problems.append(Problem("n", what, f"ask for at most {MAX_CHOICES} in one request"))
        return problems

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs
