"""All errors of steerscope, and the problems of one request in one message.

A `Problem` names the field, the fault with its limit, and the remedy. `InvalidRequest` holds all problems of a request;
pydantic's own errors are translated into the same form.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails


class SteerscopeError(Exception):
    """Base of all errors that steerscope raises on purpose. The text is written for users."""


@dataclass(frozen=True, slots=True)
class Problem:
    field: str
    what: str
    remedy: str

    @classmethod
    def of(cls, field: str, error: ValueError) -> "Problem":
        """Return the problem whose text is "what; remedy", where what may quote a "; "."""
        what, semicolon, remedy = str(error).rpartition("; ")
        return cls(field, what, remedy) if semicolon else cls(field, remedy, "correct the value")

    def __str__(self) -> str:
        return f"{self.field}: {self.what}; {self.remedy}" if self.field else f"{self.what}; {self.remedy}"

    def under(self, prefix: str) -> "Problem":
        """Return the problem with the field's name put under that of its object."""
        if not prefix:
            return self
        if not self.field:
            return Problem(prefix, self.what, self.remedy)
        joint = "" if self.field.startswith("[") else "."
        return Problem(f"{prefix}{joint}{self.field}", self.what, self.remedy)


class InvalidRequest(SteerscopeError, ValueError):
    """A request that is refused, with all reasons."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(
            lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} problems:", *(f"  {x}" for x in lines)])
        )

    @classmethod
    def of(cls, field: str, what: str, remedy: str) -> Self:
        """Return the refusal for a single problem."""
        return cls([Problem(field, what, remedy)])

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)  # an exception is copied by its arguments, which is the text here


class NameInUse(InvalidRequest):
    """A name that a running request or a file already has."""


class ModelNotFound(SteerscopeError):
    """A model name or path that does not exist."""


class UnsupportedModel(SteerscopeError):
    """A model whose structure is not supported; the text says what was expected."""


class BadFile(SteerscopeError):
    """A file that is truncated, hostile, or of another format than it declares."""


class RequestFailed(SteerscopeError):
    """A valid request that failed while it ran; other requests are not affected.

    `completed` holds the `Generation`s of the same call, in order, with None for those that failed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.completed: Sequence[Any] = ()


class Unsteerable(RequestFailed):
    """A request whose steering produced NaN or inf."""


class CapacityExceeded(SteerscopeError):
    """A fixed budget (slots, rows, bytes) is used up."""


class CaptureClosed(SteerscopeError):
    """Rows that were dropped because the handle was closed or expired."""


class SaveFailed(SteerscopeError):
    """Rows that could not be saved under the request's name; its text is not affected."""


class EngineClosed(SteerscopeError):
    """The engine was closed."""


class TimedOut(SteerscopeError, TimeoutError):
    """An operation of an engine timed out; the text names it and a remedy."""


class PackNotLoaded(SteerscopeError):
    """A lens pack that could not be loaded to the device."""


# Remedy by kind of pydantic error, or by the kind's first word; fields are filled from the error's context.
_WANTED = {
    "string": "text",
    "string_unicode": "text in UTF-8",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "int": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "bytes": "bytes",
    **dict.fromkeys(("list", "tuple", "set", "frozen_set_type", "iterable"), "a list"),
    **dict.fromkeys(("dict", "mapping", "model"), "an object"),
    "path": "a path",
    "none": "null",
    "is_instance_of": "a {class}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}
# Fault and remedy of the other kinds.
_OTHERS = {
    "missing": ("is missing", "add it"),
    "extra_forbidden": ("is not known", "remove it or correct its name"),
    "too_short": ("has {actual_length} items", "give at least {min_length}"),
    "too_long": ("has too many items", "give at most {max_length}"),
    "literal_error": ("{input} is not {expected}", "choose one of them"),
    "enum": ("{input} is not {expected}", "choose one of them"),
    "union_tag_invalid": ("{discriminator} is {tag!r}, not one of {expected_tags}", "choose one of them"),
    "union_tag_not_found": ("{discriminator} is missing", "add the field"),
    "json_type": ("{input} is not JSON text", "give text"),
    "recursion_loop": ("holds itself", "remove the inner one"),
}
_UNKNOWN = ("cannot be {input}", "correct the value")
_WIDE = 1e9
_MOST_LISTED = 1000


def _field(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if part == "[key]":  # the key of an object, whose name was the part before
            continue
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _problems(detail: ErrorDetails) -> list[Problem]:
    # A tagged union puts its tag into the location ("ops[0].add.scale"), which the user did not write.
    parts = detail["loc"]
    tags = [i for i in range(1, len(parts)) if isinstance(parts[i - 1], int) and parts[i] in ("add", "cap", "ablate")]
    field = _field(tuple(part for i, part in enumerate(parts) if i not in tags))
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, InvalidRequest):
        return [problem.under(field) for problem in inner.problems]
    if isinstance(inner, ValueError):
        return [Problem.of(field, inner)]
    return [Problem(field, *_fault(detail))]


def _fault(detail: ErrorDetails) -> tuple[str, str]:
    """Return the fault and the remedy."""
    kind = detail["type"]
    shown = repr(detail["input"])
    context = {name: _plain(value) for name, value in detail.get("ctx", {}).items()}
    context["input"] = shown if len(shown) <= 60 else shown[:57] + "…"
    if kind == "json_invalid":
        return not_json(context["error"]), "correct it"
    wanted = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0])
    what, remedy = _OTHERS.get(kind, _UNKNOWN) if wanted is None else ("cannot be {input}", f"give {wanted}")
    return what.format_map(context), remedy.format_map(context)


def _plain(limit: object) -> object:
    """Return a limit of 1.0 as 1."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() and abs(limit) < _WIDE else limit


def not_json(error: object) -> str:
    """Return where a text stops being JSON, from a parser's error."""
    place = re.search(r"line (\d+) column (\d+)", str(error))
    return f"is not JSON from line {place[1]}, column {place[2]} on" if place else "is not JSON"


def problems_of(error: ValidationError) -> list[Problem]:
    """Translate pydantic's errors and unfold those of nested specs. More than 1,000 are only counted, because a long
    list of wrong items would cost as many messages."""
    if error.error_count() > _MOST_LISTED:
        return [Problem("", f"there are {error.error_count()} problems, too many to list", "correct the whole shape")]
    return problems_in(error.errors())


def problems_in(details: Sequence[Any]) -> list[Problem]:
    """Translate a list of pydantic's errors. A list with wrong items is not also reported as too short."""
    wrong = {detail["loc"][:-1] for detail in details if detail["loc"]}
    listed = [one for one in details if not (one["type"] == "too_short" and one["loc"] in wrong)]
    return [problem for detail in listed for problem in _problems(detail)]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
