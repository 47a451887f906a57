"""Kinds of fields in the bodies of the OpenAI routes.

A field that the engines do not support is accepted at values that change nothing, and refused with a remedy otherwise.
Where a field may have several shapes, a wrong one is one problem, not one per shape.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest

MAX_MESSAGES = 4096
_MAX_PARTS = 256  # of a message


def only(accepted: tuple[object, ...], remedy: str) -> AfterValidator:
    """Accept only values that change nothing."""

    def check(value: object) -> object:
        if value in accepted:
            return value
        raise ValueError(f"{value!r:.60} is not supported; {remedy}")

    return AfterValidator(check)


NOTHING: tuple[object, ...] = (None, [], {})
Unsupported = Annotated[Any, only(NOTHING, "leave it out")]
NoTools = Annotated[Any, only(NOTHING, "leave it out: there are no tools")]
NoChoice = Annotated[Any, only((None, "none", "auto"), "leave it out: there are no tools")]
OnlyText = Annotated[Any, only((*NOTHING, "text", ["text"], {"type": "text"}), "leave it out: answers are plain text")]
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
StopTexts = Annotated[str | _Texts | None, shaped("a text or a list of texts")]
Prompts = Annotated[str | _Ids | _Texts | _IdLists, shaped("a text, a list of token ids, or a list of either")]


def _count_messages(value: object) -> object:
    if isinstance(value, list | tuple) and not 0 < len(value) <= MAX_MESSAGES:
        what = f"there are {len(value)} messages" if value else "there are no messages"
        raise ValueError(f"{what}; give 1 to {MAX_MESSAGES}")
    return value


SomeMessages = BeforeValidator(_count_messages)


class TextPart(Spec):
    type: Literal["text"]
    text: str


def _joined(value: object) -> object:
    """Join the parts of a content that is a list."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) > _MAX_PARTS:
        raise ValueError(f"the content has {len(value)} parts; join them to at most {_MAX_PARTS}")
    texts, problems = [], []
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
Content = Annotated[str | None, BeforeValidator(_joined), WithJsonSchema(_ANY_CONTENT)]
