"""Answers of a server as values: choices, pieces of a stream, and errors.

`steerscope.client` exports them without the prefix: `Answer`, `Choice`, `Concept`, `Firing`, `Reading` and `Piece`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from steerscope.client.events import DONE, ServerEvent
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

Json = dict[str, Any]  # an object as it came over the wire


class ServerError(SteerscopeError):
    """The server failed, or could not be reached (status 0)."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. The texts of a choice's tokens concatenate to its text."""

    index: int
    id: int
    text: str


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
    concepts: tuple[ServerConcept, ...]


@dataclass(frozen=True, slots=True)
class ServerFiring:
    """A rule that fired, or a switched steering that went off again."""

    rule: str
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


@dataclass(frozen=True, slots=True)
class ServerChoice:
    index: int
    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...] = ()
    readings: tuple[ServerReading, ...] = ()
    firings: tuple[ServerFiring, ...] = ()
    capture: CaptureRef | None = None
    projections: Mapping[str, Mapping[int, list[float]]] = field(default_factory=dict)  # vector → layer → by token

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer to one request: `n` choices. Attributes of the first choice are also attributes of the answer."""

    id: str
    model: str
    choices: tuple[ServerChoice, ...]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def readings(self) -> tuple[ServerReading, ...]:
        return self.choices[0].readings

    @property
    def firings(self) -> tuple[ServerFiring, ...]:
        return self.choices[0].firings

    @property
    def capture(self) -> CaptureRef | None:
        return self.choices[0].capture


# --- from the wire


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


def tokens_of(given: Json) -> tuple[Token, ...]:
    return tuple(Token(one["i"], one["id"], one["t"]) for one in given.get("tokens") or ())


def reading_of(one: Json) -> ServerReading:
    found = (ServerConcept(c["id"], c["name"], tuple(c["path"]), c["score"]) for c in one["top"])
    return ServerReading(one["position"], one.get("token_index"), tuple(found))


def firing_of(one: Json) -> ServerFiring:
    return ServerFiring(one["name"], one["action"], one["position"], one["score"])


def capture_of(given: Json) -> CaptureRef | None:
    found = given.get("captures")
    if not found:
        return None
    return CaptureRef(found["id"], found["rows"], found["bytes"], tuple(found["sites"]), tuple(found["layers"]))


def projections_of(given: Json) -> dict[str, dict[int, list[float]]]:
    found = given.get("projections") or {}
    return {name: {int(layer): list(values) for layer, values in layers.items()} for name, layers in found.items()}


def piece_of(choice: Json, given: Json) -> StreamPiece:
    """Read one choice of one chunk, of a completion or a chat."""
    text = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
    readings = tuple(map(reading_of, given.get("readings") or ()))
    firings = tuple(map(firing_of, given.get("rules") or ()))
    index, text = choice["index"], text or ""
    if type(index) is not int or not isinstance(text, str):
        raise TypeError("a choice has a number and a text")
    return StreamPiece(index, text, tokens_of(given), readings, firings)


def usage_of(given: Json) -> Usage | None:
    found = given.get("usage")
    return Usage(found["prompt_tokens"], found["completion_tokens"]) if found else None


def answer_of(given: Json) -> ServerAnswer:
    """Read an answer that was not streamed."""
    choices = []
    with understood():
        for one in given["choices"]:
            ours = one.get("steerscope") or {}
            text = one["text"] if "text" in one else one["message"]["content"]
            piece = piece_of({"index": one["index"], "text": text}, ours)
            kept = (piece.tokens, piece.readings, piece.firings, capture_of(ours), projections_of(ours))
            choices.append(ServerChoice(one["index"], piece.text, one["finish_reason"], *kept))
        return ServerAnswer(given["id"], given["model"], tuple(choices), usage_of(given))


class Gathered:
    """Gathers the chunks of a stream into an answer."""

    def __init__(self) -> None:
        self._id = self._model = ""
        self._usage: Usage | None = None
        self._pieces: dict[int, list[StreamPiece]] = {}
        self._ends: dict[int, tuple[str | None, CaptureRef | None, dict[str, dict[int, list[float]]]]] = {}

    def read(self, event: ServerEvent) -> list[StreamPiece] | list[ServerAnswer]:
        """Return the pieces in one event, and at the end of the stream the answer."""
        if event.data == DONE:
            return [self.answer()]
        with understood():
            return self.add(json.loads(event.data))

    def add(self, chunk: Json) -> list[StreamPiece]:
        if "error" in chunk:
            raise error_of(int(chunk["error"].get("status") or 500), chunk)
        self._id, self._model = chunk.get("id", self._id), chunk.get("model", self._model)
        self._usage = usage_of(chunk) or self._usage
        found = []
        for choice in chunk.get("choices") or ():
            ours = choice.get("steerscope") or chunk.get("steerscope") or {}
            piece = piece_of(choice, ours)
            self._pieces.setdefault(piece.choice, []).append(piece)
            ends = choice.get("finish_reason") is not None
            if ends:
                self._ends[piece.choice] = (choice["finish_reason"], capture_of(ours), projections_of(ours))
            opens = "role" in (choice.get("delta") or {})
            if piece.text or piece.tokens or piece.readings or piece.firings or not (opens or ends):
                found.append(piece)
        return found

    def answer(self) -> ServerAnswer:
        choices = []
        for index, pieces in sorted(self._pieces.items()):
            reason, capture, projections = self._ends.get(index, (None, None, {}))
            text = "".join(piece.text for piece in pieces)
            tokens = tuple(one for piece in pieces for one in piece.tokens)
            readings = tuple(one for piece in pieces for one in piece.readings)
            firings = tuple(one for piece in pieces for one in piece.firings)
            choices.append(ServerChoice(index, text, reason, tokens, readings, firings, capture, projections))
        return ServerAnswer(self._id, self._model, tuple(choices), self._usage)


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
