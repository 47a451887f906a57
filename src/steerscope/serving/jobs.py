"""Jobs: requests that run with or without listeners. `POST /v1/jobs` starts one, `GET /v1/jobs/{id}/stream` sends its
events, from the first or from after `Last-Event-ID`, `DELETE /v1/jobs/{id}` cancels it.

Every event is written once, as the bytes that all listeners get, and kept for a while after the job's end.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import JSONResponse, Response

from steerscope.engines.results import Choice, EndEvent, FinishReason, RuleEvent, TokenEvent
from steerscope.serving.bodies import ChatBody, CompletionBody, body_of, json_body
from steerscope.serving.errors import ApiError, api_error
from steerscope.serving.extras import about_firing, about_reading
from steerscope.serving.openai import GenerationRequest, prepare
from steerscope.serving.sse import EventStream
from steerscope.serving.state import Serving, Shared
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

log = logging.getLogger("steerscope.serving")
router = APIRouter(tags=["jobs"])
STOPS: dict[FinishReason, str] = {
    "stop": "eos",
    "length": "length",
    "stop_string": "stop_sequence",
    "rule": "rule",
    "cancelled": "cancelled",
}
MOST_JOBS = 4096  # that are kept, running ones included
MOST_BYTES = 64 << 20  # of one job's events
MOST_HELD = 512 << 20  # of all jobs together, with the bodies of their requests
PIECE_BYTES = 64 << 10  # of events in one write; the last event may exceed it
_METRICS_S = 1.0


class ServerJob:
    """One request and all its events."""

    def __init__(self, request: GenerationRequest, jobs: "Jobs") -> None:
        self.id = request.writer.id
        self.events: list[bytes] = []
        self.ended = False
        self.tokens = 0
        self.size = 0  # bytes of the events, and of the request's body
        self._request = request
        self._jobs = jobs
        self._prompt_length = len(request.prompts[0].token_ids)
        jobs.reserve(self, int(str(request.note.get("body_bytes", 0))))
        self._news = asyncio.Event()
        self._made = time.perf_counter()
        self._first = 0.0  # when the first token came
        self._measured = 0.0  # when the last metrics were sent
        self._task = asyncio.create_task(self._run())

    async def listen(self, at: int) -> AsyncGenerator[bytes]:
        """Yield the events from number `at` on, until the job has ended."""
        yield b": listening\n\n"  # so that the answer begins at once, though the job may wait for its turn
        while True:
            news = self._news
            if at < len(self.events):
                piece = self._piece(at)
                at += len(piece)
                yield b"".join(piece)
            elif self.ended:
                return
            else:
                await news.wait()

    def _piece(self, at: int) -> list[bytes]:
        """Return events from `at` on, not more than are sent at once: each listener has a copy of them."""
        size = 0
        stop = at
        while stop < len(self.events) and size < PIECE_BYTES:
            size += len(self.events[stop])
            stop += 1
        return self.events[at:stop]

    def cancel(self) -> None:
        """End between two steps; a job that has not begun ends at once."""
        if not self._request.cancel():
            self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # --- the task

    async def _run(self) -> None:
        try:
            await self._follow()
        except asyncio.CancelledError:
            if self._request.serving.draining:
                self._put("error", {"code": "stopping", "message": "the server is stopping"}, must=True)
            else:
                self._end(None, {}, must=True)
        except Exception as error:
            shown = api_error(error)
            if shown.status >= 500 and not isinstance(error, SteerscopeError):
                log.error("unexpected", exc_info=error, extra={"job": self.id})
            self._put("error", {"code": shown.name, "message": shown.message}, must=True)
        finally:
            self.ended = True
            del self._request  # its body and prompts are not needed to listen
            self._wake()
            self._jobs.expire(self)

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._request.batches()) as batches:
            async for _, batch in batches:
                if not self.events:
                    self._start()
                for event in batch:
                    if isinstance(event, EndEvent):
                        choice = event.generation.choices[0]
                        self._end(choice, await self._request.rows_about(0, choice))
                    elif isinstance(event, RuleEvent):
                        self._put("rule", about_firing(event.firing))
                    else:
                        self._token(event)
                self._wake()

    def _start(self) -> None:
        self._measured = time.perf_counter()
        about: dict[str, object] = {
            "job_id": self.id,
            "model": self._request.serving.model_name,
            "prompt_tokens": self._prompt_length,
            "queued_ms": _ms(self._measured - self._made),
        }
        if (prompt := self._request.selected(0)) is not None:
            about["prompt"] = prompt
        self._put("started", about)

    def _token(self, event: TokenEvent) -> None:
        if not self.tokens:
            self._first = time.perf_counter()
        self.tokens += 1
        for reading in event.readings:
            self._put("reading", about_reading(reading, self._prompt_length))
        self._put("token", {"t": event.text, "i": event.index, "id": event.token_id})
        if time.perf_counter() - self._measured > _METRICS_S:
            self._metrics()

    def _end(self, choice: Choice | None, more: Mapping[str, object], must: bool = False) -> None:
        if self.tokens:
            self._metrics(must)
        about = {
            "tokens_out": len(choice.token_ids) if choice else self.tokens,
            "decode_time_ms": _ms(time.perf_counter() - self._first) if self.tokens else 0.0,
            "stop_reason": STOPS[choice.finish_reason] if choice else "cancelled",
            "stop_sequence_matched": choice.stop_string if choice else None,
        }
        self._put("end", {**about, **more}, must)

    def _metrics(self, must: bool = False) -> None:
        self._measured = time.perf_counter()
        seconds = self._measured - self._first
        rate = (self.tokens - 1) / seconds if self.tokens > 1 and seconds else 0.0
        about = {"tokens_out": self.tokens, "tokens_per_s": round(rate, 2), "ttft_ms": _ms(self._first - self._made)}
        self._put("metrics", about, must)

    def _put(self, name: str, data: Mapping[str, object], must: bool = False) -> None:
        event = f"id: {len(self.events)}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()
        self._jobs.reserve(self, len(event), must)
        self.events.append(event)

    def _wake(self) -> None:
        news = self._news
        self._news = asyncio.Event()
        news.set()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


class Jobs:
    """All running jobs, and ended ones that are still kept."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._jobs: dict[str, ServerJob] = {}
        self.held = 0  # bytes

    def start(self, request: GenerationRequest) -> ServerJob:
        self._serving.admission.check()
        if len(self._jobs) >= MOST_JOBS:
            self._forget_oldest(f"{MOST_JOBS} jobs are unfinished: try again later")
        job = ServerJob(request, self)
        self._jobs[job.id] = job
        return job

    def get(self, name: str) -> ServerJob:
        if name not in self._jobs:
            raise ApiError(404, f"there is no job {name!r:.100}: it never existed, or has expired", "not_found")
        return self._jobs[name]

    def forget(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            self.held -= job.size

    def reserve(self, job: ServerJob, size: int, must: bool = False) -> None:
        """Count `size` bytes more of a job, forgetting ended jobs to make room. Raises ApiError where there is no room,
        unless the bytes are few and `must` be kept."""
        if job.size + size > MOST_BYTES and not must:
            what = f"the events of this job take more than {MOST_BYTES >> 20} MiB"
            raise ApiError(413, f"{what}: ask for fewer tokens, concepts, projections or rules", "job_too_large")
        with contextlib.suppress(ApiError) if must else contextlib.nullcontext():
            while self.held + size > MOST_HELD:
                self._forget_oldest(f"the events of unfinished jobs take {MOST_HELD >> 20} MiB: try again later")
        self.held += size
        job.size += size

    def _forget_oldest(self, otherwise: str) -> None:
        oldest = next((job.id for job in self._jobs.values() if job.ended), None)
        if oldest is None:
            raise ApiError(429, otherwise, "queue_full", retry_after=10)
        self.forget(oldest)

    def expire(self, job: ServerJob) -> None:
        """Forget a job that has ended, in a while."""
        asyncio.get_running_loop().call_later(self._serving.settings.capture_ttl_s, self.forget, job.id)

    async def close(self) -> None:
        await asyncio.gather(*(job.close() for job in self._jobs.values()))


async def jobs_of(request: Request) -> Jobs:
    return request.app.state.jobs


AllJobs = Annotated[Jobs, Depends(jobs_of)]


@router.post("/v1/jobs", status_code=202, openapi_extra=body_of(ChatBody, CompletionBody))
async def start(request: Request, jobs: AllJobs) -> Response:
    """The body of a chat (`messages`) or of a completion (`prompt`), for one answer."""
    body = await json_body(request, _read)
    prepared = await prepare(request, body.model_copy(update={"stream": True}), f"job-{secrets.token_hex(12)}")
    job = jobs.start(prepared)
    return JSONResponse({"job_id": job.id, "sse_url": f"/v1/jobs/{job.id}/stream"}, 202)


def _read(given: object) -> ChatBody | CompletionBody:
    body = (ChatBody if isinstance(given, dict) and "messages" in given else CompletionBody).parse(given)
    problems = body.misfits()
    if body.n > 1:
        problems.append(Problem("n", "a job has one answer", "start several jobs"))
    if isinstance(body, CompletionBody) and len(body.prompts) > 1:
        problems.append(Problem("prompt", "a job has one prompt", "start several jobs"))
    if isinstance(body, CompletionBody) and body.echo:
        problems.append(Problem("echo", "a job sends only generated text", "leave it out"))
    if problems:
        raise InvalidRequest(problems)
    return body


@router.get("/v1/jobs/{job_id}")
async def job(jobs: AllJobs, job_id: str) -> dict:
    found = jobs.get(job_id)
    about = {"job_id": found.id, "object": "job", "ended": found.ended}
    return {**about, "tokens_out": found.tokens, "events": len(found.events)}


@router.get("/v1/jobs/{job_id}/stream", response_class=Response)
async def stream(
    serving: Shared,
    jobs: AllJobs,
    job_id: str,
    last: Annotated[int | None, Header(alias="Last-Event-ID", ge=0, lt=10**9)] = None,
) -> Response:
    """The events of a job, from the first or from after `Last-Event-ID`, until its end."""
    job = jobs.get(job_id)
    at = 0 if last is None else last + 1
    return EventStream(lambda: job.listen(at), serving.settings.stall_s)


@router.delete("/v1/jobs/{job_id}")
async def cancel(jobs: AllJobs, job_id: str) -> dict:
    """Cancel a running job, whose events stay for its listeners, or delete one that has ended."""
    job = jobs.get(job_id)
    if job.ended:
        jobs.forget(job_id)
    else:
        job.cancel()
    return {"job_id": job.id, "object": "job", "cancelled": not job.ended, "deleted": job.ended}
