"""The client with await: the same methods as `Client`."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
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


class AsyncClient:
    """Requests to one server. Without `model` the server's own is asked; the key may be in STEERSCOPE_API_KEY."""

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
        self._http = httpx.AsyncClient(**self.connection.settings())

    # --- text

    async def generate(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Answer:
        body = self._named(calls.completion_body(prompt, sampling, options))
        return answer_of(await self._json("POST", "/v1/completions", body))

    async def post(self, path: str, body: Json) -> Json:
        """Any request, as the server describes it at /docs, and what it answers."""
        return await self._json("POST", path, body)

    async def chat(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]) -> Answer:
        body = self._named(calls.chat_body(messages, sampling, options))
        return answer_of(await self._json("POST", "/v1/chat/completions", body))

    def stream(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Piece | Answer]:
        """Pieces as they come, then the whole Answer. Leaving the loop early ends the request at the server."""
        body = calls.completion_body(prompt, sampling, options, stream=True)
        return self._stream("/v1/completions", self._named(body))

    def stream_chat(
        self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Piece | Answer]:
        body = calls.chat_body(messages, sampling, options, stream=True)
        return self._stream("/v1/chat/completions", self._named(body))

    # --- rows

    async def rows(self, capture: CaptureRef | str) -> "Rows":
        """Bring captured rows here; the server forgets them after a while, or with `forget`."""
        from steerscope.capture.rows import load_rows

        with TemporaryDirectory() as folder:
            return load_rows(await self.save_rows(capture, Path(folder) / "rows.safetensors"))

    async def save_rows(self, capture: CaptureRef | str, path: Path | str) -> Path:
        async with self._open("GET", calls.capture_path(capture)) as response:
            with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
                async for block in response.aiter_bytes():
                    file.write(block)
        return Path(path)

    async def forget(self, capture: CaptureRef | str) -> None:
        await self._json("DELETE", calls.capture_path(capture))

    # --- what the server has

    async def models(self) -> list[str]:
        return [one["id"] for one in (await self._json("GET", "/v1/models"))["data"]]

    async def capabilities(self) -> Json:
        return await self._json("GET", "/v1/capabilities")

    async def vectors(self) -> list[Json]:
        return (await self._json("GET", "/v1/vectors"))["data"]

    async def upload_vector(self, name: str | None, vector: "SteeringVector | Path | str") -> Json:
        """From a file (safetensors or GGUF) or a SteeringVector; requests may name it at once."""
        data, known_as = calls.vector_file(vector, name)
        return await self._json("POST", "/v1/vectors", content=data, params={"name": known_as})

    async def delete_vector(self, name: str) -> None:
        await self._json("DELETE", f"/v1/vectors/{part(name)}")

    async def lenses(self) -> list[Json]:
        return (await self._json("GET", "/v1/lenses"))["data"]

    async def lens(self, name: str) -> Json:
        return await self._json("GET", f"/v1/lenses/{part(name)}")

    async def default_steering(self) -> Steering:
        """What the server does to every request that does not reset it."""
        return calls.steering_of(await self._json("GET", "/v1/steering"))

    async def set_default_steering(self, steer: SteerLike | None) -> None:
        if steer is None:
            await self._json("DELETE", "/v1/steering")
        else:
            await self._json("PUT", "/v1/steering", steer if isinstance(steer, str) else calls.as_json(steer))

    # --- jobs

    async def start_job(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[Options]) -> JobRef:
        found = await self._json("POST", "/v1/jobs", self._named(calls.chat_body(messages, sampling, options)))
        return JobRef(found["job_id"], found["sse_url"])

    async def job_events(self, job: JobRef | str, after: JobEvent | str | None = None) -> AsyncGenerator[JobEvent]:
        name = job if isinstance(job, str) else job.id
        reader = calls.EventReader()
        async with self._open("GET", f"/v1/jobs/{part(name)}/stream", headers=resume(after)) as response:
            async for line in response.aiter_lines():
                if (event := reader.feed(line)) is None:
                    continue
                found = job_event(event)
                if found is None:
                    return
                yield found
        raise ServerError(0, calls.BROKEN)

    async def cancel_job(self, job: JobRef | str) -> None:
        await self._json("DELETE", f"/v1/jobs/{part(job if isinstance(job, str) else job.id)}")

    # --- inside

    def _named(self, body: Json) -> Json:
        return {"model": self.model, **body} if self.model else body

    async def _json(self, method: str, path: str, body: object = None, **more: Any) -> Json:
        if body is not None:
            more["json"] = body
        async with self._open(method, path, **more) as response:
            content = await response.aread()
        with understood():
            return json.loads(content) if content else {}

    @asynccontextmanager
    async def _open(self, method: str, path: str, **more: Any) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream(method, path, **more) as response:
                if response.is_error:
                    await response.aread()
                    raise calls.refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise self.connection.unreachable(error) from None

    async def _stream(self, path: str, body: Json) -> AsyncGenerator[Piece | Answer]:
        gathered, reader = Gathered(), calls.EventReader()
        async with self._open("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                if (event := reader.feed(line)) is None:
                    continue
                if event.data == calls.DONE:
                    yield gathered.answer()
                    return
                for piece in gathered.read(event.data):
                    yield piece
        raise ServerError(0, calls.BROKEN)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
