"""Addresses, headers, paths and bodies of requests, for both clients."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict
from urllib.parse import quote

import httpx

from steerscope.client.answers import CaptureRef, Json, ServerError, error_of
from steerscope.client.jobs import JobRef
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
    """Options of a request beside its prompt."""

    steer: SteerLike | None
    capture: Capture | None
    watch: Watch | None
    project: Sequence[str]  # names of vectors on which each token's rows are projected


@dataclass(frozen=True, slots=True)
class Connection:
    """The address of a server and the settings of connections to it."""

    url: str
    api_key: str | None
    timeout_s: float

    @classmethod
    def to(cls, url: str, api_key: str | None, timeout_s: float) -> "Connection":
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest([Problem("url", f"{url!r} is not an address", f"write it like {DEFAULT_URL}")])
        bare = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients need the /v1
        return cls(bare, api_key or os.environ.get(API_KEY) or None, timeout_s)

    def settings(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # Prompts queue, so the first byte may take long. Only connecting must be quick.
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        return {"base_url": self.url, "headers": headers, "timeout": timeout, "limits": limits}

    def unreachable(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(0, f"there is no server at {self.url}: start one with steerscope serve")
        return ServerError(0, f"the connection to {self.url} failed: {error or type(error).__name__}")


def refusal(response: httpx.Response) -> SteerscopeError:
    """Return the error of a response whose body has been read."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return error_of(response.status_code, body, response.headers.get("retry-after"))


# --- bodies


def _body(sampling: Sampling | None, options: Options, stream: bool) -> Json:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise InvalidRequest([Problem(name, "is no option", "remove it or correct its name") for name in unknown])
    fields = (sampling or Sampling()).model_dump(mode="json", exclude_none=True)
    if not fields.get("stop"):
        fields.pop("stop", None)
    ours: Json = {}
    if (steer := options.get("steer")) is not None:
        ours["steer"] = steer_json(steer)
    for name in ("capture", "watch"):
        if (spec := options.get(name)) is not None:
            ours[name] = spec.model_dump(mode="json", exclude_none=True)
    if project := options.get("project"):
        ours["project"] = list(project)
    found: Json = {**fields, "steerscope": ours}
    return {**found, "stream": True, "stream_options": {"include_usage": True}} if stream else found


def steer_json(steer: SteerLike) -> Json | str:
    if isinstance(steer, str):
        return steer
    whole = steer if isinstance(steer, Steering) else Steering(ops=(steer,))
    return whole.model_dump(mode="json", exclude_none=True)


def chat_body(messages: Chat, sampling: Sampling | None, options: Options, stream: bool = False) -> Json:
    plain = [one.model_dump() if isinstance(one, Message) else dict(one) for one in messages]
    found = _body(sampling, options, stream)
    alternatives = found.pop("logprobs", None)
    more = {} if alternatives is None else {"logprobs": True, "top_logprobs": alternatives}
    return {"messages": plain, **found, **more}


def completion_body(
    prompt: str | Sequence[int], sampling: Sampling | None, options: Options, stream: bool = False
) -> Json:
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **_body(sampling, options, stream)}


def capture_path(capture: CaptureRef | str) -> str:
    return f"/v1/captures/{part(capture if isinstance(capture, str) else capture.id)}"


def job_path(job: JobRef | str) -> str:
    return f"/v1/jobs/{part(job if isinstance(job, str) else job.id)}"


def part(name: str) -> str:
    """Quote a name as one part of a path."""
    return quote(name, safe="")


def vector_file(vector: object, name: str | None) -> tuple[bytes, str]:
    """Return the bytes of a vector file and the vector's name, from a path or a SteeringVector."""
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
