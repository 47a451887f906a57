"""Answers of a server as values: whole answers, pieces of a stream, events of jobs, and errors.

`steerscope.client` exports them without the prefix: `Answer`, `Choice`, `Concept`, `Firing`, `Reading` and `Piece`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field, StrictInt, StrictStr, TypeAdapter
from pydantic.fields import FieldInfo

from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

T = TypeVar("T")
Json = dict[str, Any]  # an object as it came over the wire
DONE = "[DONE]"


class ServerError(SteerscopeError):
    """The server failed, or could not be reached (status 0)."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def _named(*path: str) -> FieldInfo:
    """Return a field whose name on the wire is another one, in an object or at the end of a path of them."""
    return Field(validation_alias=AliasPath(*path))


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. The texts of a choice's tokens concatenate to its text."""

    index: Annotated[int, _named("i")]
    id: int
    text: Annotated[str, _named("t")]


@dataclass(frozen=True, slots=True)
class ServerConcept:
    id: str
    name: str
    path: tuple[str, ...]
    score: float


@dataclass(frozen=True, slots=True)
class ServerReading:
    """The top concepts of one row, best first. `token_index` counts generated tokens; None: a row of the prompt."""

    position: int
    token_index: int | None
    concepts: Annotated[tuple[ServerConcept, ...], _named("top")]


@dataclass(frozen=True, slots=True)
class ServerFiring:
    """A rule that fired, or a switched steering that went off again."""

    rule: Annotated[str, _named("name")]
    action: str
    position: int
    score: float


@dataclass(frozen=True, slots=True)
class CaptureRef:
    """Rows that the server keeps for a limited time; `client.rows(ref)` downloads them."""

    id: str
    rows: int
    bytes: int
    sites: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A part of one choice, from one chunk of a stream. The text is empty while a token's text is not certain: it may
    end in an unfinished character or begin a stop string."""

    choice: int
    text: str
    tokens: tuple[Token, ...] = ()
    readings: tuple[ServerReading, ...] = ()
    firings: tuple[ServerFiring, ...] = ()


_TEXT = AliasChoices("text", AliasPath("message", "content"), AliasPath("delta", "content"))


@dataclass(frozen=True, slots=True)
class ServerChoice:
    index: StrictInt
    text: Annotated[StrictStr, Field(validation_alias=_TEXT), BeforeValidator(lambda text: text or "")] = ""
    finish_reason: str | None = None
    tokens: Annotated[tuple[Token, ...], _named("steerscope", "tokens")] = ()
    readings: Annotated[tuple[ServerReading, ...], _named("steerscope", "readings")] = ()
    firings: Annotated[tuple[ServerFiring, ...], _named("steerscope", "rules")] = ()
    capture: Annotated[CaptureRef | None, _named("steerscope", "captures")] = None
    projections: Annotated[  # vector → layer → by token; the last token has no row
        Mapping[str, Mapping[int, list[float | None]]], _named("steerscope", "projections")
    ] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def _first(field: T) -> T:
    """Return a property: this field of the first choice."""
    return property(lambda answer: field.__get__(answer.choices[0]))  # type: ignore


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer to one request: `n` choices. Attributes of the first choice are also attributes of the answer."""

    id: str
    model: str
    choices: tuple[ServerChoice, ...]
    usage: Usage | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    text = _first(ServerChoice.text)
    finish_reason = _first(ServerChoice.finish_reason)
    readings = _first(ServerChoice.readings)
    firings = _first(ServerChoice.firings)
    capture = _first(ServerChoice.capture)


@dataclass(frozen=True, slots=True)
class JobRef:
    """A request that runs to its end at the server. A client can read its events again from any of them."""

    id: Annotated[str, _named("job_id")]
    sse_url: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`started`, `token`, `reading`, `rule`, `metrics`; the last is `end` or `error`. A stream resumes after `id`."""

    name: str
    data: Json
    id: str | None


# --- from the wire

_ANSWER = TypeAdapter(ServerAnswer)
_CHOICE = TypeAdapter(ServerChoice)
_USAGE = TypeAdapter(Usage | None)
job_of = TypeAdapter(JobRef).validate_python


@contextmanager
def understood() -> Iterator[None]:
    """Raise a ServerError for every answer of an unknown form: another server may be at that address."""
    try:
        yield
    except SteerscopeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"the answer was not understood ({type(error).__name__}: {str(error)[:100]}): is that steerscope serve?"
        raise ServerError(0, what) from None


def parsed(content: bytes, read: Callable[[Json], Any] | None) -> Any:
    """Return a JSON body as `read` converts it; an empty body is an empty object."""
    with understood():
        found = json.loads(content) if content else {}
        return read(found) if read else found


def answer_of(given: Json) -> ServerAnswer:
    """Read an answer that was not streamed."""
    with understood():
        return _ANSWER.validate_python(given)


@dataclass(frozen=True, slots=True)
class ServerEvent:
    data: str
    event: str | None = None
    id: str | None = None


class EventReader:
    """Turns lines into server-sent events. Comments and events without data are skipped."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> ServerEvent | None:
        """Return the event that this line ends."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name:
                self._fields[name] = value
            return None
        data = self._data
        fields = self._fields
        self._data = []
        self._fields = {}
        return ServerEvent("\n".join(data), fields.get("event"), fields.get("id")) if data else None


def job_event(event: ServerEvent) -> list[JobEvent]:
    """Return the event of a job, or nothing at the end of the stream."""
    if event.data == DONE:
        return []
    with understood():
        return [JobEvent(event.event or "message", json.loads(event.data), event.id)]


class Gathered:
    """Gathers the chunks of a stream into an answer."""

    def __init__(self) -> None:
        self._id = self._model = ""
        self._usage: Usage | None = None
        self._parts: dict[int, list[ServerChoice]] = {}

    def read(self, event: ServerEvent) -> list[StreamPiece] | list[ServerAnswer]:
        """Return the pieces in one event, and at the end of the stream the answer."""
        if event.data == DONE:
            return [self.answer()]
        with understood():
            return self.add(json.loads(event.data))

    def add(self, chunk: Json) -> list[StreamPiece]:
        if "error" in chunk:
            raise error_of(int(chunk["error"].get("status") or 500), chunk)
        self._id = chunk.get("id", self._id)
        self._model = chunk.get("model", self._model)
        self._usage = _USAGE.validate_python(chunk.get("usage")) or self._usage
        found = []
        for choice in chunk.get("choices") or ():
            part = _CHOICE.validate_python({"steerscope": chunk.get("steerscope"), **choice})
            self._parts.setdefault(part.index, []).append(part)
            silent = part.finish_reason is not None or "role" in (choice.get("delta") or {})
            if not silent or part.text or part.tokens or part.readings or part.firings:
                found.append(StreamPiece(part.index, part.text, part.tokens, part.readings, part.firings))
        return found

    def answer(self) -> ServerAnswer:
        choices = tuple(_joined(parts) for _, parts in sorted(self._parts.items()))
        return ServerAnswer(self._id, self._model, choices, self._usage)


def _joined(parts: list[ServerChoice]) -> ServerChoice:
    """Return the choice whose parts these are; the last one has what comes at the end."""
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=tuple(one for part in parts for one in part.tokens),
        readings=tuple(one for part in parts for one in part.readings),
        firings=tuple(one for part in parts for one in part.firings),
    )


def error_of(status: int, body: object, retry_after: str | None = None) -> SteerscopeError:
    """Return the error of a response. A refused request is an InvalidRequest, as in the library."""
    found = body.get("error") if isinstance(body, dict) else None
    if not isinstance(found, dict):
        return ServerError(status, f"the server answered {status}: {str(body)[:200]}")
    problems = [Problem(one["param"] or "", one["message"], one["remedy"]) for one in found.get("problems") or ()]
    if problems and status == 400:
        return InvalidRequest(problems)
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ServerError(status, str(found.get("message")), found.get("code"), wait)
