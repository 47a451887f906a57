"""`Client` and `AsyncClient`: `_Requests` describes each request once; the two classes differ in how they send it."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import httpx

from steerscope.client import calls
from steerscope.client.answers import (
    DONE,
    CaptureRef,
    EventReader,
    Gathered,
    JobEvent,
    JobRef,
    Json,
    ServerAnswer,
    ServerError,
    ServerEvent,
    StreamPiece,
    answer_of,
    error_of,
    job_event,
    job_of,
    parsed,
)
from steerscope.client.calls import Options, SteerLike, part
from steerscope.files import atomic_path
from steerscope.specs.chat import Chat
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering

if TYPE_CHECKING:
    from steerscope.capture.rows import Rows
    from steerscope.vectors.vector import SteeringVector

T = TypeVar("T")
Read = Callable[[Json], Any] | None
BROKEN = "the stream ended before its end was told: the server went away"

if TYPE_CHECKING:
    P = ParamSpec("P")
    Plain = TypeVar("Plain")
    Awaited = TypeVar("Awaited")

    class _Method(Generic[P, Plain, Awaited]):
        """A method of both clients, as type checkers see it."""

        @overload
        def __get__(self, client: "Client", owner: type) -> Callable[P, Plain]: ...
        @overload
        def __get__(self, client: "AsyncClient", owner: type) -> Callable[P, Awaited]: ...
        def __get__(self, client: object, owner: type) -> object: ...

    def _request(method: Callable[Concatenate[Any, P], T]) -> _Method[P, T, Coroutine[Any, Any, T]]: ...
    def _stream(method: Callable[Concatenate[Any, P], Generator[T]]) -> _Method[P, Generator[T], AsyncGenerator[T]]: ...
else:

    def _request(method):
        """Mark a method whose result `AsyncClient` returns from a coroutine. The result type is that of `Client`."""
        return method

    _stream = _request


def _data(found: Json) -> list[Json]:
    return found["data"]


def _nothing(_: Json) -> None: ...


def _refusal(response: httpx.Response) -> SteerscopeError:
    """Return the error of a response whose body has been read."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return error_of(response.status_code, body, response.headers.get("retry-after"))


class _Requests:
    """The requests of both clients. Each client adds its `_send`, `_events` and transport."""

    _transport: type[httpx.Client] | type[httpx.AsyncClient]
    _http: Any
    _send: Callable[..., Any]
    _events: Callable[..., Any]

    def __init__(
        self,
        url: str = calls.DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest([Problem("url", f"{url!r} is not an address", f"write it like {calls.DEFAULT_URL}")])
        self.url = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients need the /v1
        self.model = model
        key = api_key or os.environ.get(calls.API_KEY)
        self._http = self._transport(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Prompts queue, so the first byte may take long. Only connecting must be quick.
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(0, f"there is no server at {self.url}: start one with steerscope serve")
        return ServerError(0, f"the connection to {self.url} failed: {error or type(error).__name__}")

    def _named(self, body: Json) -> Json:
        return {"model": self.model, **body} if self.model else body

    # --- text

    @_request
    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> ServerAnswer:
        """Continue a text or token ids. Options: `steer`, `capture`, `watch` and `project`."""
        body = self._named(calls.completion_body(prompt, sampling, options))
        return self._send("POST", "/v1/completions", body, answer_of)

    @_request
    def chat(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]) -> ServerAnswer:
        """Answer a chat, with the options of `generate`."""
        body = self._named(calls.chat_body(messages, sampling, options))
        return self._send("POST", "/v1/chat/completions", body, answer_of)

    @_stream
    def stream(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Generator[StreamPiece | ServerAnswer]:
        """Yield pieces as they arrive, then the whole answer. Leaving the loop early ends the request at the server."""
        body = self._named(calls.completion_body(prompt, sampling, options, stream=True))
        return self._events("POST", "/v1/completions", Gathered().read, json=body)

    @_stream
    def stream_chat(
        self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Generator[StreamPiece | ServerAnswer]:
        """Do the same as `stream` for a chat."""
        body = self._named(calls.chat_body(messages, sampling, options, stream=True))
        return self._events("POST", "/v1/chat/completions", Gathered().read, json=body)

    @_request
    def post(self, path: str, body: Json) -> Json:
        """Send any request of the server's page /docs and return the JSON answer."""
        return self._send("POST", path, body)

    @_request
    def forget(self, capture: CaptureRef | str) -> None:
        """Delete captured rows on the server."""
        return self._send("DELETE", calls.capture_path(capture), read=_nothing)

    # --- what the server has

    @_request
    def models(self) -> list[str]:
        """Return the names of the served models."""
        return self._send("GET", "/v1/models", read=lambda found: [one["id"] for one in found["data"]])

    @_request
    def capabilities(self) -> Json:
        """Return the layers, sites, limits, vectors and packs of the server."""
        return self._send("GET", "/v1/capabilities")

    @_request
    def vectors(self) -> list[Json]:
        """Return the vectors that requests may name."""
        return self._send("GET", "/v1/vectors", read=_data)

    @_request
    def upload_vector(self, name: str | None, vector: "SteeringVector | Path | str") -> Json:
        """Upload a `SteeringVector` or a file (safetensors or GGUF). Later requests may name it."""
        data, name = calls.vector_file(vector, name)
        return self._send("POST", "/v1/vectors", content=data, params={"name": name})

    @_request
    def delete_vector(self, name: str) -> None:
        """Delete a vector on the server."""
        return self._send("DELETE", f"/v1/vectors/{part(name)}", read=_nothing)

    @_request
    def lenses(self) -> list[Json]:
        """Return the lens packs that requests may name."""
        return self._send("GET", "/v1/lenses", read=_data)

    @_request
    def lens(self, name: str) -> Json:
        """Return a pack with its concepts."""
        return self._send("GET", f"/v1/lenses/{part(name)}")

    @_request
    def set_default_steering(self, steer: SteerLike | None) -> None:
        """Steer every request that does not reset it; None removes this default."""
        if steer is None:
            return self._send("DELETE", "/v1/steering", read=_nothing)
        return self._send("PUT", "/v1/steering", calls.steer_json(steer), _nothing)

    # --- jobs

    @_request
    def start_job(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]) -> JobRef:
        """Start a chat that runs to its end even when no client is connected."""
        body = self._named(calls.chat_body(messages, sampling, options))
        return self._send("POST", "/v1/jobs", body, job_of)

    @_stream
    def job_events(self, job: JobRef | str, after: JobEvent | str | None = None) -> Generator[JobEvent]:
        """Yield the events of a job, from its beginning or those `after` an event."""
        last = after.id if isinstance(after, JobEvent) else after
        headers = {} if last is None else {"Last-Event-ID": last}
        return self._events("GET", f"{calls.job_path(job)}/stream", job_event, headers=headers)

    @_request
    def cancel_job(self, job: JobRef | str) -> None:
        """End a job."""
        return self._send("DELETE", calls.job_path(job), read=_nothing)


class Client(_Requests):
    """Requests to one server. `model` defaults to the server's model, `api_key` to STEERSCOPE_API_KEY.

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

    _transport = httpx.Client
    _http: httpx.Client

    def rows(self, capture: CaptureRef | str) -> "Rows":
        """Download captured rows. The server keeps them for a limited time, or until `forget`."""
        from steerscope.capture.rows import load_rows

        with TemporaryDirectory() as folder:
            return load_rows(self.save_rows(capture, Path(folder) / "rows.safetensors"))

    def save_rows(self, capture: CaptureRef | str, path: Path | str) -> Path:
        """Download captured rows to a file that `load_rows` reads."""
        with (
            self._open("GET", calls.capture_path(capture)) as response,
            atomic_path(path) as temporary,
            temporary.open("wb") as file,
        ):
            for block in response.iter_bytes():
                file.write(block)
        return Path(path)

    @property
    def default_steering(self) -> Steering:
        """The steering of every request that does not reset it."""
        return self._send("GET", "/v1/steering", read=calls.steering_of)

    @default_steering.setter
    def default_steering(self, steer: SteerLike | None) -> None:
        self.set_default_steering(steer)

    def _send(self, method: str, path: str, body: object = None, read: Read = None, **more: Any) -> Any:
        with self._open(method, path, json=body, **more) as response:
            return parsed(response.read(), read)

    def _events(self, method: str, path: str, read: Callable[[ServerEvent], list[T]], **more: Any) -> Generator[T]:
        events = EventReader()
        with self._open(method, path, **more) as response:
            for line in response.iter_lines():
                if (event := events.feed(line)) is not None:
                    yield from read(event)
                    if event.data == DONE:
                        return
        raise ServerError(0, BROKEN)

    @contextmanager
    def _open(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **more) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        """Close the connection; a `with` block does the same."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Requests):
    """The methods of `Client`, to be awaited. Two differ: `default_steering()` is a method, and so is its setter,
    `set_default_steering(…)`."""

    _transport = httpx.AsyncClient
    _http: httpx.AsyncClient

    async def rows(self, capture: CaptureRef | str) -> "Rows":
        """Download captured rows. The server keeps them for a limited time, or until `forget`."""
        from steerscope.capture.rows import load_rows

        with TemporaryDirectory() as folder:
            return load_rows(await self.save_rows(capture, Path(folder) / "rows.safetensors"))

    async def save_rows(self, capture: CaptureRef | str, path: Path | str) -> Path:
        """Download captured rows to a file that `load_rows` reads."""
        async with self._open("GET", calls.capture_path(capture)) as response:
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                async for block in response.aiter_bytes():
                    file.write(block)
        return Path(path)

    async def default_steering(self) -> Steering:
        """Return the steering of every request that does not reset it."""
        return await self._send("GET", "/v1/steering", read=calls.steering_of)

    async def _send(self, method: str, path: str, body: object = None, read: Read = None, **more: Any) -> Any:
        async with self._open(method, path, json=body, **more) as response:
            return parsed(await response.aread(), read)

    async def _events(
        self, method: str, path: str, read: Callable[[ServerEvent], list[T]], **more: Any
    ) -> AsyncGenerator[T]:
        events = EventReader()
        async with self._open(method, path, **more) as response:
            async for line in response.aiter_lines():
                if (event := events.feed(line)) is not None:
                    for found in read(event):
                        yield found
                    if event.data == DONE:
                        return
        raise ServerError(0, BROKEN)

    @asynccontextmanager
    async def _open(self, method: str, path: str, **more: Any) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream(method, path, **more) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    async def close(self) -> None:
        """Close the connection; an `async with` block does the same."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
