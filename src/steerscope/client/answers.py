"""What a server answers, as values: pieces of a stream, choices, and errors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

Json = dict[str, Any]  # as it came over the wire


class ServerError(SteerscopeError):
    """The server could not do it, or could not be reached (status 0)."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; the texts of all of a choice's tokens concatenate to its text."""

    index: int
    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Concept:
    id: str
    name: str
    path: tuple[str, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The top concepts of one row, best first. `token_index` counts generated tokens; None: a row of the prompt."""

    position: int
    token_index: int | None
    concepts: tuple[Concept, ...]


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule went on, or, of a switched steering, off."""

    rule: str
    action: str
    position: int
    score: float


@dataclass(frozen=True, slots=True)
class CaptureRef:
    """Rows that the server keeps for a while: `client.rows(ref)` brings them."""

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
class Piece:
    """What one chunk of a stream brought of one choice. The text is empty where a token's text is not certain yet: it
    may end in an unfinished character, or begin a stop string."""

    choice: int
    text: str
    tokens: tuple[Token, ...] = ()
    readings: tuple[Reading, ...] = ()
    firings: tuple[Firing, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...] = ()
    readings: tuple[Reading, ...] = ()
    firings: tuple[Firing, ...] = ()
    capture: CaptureRef | None = None
    projections: Mapping[str, Mapping[int, list[float]]] = field(default_factory=dict)  # vector → layer → by token

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: `n` choices; the first is also at the top."""

    id: str
    model: str
    choices: tuple[Choice, ...]
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
    def readings(self) -> tuple[Reading, ...]:
        return self.choices[0].readings

    @property
    def firings(self) -> tuple[Firing, ...]:
        return self.choices[0].firings

    @property
    def capture(self) -> CaptureRef | None:
        return self.choices[0].capture


# --- from the wire


@contextmanager
def understood() -> Iterator[None]:
    """Whatever is wrong with an answer becomes one ServerError: other servers may be at that address."""
    try:
        yield
    except SteerscopeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"the answer was not understood ({type(error).__name__}: {str(error)[:100]}): is that steerscope serve?"
        raise ServerError(0, what) from None


def tokens_of(given: Json) -> tuple[Token, ...]:
    return tuple(Token(one["i"], one["id"], one["t"]) for one in given.get("tokens") or ())


def reading_of(one: Json) -> Reading:
    found = (Concept(c["id"], c["name"], tuple(c["path"]), c["score"]) for c in one["top"])
    return Reading(one["position"], one.get("token_index"), tuple(found))


def firing_of(one: Json) -> Firing:
    return Firing(one["name"], one["action"], one["position"], one["score"])


def capture_of(given: Json) -> CaptureRef | None:
    found = given.get("captures")
    if not found:
        return None
    return CaptureRef(found["id"], found["rows"], found["bytes"], tuple(found["sites"]), tuple(found["layers"]))


def projections_of(given: Json) -> dict[str, dict[int, list[float]]]:
    found = given.get("projections") or {}
    return {name: {int(layer): list(values) for layer, values in layers.items()} for name, layers in found.items()}


def piece_of(choice: Json, given: Json) -> Piece:
    """One choice of one chunk, of either route."""
    text = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
    readings = tuple(map(reading_of, given.get("readings") or ()))
    firings = tuple(map(firing_of, given.get("rules") or ()))
    index, text = choice["index"], text or ""
    if type(index) is not int or not isinstance(text, str):
        raise TypeError("a choice has a number and a text")
    return Piece(index, text, tokens_of(given), readings, firings)


def usage_of(given: Json) -> Usage | None:
    found = given.get("usage")
    return Usage(found["prompt_tokens"], found["completion_tokens"]) if found else None


def answer_of(given: Json) -> Answer:
    """An answer that was not streamed."""
    choices = []
    with understood():
        for one in given["choices"]:
            ours = one.get("steerscope") or {}
            text = one["text"] if "text" in one else one["message"]["content"]
            piece = piece_of({"index": one["index"], "text": text}, ours)
            kept = (piece.tokens, piece.readings, piece.firings, capture_of(ours), projections_of(ours))
            choices.append(Choice(one["index"], piece.text, one["finish_reason"], *kept))
        return Answer(given["id"], given["model"], tuple(choices), usage_of(given))


class Gathered:
    """The chunks of a stream on their way to an Answer."""

    def __init__(self) -> None:
        self._id = self._model = ""
        self._usage: Usage | None = None
        self._pieces: dict[int, list[Piece]] = {}
        self._ends: dict[int, tuple[str | None, CaptureRef | None, dict[str, dict[int, list[float]]]]] = {}

    def read(self, data: str) -> list[Piece]:
        """The data of one event."""
        with understood():
            return self.add(json.loads(data))

    def add(self, chunk: Json) -> list[Piece]:
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

    def answer(self) -> Answer:
        choices = []
        for index, pieces in sorted(self._pieces.items()):
            reason, capture, projections = self._ends.get(index, (None, None, {}))
            text = "".join(piece.text for piece in pieces)
            tokens = tuple(one for piece in pieces for one in piece.tokens)
            readings = tuple(one for piece in pieces for one in piece.readings)
            firings = tuple(one for piece in pieces for one in piece.firings)
            choices.append(Choice(index, text, reason, tokens, readings, firings, capture, projections))
        return Answer(self._id, self._model, tuple(choices), self._usage)


def error_of(status: int, body: object, retry_after: str | None = None) -> SteerscopeError:
    """Problems with a request are the same error here as they are in the library."""
    found = body.get("error") if isinstance(body, dict) else None
    if not isinstance(found, dict):
        return ServerError(status, f"the server answered {status}: {str(body)[:200]}")
    problems = [Problem(one["param"] or "", one["message"], one["remedy"]) for one in found.get("problems") or ()]
    if problems and status == 400:
        return InvalidRequest(problems)
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ServerError(status, str(found.get("message")), found.get("code"), wait)
