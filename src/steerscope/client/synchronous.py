"""The client without await."""

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx

from steerscope.client import calls
from steerscope.client.answers import Answer, CaptureRef, Gathered, Json, Piece, ServerError, answer_of, understood
from steerscope.client.calls import Connection, Options, SteerLike, part
from steerscope.client.jobs import JobEvent, JobRef, job_event, resume
from steerscope.files import atomic_path
from steerscope.specs.chat import Chat
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering

if TYPE_CHECKING:
    from steerscope.capture.rows import Rows
    from steerscope.vectors.vector import SteeringVector


class Client:
    """Requests to one server. Without `model` the server's own is asked; the key may be in STEERSCOPE_API_KEY.

    ```python
    import steerscope as ss

    with ss.Client("http://127.0.0.1:8000") as client:
        client.upload_vector("happy", "happy.safetensors")
        answer = client.chat(
            [{"role": "user", "content": "How was your week?"}],
            ss.Sampling(max_tokens=20),
            steer=ss.Add(vector="happy", scale=1.7, layers=19),
            capture=ss.Capture(layers=20),
        )
        print(answer.text, client.rows(answer.capture)[20].shape)
    ```
    """

    def __init__(
        self,
        url: str = calls.DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600,
    ) -> None:
        self.connection = Connection.to(url, api_key, timeout_s)
        self.model = model
        self._http = httpx.Client(**self.connection.settings())

    # --- text

    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Continue a text or token ids. Options: `steer`, `capture`, `watch`, `project`, and others of the server."""
        return answer_of(
            self._json("POST", "/v1/completions", self._named(calls.completion_body(prompt, sampling, options)))
        )

    def post(self, path: str, body: Json) -> Json:
        """Any request, as the server describes it at /docs, and what it answers."""
        return self._json("POST", path, body)

    def chat(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]) -> Answer:
        """Answer a chat; the options of `generate`."""
        body = self._named(calls.chat_body(messages, sampling, options))
        return answer_of(self._json("POST", "/v1/chat/completions", body))

    def stream(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Generator[Piece | Answer]:
        """Pieces as they come, then the whole Answer. Leaving the loop early ends the request at the server."""
        body = calls.completion_body(prompt, sampling, options, stream=True)
        return self._stream("/v1/completions", self._named(body))

    def stream_chat(
        self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Generator[Piece | Answer]:
        """`stream` for a chat."""
        body = calls.chat_body(messages, sampling, options, stream=True)
        return self._stream("/v1/chat/completions", self._named(body))

    # --- rows

    def rows(self, capture: CaptureRef | str) -> "Rows":
        """Bring captured rows here; the server forgets them after a while, or with `forget`."""
        from steerscope.capture.rows import load_rows

        with TemporaryDirectory() as folder:
            return load_rows(self.save_rows(capture, Path(folder) / "rows.safetensors"))

    def save_rows(self, capture: CaptureRef | str, path: Path | str) -> Path:
        """Write captured rows to a file, as `load_rows` reads it."""
        with (
            self._open("GET", calls.capture_path(capture)) as response,
            atomic_path(Path(path)) as temporary,
            temporary.open("wb") as file,
        ):
            for block in response.iter_bytes():
                file.write(block)
        return Path(path)

    def forget(self, capture: CaptureRef | str) -> None:
        """Have the server drop captured rows."""
        self._json("DELETE", calls.capture_path(capture))

    # --- what the server has

    def models(self) -> list[str]:
        """Names of the models that are served."""
        return [one["id"] for one in self._json("GET", "/v1/models")["data"]]

    def capabilities(self) -> Json:
        """What can be asked of this server: layers, sites, limits, vectors, packs."""
        return self._json("GET", "/v1/capabilities")

    def vectors(self) -> list[Json]:
        """The vectors that requests may name."""
        return self._json("GET", "/v1/vectors")["data"]

    def upload_vector(self, name: str | None, vector: "SteeringVector | Path | str") -> Json:
        """From a file (safetensors or GGUF) or a SteeringVector; requests may name it at once."""
        data, known_as = calls.vector_file(vector, name)
        return self._json("POST", "/v1/vectors", content=data, params={"name": known_as})

    def delete_vector(self, name: str) -> None:
        """Have the server forget a vector."""
        self._json("DELETE", f"/v1/vectors/{part(name)}")

    def lenses(self) -> list[Json]:
        """The lens packs that requests may name."""
        return self._json("GET", "/v1/lenses")["data"]

    def lens(self, name: str) -> Json:
        """A pack with its concepts."""
        return self._json("GET", f"/v1/lenses/{part(name)}")

    @property
    def default_steering(self) -> Steering:
        """What the server does to every request that does not reset it."""
        return calls.steering_of(self._json("GET", "/v1/steering"))

    @default_steering.setter
    def default_steering(self, steer: SteerLike | None) -> None:
        if steer is None:
            self._json("DELETE", "/v1/steering")
        else:
            self._json("PUT", "/v1/steering", steer if isinstance(steer, str) else calls.as_json(steer))

    # --- jobs

    def start_job(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]) -> JobRef:
        """Start a chat that goes on whoever listens."""
        found = self._json("POST", "/v1/jobs", self._named(calls.chat_body(messages, sampling, options)))
        return JobRef(found["job_id"], found["sse_url"])

    def job_events(self, job: JobRef | str, after: JobEvent | str | None = None) -> Iterator[JobEvent]:
        """What happens in a job, from its beginning or `after` an event."""
        name = job if isinstance(job, str) else job.id
        with self._open("GET", f"/v1/jobs/{part(name)}/stream", headers=resume(after)) as response:
            for event in calls.events_of(response.iter_lines()):
                found = job_event(event)
                if found is None:
                    return
                yield found
        raise ServerError(0, calls.BROKEN)

    def cancel_job(self, job: JobRef | str) -> None:
        """End a job."""
        self._json("DELETE", f"/v1/jobs/{part(job if isinstance(job, str) else job.id)}")

    # --- inside

    def _named(self, body: Json) -> Json:
        return {"model": self.model, **body} if self.model else body

    def _json(self, method: str, path: str, body: object = None, **more: Any) -> Json:
        if body is not None:
            more["json"] = body
        with self._open(method, path, **more) as response:
            content = response.read()
        with understood():
            return json.loads(content) if content else {}

    @contextmanager
    def _open(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **more) as response:
                if response.is_error:
                    response.read()
                    raise calls.refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise self.connection.unreachable(error) from None

    def _stream(self, path: str, body: Json) -> Generator[Piece | Answer]:
        gathered = Gathered()
        with self._open("POST", path, json=body) as response:
            for event in calls.events_of(response.iter_lines()):
                if event.data == calls.DONE:
                    yield gathered.answer()
                    return
                yield from gathered.read(event.data)
        raise ServerError(0, calls.BROKEN)

    def close(self) -> None:
        """Let go of the connection; a `with` block does it too."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
