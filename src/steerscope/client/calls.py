"""Paths and bodies of requests, for both clients."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict
from urllib.parse import quote

from steerscope.client.answers import CaptureRef, JobRef, Json
from steerscope.specs.capture import Capture
from steerscope.specs.chat import Chat, Message
from steerscope.specs.errors import InvalidRequest, Problem
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


def _body(sampling: Sampling | None, options: Options, stream: bool) -> Json:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise InvalidRequest([Problem(name, "is no option", "remove it or correct its name") for name in unknown])
    fields = (sampling or Sampling()).model_dump(mode="json", exclude_none=True)
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
