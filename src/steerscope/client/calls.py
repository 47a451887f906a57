"""What both clients share: addresses, headers, bodies, and reading a stream of events."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict
from urllib.parse import quote

import httpx

from steerscope.client.answers import CaptureRef, Json, ServerError, error_of
from steerscope.specs.capture import Capture
from steerscope.specs.chat import Chat, Message
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Ablate, Add, Cap, Steering
from steerscope.specs.watch import Watch

SteerLike = Steering | Add | Cap | Ablate | str  # a name: that vector, added once where it has layers
API_KEY = "STEERSCOPE_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"


class Options(TypedDict, total=False):
    """What a request may be given beside its prompt."""

    steer: SteerLike | None
    capture: Capture | None
    watch: Watch | None
    project: Sequence[str]  # names of vectors; each token's rows are projected on them


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the server is, and how it is spoken to."""

    url: str
    api_key: str | None
    timeout_s: float

    @classmethod
    def to(cls, url: str, api_key: str | None, timeout_s: float) -> "Connection":
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest([Problem("url", f"{url!r} is not an address", f"write it like {DEFAULT_URL}")])
        bare = url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients are given it
        return cls(bare, api_key or os.environ.get(API_KEY) or None, timeout_s)

    def settings(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # Nothing may come for long: prompts queue. Only a connection has to be quick.
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        return {"base_url": self.url, "headers": headers, "timeout": timeout, "limits": limits}

    def unreachable(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(0, f"there is no server at {self.url}: start one with steerscope serve")
        return ServerError(0, f"the connection to {self.url} failed: {error or type(error).__name__}")


def refusal(response: httpx.Response) -> SteerscopeError:
    """The error of a response whose body has been read."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return error_of(response.status_code, body, response.headers.get("retry-after"))


# --- bodies


def body(sampling: Sampling | None, options: Options, stream: bool) -> Json:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise InvalidRequest([Problem(name, "is no option", "remove it or correct its name") for name in unknown])
    asked = (sampling or Sampling()).model_dump(mode="json", exclude_none=True)
    if not asked.get("stop"):
        asked.pop("stop", None)
    ours: Json = {}
    if (steer := options.get("steer")) is not None:
        ours["steer"] = steer if isinstance(steer, str) else as_json(steer)
    for name in ("capture", "watch"):
        if (spec := options.get(name)) is not None:
            ours[name] = spec.model_dump(mode="json", exclude_none=True)
    if project := options.get("project"):
        ours["project"] = list(project)
    found: Json = {**asked, "steerscope": ours}
    return {**found, "stream": True, "stream_options": {"include_usage": True}} if stream else found


def as_json(steer: Steering | Add | Cap | Ablate) -> Json:
    whole = steer if isinstance(steer, Steering) else Steering(ops=(steer,))
    return whole.model_dump(mode="json", exclude_none=True)


def chat_body(messages: Chat, sampling: Sampling | None, options: Options, stream: bool = False) -> Json:
    plain = [one.model_dump() if isinstance(one, Message) else dict(one) for one in messages]
    found = body(sampling, options, stream)
    alternatives = found.pop("logprobs", None)
    more = {} if alternatives is None else {"logprobs": True, "top_logprobs": alternatives}
    return {"messages": plain, **found, **more}


def completion_body(
    prompt: str | Sequence[int], sampling: Sampling | None, options: Options, stream: bool = False
) -> Json:
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **body(sampling, options, stream)}


def capture_path(capture: CaptureRef | str) -> str:
    return f"/v1/captures/{part(capture if isinstance(capture, str) else capture.id)}"


def part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


# --- server-sent events


@dataclass(frozen=True, slots=True)
class ServerEvent:
    data: str
    event: str | None = None
    id: str | None = None


class EventReader:
    """Lines → events. A comment or an empty event is nothing."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> ServerEvent | None:
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name:
                self._fields[name] = value
            return None
        data, fields = self._data, self._fields
        self._data, self._fields = [], {}
        return ServerEvent("\n".join(data), fields.get("event"), fields.get("id")) if data else None


def events_of(lines: Iterable[str]) -> Iterator[ServerEvent]:
    reader = EventReader()
    for line in lines:
        if (event := reader.feed(line)) is not None:
            yield event


DONE = "[DONE]"
BROKEN = "the stream ended before its end was told: the server went away"


def vector_file(vector: object, name: str | None) -> tuple[bytes, str]:
    """The bytes of a vector file and its name, from a path or from a SteeringVector."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    if isinstance(vector, str | Path):
        return Path(vector).read_bytes(), name or Path(vector).stem
    from steerscope.vectors.files import save
    from steerscope.vectors.vector import SteeringVector

    if not isinstance(vector, SteeringVector):
        what = f"is {type(vector).__name__}"
        raise InvalidRequest([Problem("vector", what, "give a SteeringVector or the path of a file")])
    if not name:
        raise InvalidRequest([Problem("name", "is missing", "say what the server shall call the vector")])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "vector.safetensors"
        save(vector, path)
        return path.read_bytes(), name


def steering_of(given: Mapping[str, object]) -> Steering:
    return Steering.parse(given.get("steering", given))
