"""Every error a user can meet, and how problems of one request are gathered into one message.

A `Problem` names the field, what is wrong with it (with the limit), and the remedy. `InvalidRequest` carries all
problems of a request at once; pydantic's own errors are translated into the same form.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic_core import ErrorDetails

if TYPE_CHECKING:  # the result type lives above; only its name is needed here
    from steerscope.engines.generation import Generation


class SteerscopeError(Exception):
    """Base of everything steerscope raises on purpose; its text is meant for the user."""


@dataclass(frozen=True, slots=True)
class Problem:
    field: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.what}; {self.remedy}" if self.field else f"{self.what}; {self.remedy}"

    def under(self, prefix: str) -> "Problem":
        """The same problem, seen from the object that holds the field."""
        if not prefix:
            return self
        if not self.field:
            return Problem(prefix, self.what, self.remedy)
        joint = "" if self.field.startswith("[") else "."
        return Problem(f"{prefix}{joint}{self.field}", self.what, self.remedy)


class InvalidRequest(SteerscopeError, ValueError):
    """A request that cannot be honoured, with every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(
            lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} problems:", *(f"  {x}" for x in lines)])
        )

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)  # an exception is copied through its arguments, here the text


class ModelNotFound(SteerscopeError):
    """A model name or path that leads nowhere."""


class UnsupportedModel(SteerscopeError):
    """A model whose structure is not understood; the text says what was looked for."""


class BadFile(SteerscopeError):
    """A file that is truncated, hostile, or not what it claims to be."""


class RequestFailed(SteerscopeError):
    """A valid request that failed while it ran; other requests are not affected.

    `completed` holds the generations of the same call, in order, None for those that failed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.completed: Sequence[Generation | None] = ()


class Unsteerable(RequestFailed):
    """A request whose steering leaves the model's numbers: its own fault, found while it ran."""


class CapacityExceeded(SteerscopeError):
    """A fixed budget (slots, rows, bytes) is used up."""


class CaptureClosed(SteerscopeError):
    """Rows that are no longer there: the handle was closed or expired."""


class EngineClosed(SteerscopeError):
    """The engine was closed."""


class TimedOut(SteerscopeError, TimeoutError):
    """An engine did not do something in time; the text says what, and what may help."""


class PackNotLoaded(SteerscopeError):
    """A lens pack that could not be brought to the device."""


_REMEDIES = {
    "missing": "add it",
    "extra_forbidden": "remove it or correct its name",
    "finite_number": "give a finite number",
    "greater_than": "choose a larger value",
    "greater_than_equal": "choose a larger value",
    "less_than": "choose a smaller value",
    "less_than_equal": "choose a smaller value",
    "too_long": "remove some",
    "too_short": "give more",
    "union_tag_invalid": "choose one of them",
    "union_tag_not_found": "add the field",
    "literal_error": "choose one of them",
}


_MOST_TOLD = 1000


def _field(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _problems(detail: ErrorDetails) -> list[Problem]:
    # A tagged union puts the tag into the location ("ops[0].add.scale"): keep only what the user wrote.
    parts = detail["loc"]
    tags = [i for i in range(1, len(parts)) if isinstance(parts[i - 1], int) and parts[i] in ("add", "cap", "ablate")]
    field = _field(tuple(part for i, part in enumerate(parts) if i not in tags))
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, InvalidRequest):
        return [problem.under(field) for problem in inner.problems]
    if isinstance(inner, ValueError) and "; " in str(inner):
        what, _, remedy = str(inner).rpartition("; ")  # our own say "what; remedy", and may quote a "; " before it
    else:
        what = str(inner) if isinstance(inner, ValueError) else detail["msg"]
        shown = repr(detail["input"])
        shown = shown if len(shown) <= 60 else shown[:57] + "…"
        if detail["type"] not in ("missing", "extra_forbidden"):
            what = f"{what[0].lower()}{what[1:]}, got {shown}"
        remedy = _REMEDIES.get(detail["type"], "correct the value")
    return [Problem(field, what, remedy)]


def problems_of(error: ValidationError) -> list[Problem]:
    """Translate pydantic's errors; an `InvalidRequest` raised by a nested spec is unfolded in place. Too many are only
    counted: a list of a million wrong items must not cost a million messages."""
    if error.error_count() > _MOST_TOLD:
        return [Problem("", f"there are {error.error_count()} problems, too many to list", "correct the whole shape")]
    return [problem for detail in error.errors() for problem in _problems(detail)]
