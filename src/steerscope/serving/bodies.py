"""Bodies of requests, and the `steerscope` object in them.

A body is JSON whatever its content type says, and a long one is read in a thread, where it holds up no other request.

All fields of OpenAI's API are known here. One that the engines do not support is accepted at values that change
nothing, and refused with a remedy at any other; an unknown field is refused. Where a field may have several shapes, a
wrong one is one problem, not one per shape.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import FastAPI, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from steerscope.serving.errors import ApiError
from steerscope.specs.base import Spec, one_or_many
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem, not_json
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Steering
from steerscope.specs.tokens import Tokens
from steerscope.specs.watch import MOST_RULES, Rule, Watch

T = TypeVar("T")
_LONG = 20_000  # characters that take longer than a step of the engine
_REFERENCE = "#/components/schemas/{model}"
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_CHOICES = 256  # of all prompts together
_MAX_PARTS = 256  # of a message


# --- kinds of fields


def only(accepted: tuple[object, ...], remedy: str) -> AfterValidator:
    """Accept only values that change nothing."""

    def check(value: object) -> object:
        if value in accepted:
            return value
        raise ValueError(f"{value!r:.60} is not supported; {remedy}")

    return AfterValidator(check)


_NOTHING: tuple[object, ...] = (None, [], {})
_TEXT = (*_NOTHING, "text", ["text"], {"type": "text"})
Unsupported = Annotated[Any, only(_NOTHING, "leave it out")]
NotShown = Annotated[Any, only(_NOTHING, "leave it out, or put it into the content")]
NoTools = Annotated[Any, only(_NOTHING, "leave it out: there are no tools")]
NoChoice = Annotated[Any, only((None, "none", "auto"), "leave it out: there are no tools")]
OnlyText = Annotated[Any, only(_TEXT, "leave it out: answers are plain text")]
NoEffort = Annotated[Any, only((None,), "leave it out, or say it in a message or in chat_template_kwargs")]


def shaped(wanted: str) -> WrapValidator:
    """Report one problem where a union of types would report one per type."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"{value!r:.60} is not {wanted}; give {wanted}") from None

    return WrapValidator(check)


# A long list of wrong items must not make as many errors.
_Ids = Annotated[tuple[StrictInt, ...], Field(fail_fast=True)]
_Texts = Annotated[tuple[str, ...], Field(fail_fast=True)]
_IdLists = Annotated[tuple[_Ids, ...], Field(fail_fast=True)]
Plain = Annotated[str | bool | StrictInt | FiniteFloat | None, shaped("a text, a finite number, true, false or null")]
Prompts = Annotated[str | _Ids | _Texts | _IdLists, shaped("a text, a list of token ids, or a list of either")]


def _count_messages(value: object) -> object:
    if isinstance(value, list | tuple) and not 0 < len(value) <= MAX_MESSAGES:
        what = f"there are {len(value)} messages" if value else "there are no messages"
        raise ValueError(f"{what}; give 1 to {MAX_MESSAGES}")
    return value


class TextPart(Spec):
    type: Literal["text"]
    text: str


def _joined(value: object) -> object:
    """Join the parts of a content that is a list."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) > _MAX_PARTS:
        raise ValueError(f"the content has {len(value)} parts; join them to at most {_MAX_PARTS}")
    texts = []
    problems = []
    for i, part in enumerate(value):
        try:
            texts.append(TextPart.parse(part).text)
        except InvalidRequest as error:
            problems += [problem.under(f"[{i}]") for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return "".join(texts)


_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_ANY_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
Content = Annotated[str, BeforeValidator(_joined), WithJsonSchema(_ANY_CONTENT)]


def _vector_to_steering(value: object) -> object:
    """Read a vector's name as adding it once, at its own layers."""
    return Steering(ops=(Add(vector=value),)) if isinstance(value, str) else value


Steer = Annotated[Steering, BeforeValidator(_vector_to_steering)]
Names = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(max_length=64)]


# --- bodies


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


class Body(Sampling):
    """What both routes have in common: the sampling, with OpenAI's defaults and vLLM's names, and the options."""

    max_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment] (the default depends on the prompt)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    logit_bias: Unsupported = None
    steerscope: SteerscopeOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, data: object) -> object:
        """Drop fields that are null, which are as good as left out, and read values of OpenAI and vLLM."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}
        if isinstance(seed := given.get("seed"), int):
            given["seed"] = seed % (1 << 63)  # OpenAI's seeds may be negative
        if given.get("top_k") == -1:  # vLLM's value for all
            given["top_k"] = 0
        return given

    @classmethod
    def read(cls, data: object) -> Self:
        """Return the body, or raise every problem in it."""
        body = cls.parse(data)
        if problems := body.misfits():
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

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling; `max_tokens` counts when the body has none."""
        given = {name: getattr(self, name) for name in Sampling.model_fields}
        return Sampling(**{**given, "max_tokens": self.max_tokens or max(1, max_tokens)})


class ChatMessage(Spec):
    role: str = Field(min_length=1)
    content: Content
    # fields of OpenAI's messages; an answer that is sent back has them as null
    name: NotShown = None
    refusal: NotShown = None
    tool_calls: NotShown = None
    tool_call_id: NotShown = None
    function_call: NotShown = None
    audio: NotShown = None
    annotations: NotShown = None

    def plain(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatBody(Body):
    messages: Annotated[tuple[ChatMessage, ...], BeforeValidator(_count_messages)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False  # type: ignore[assignment] (top_logprobs is the number)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    continue_final_message: bool = False
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

    def sampling(self, max_tokens: int) -> Sampling:
        found = super().sampling(self.max_completion_tokens or max_tokens)
        return found.model_copy(update={"logprobs": (self.top_logprobs or 0) if self.logprobs else None})


class CompletionBody(Body):
    prompt: Prompts
    echo: bool = False
    best_of: int | None = None
    suffix: Annotated[Any, only((None, ""), "leave it out: text is only written at the end")] = None

    def misfits(self) -> list[Problem]:
        problems = super().misfits()
        if self.best_of not in (None, self.n):
            problems.append(Problem("best_of", f"{self.best_of} is not supported", "leave it out, and use n"))
        if self.echo and self.logprobs is not None:
            problems.append(Problem("echo", "a prompt has no log probabilities here", "leave echo or logprobs out"))
        if not self.prompt or len(self.prompts) > MAX_PROMPTS:
            what = f"{len(self.prompts)} prompts" if self.prompt else "there is none"
            problems.append(Problem("prompt", what, f"give 1 to {MAX_PROMPTS}"))
        elif (choices := len(self.prompts) * self.n) > MAX_CHOICES:
            what = f"{choices} choices of {len(self.prompts)} prompts"
            problems.append(Problem("n", what, f"ask for at most {MAX_CHOICES} in one request"))
        return problems

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]


# --- reading them, and their OpenAPI description


def _json(data: bytes) -> object:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        what = "is nested too deep" if "recursion" in str(error) else not_json(error)
        raise ApiError(400, f"the body {what}; correct it", "invalid_json") from None


async def in_thread_if_long(work: Callable[[], T], n_characters: int) -> T:
    return await asyncio.to_thread(work) if n_characters > _LONG else work()


async def json_body(request: Request, read: Callable[[object], T]) -> T:
    """Return what `read` makes of the body's JSON."""
    data = await request.body()
    return await in_thread_if_long(lambda: read(_json(data)), len(data))


def body_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a JSON body that is one of these models, which `describe` defines."""
    schema = {"anyOf": [{"$ref": _REFERENCE.format(model=kind.__name__)} for kind in kinds]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *bodies: type[BaseModel]) -> dict[str, Any]:
    """Return the description of an app and the models of its bodies, made at the first call."""
    if app.openapi_schema is None:
        found = FastAPI.openapi(app)
        _, models = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_REFERENCE)
        found["components"]["schemas"] |= models["$defs"]
    assert app.openapi_schema is not None
    return app.openapi_schema
