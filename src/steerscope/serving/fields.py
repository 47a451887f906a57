"""Kinds of fields in the bodies of the OpenAI routes.

A field that the engines cannot honour is taken at values that change nothing, and refused with a remedy otherwise.
Where a field may have several shapes, a wrong one is one problem, not one per shape.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest

MOST_MESSAGES = 4096
MOST_PARTS = 256  # of a message


def only(accepted: tuple[object, ...], remedy: str) -> AfterValidator:
    """A field that can only be left at values that change nothing."""

    def check(value: object) -> object:
        if value in accepted:
            return value
        raise ValueError(f"{value!r:.60} cannot be honoured; {remedy}")

    return AfterValidator(check)


NOTHING: tuple[object, ...] = (None, [], {})
Unsupported = Annotated[Any, only(NOTHING, "leave it out: it is not supported")]
NoTools = Annotated[Any, only(NOTHING, "leave it out: tools are not supported")]
NoChoice = Annotated[Any, only((None, "none", "auto"), "leave it out: tools are not supported")]
OnlyText = Annotated[Any, only((*NOTHING, "text", ["text"], {"type": "text"}), "leave it out: answers are plain text")]
NoEffort = Annotated[Any, only((None,), "leave it out, or say it in a message or in chat_template_kwargs")]


def shaped(fits: Callable[[object], bool], wanted: str) -> BeforeValidator:
    """One problem where a union of types would tell one per type."""

    def check(value: object) -> object:
        if fits(value):
            return value
        raise ValueError(f"{value!r:.60} is not {wanted}; give {wanted}")

    return BeforeValidator(check)


def _texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is int for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or _texts(value)


def _is_stop(value: object) -> bool:
    return value is None or _is_text(value)


def _is_prompt(value: object) -> bool:
    several = isinstance(value, list | tuple) and bool(value) and all(_ids(item) for item in value)
    return _is_text(value) or _ids(value) or several


def some(value: object) -> object:
    if isinstance(value, list | tuple) and not 0 < len(value) <= MOST_MESSAGES:
        what = f"there are {len(value)} messages" if value else "there are no messages"
        raise ValueError(f"{what}; give 1 to {MOST_MESSAGES}")
    return value


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


Plain = Annotated[str | int | float | bool | None, shaped(_is_plain, "a text, a finite number, true, false or null")]
StopTexts = Annotated[str | tuple[str, ...] | None, shaped(_is_stop, "a text or a list of texts")]
Prompts = Annotated[
    str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...],
    shaped(_is_prompt, "a text, a list of token ids, or a list of either"),
]


class Part(Spec):
    type: Literal["text"]
    text: str


def _content(value: object) -> object:
    """Text, or text in parts."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) > MOST_PARTS:
        raise ValueError(f"the content has {len(value)} parts; join them to at most {MOST_PARTS}")
    texts, problems = [], []
    for i, part in enumerate(value):
        try:
            texts.append(Part.parse(part).text)
        except InvalidRequest as error:
            problems += [problem.under(f"[{i}]") for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return "".join(texts)


_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_ANY_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
Content = Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_ANY_CONTENT)]
