"""Jobs: requests that run whoever listens. `POST /v1/jobs` starts one, `GET /v1/jobs/{id}/stream` tells its events,
from the first or from after `Last-Event-ID`, `DELETE /v1/jobs/{id}` cancels it.

Every event is written once, as the bytes that all listeners get, and kept until a while after the job's end.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from json.encoder import encode_basestring_ascii as quoted

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from steerscope.engines.results import Choice, EndEvent, FinishReason, RuleEvent, TokenEvent
from steerscope.serving.access import serving_of
from steerscope.serving.bodies import ChatBody, CompletionBody
from steerscope.serving.describing import body_of
from steerscope.serving.errors import ApiError, api_error
from steerscope.serving.extras import firing_text, reading_texts
from steerscope.serving.openai import prepare
from steerscope.serving.reading import json_body
from steerscope.serving.running import Running
from steerscope.serving.sse import EventStream
from steerscope.serving.state import Serving
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
MOST_JOBS = 4096  # that are remembered, those that run among them
MOST_BYTES = 64 << 20  # of one job's events
MOST_HELD = 512 << 20  # of all jobs together, with the bodies they were asked with
PIECE_BYTES = 64 << 10  # of events that are sent at once, up to the event that makes it so much
_METRICS_S = 1.0


class Job:
    """One request and all it has said."""

    def __init__(self, running: Running, grow: Callable[[int, bool], None], stopped: Callable[["Job"], None]) -> None:
        self.id = running.writer.id
        self.events: list[bytes] = []
        self.ended = False
        self.tokens = 0
        self._running, self._grow, self._stopped = running, grow, stopped
        self._prompt_length = len(running.prompts[0].token_ids)
        running.on_start = self._start
        asked = running.note.get("body_bytes", 0)
        self.size = asked if isinstance(asked, int) else 0
        grow(self.size, False)
        self._news = asyncio.Event()
        self._made = time.perf_counter()
        self._first = self._told = 0.0
        self._task = asyncio.create_task(self._run())

    # --- for those who listen

    async def listen(self, at: int) -> AsyncGenerator[bytes]:
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
        """Events from `at` on, not more than are sent at once: each listener has a copy of them."""
        size, stop = 0, at
        while stop < len(self.events) and size < PIECE_BYTES:
            size += len(self.events[stop])
            stop += 1
        return self.events[at:stop]

    def cancel(self) -> None:
        """Between two steps; one that has not begun ends at once."""
        if not self._running.cancel():
            self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # --- inside

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._running.batches()) as batches:
                async for _, batch in batches:
                    self._running.tally.tokens(0, batch)
                    for event in batch:
                        if isinstance(event, EndEvent):
                            choice = event.generation.choices[0]
                            self._end(choice, await self._running.more(0, choice))
                        else:
                            self._take(event)
                    self._wake()
        except asyncio.CancelledError:
            if self._running.serving.draining:
                self._tell("error", {"code": "stopping", "message": "the server is stopping"}, must=True)
            else:
                self._end(None, must=True)
        except Exception as error:
            told = api_error(error)
            if told.status >= 500 and not isinstance(error, SteerscopeError):
                log.error("unexpected", exc_info=error, extra={"job": self.id})
            self._tell("error", {"code": told.code or str(told.status), "message": told.message}, must=True)
        finally:
            self.ended = True
            del self._running  # its body and prompts are not needed to listen
            self._wake()
            self._stopped(self)

    def _take(self, event: TokenEvent | RuleEvent) -> None:
        if isinstance(event, TokenEvent):
            if not self.tokens:
                self._first = time.perf_counter()
            self.tokens += 1
            for text in reading_texts(event.readings, self._prompt_length):
                self._put("reading", text)
            self._put("token", f'{{"t":{quoted(event.text)},"i":{event.index},"id":{event.token_id}}}')
            if time.perf_counter() - self._told > _METRICS_S:
                self._metrics()
        else:
            self._put("rule", firing_text(event.firing))

    def _start(self) -> None:
        self._told = time.perf_counter()
        about = {"job_id": self.id, "model": self._running.serving.model_name, "prompt_tokens": self._prompt_length}
        prompt = self._running.prompt_told(0)
        more = {} if prompt is None else {"prompt": json.loads(f"[{prompt}]")}
        self._tell("started", {**about, "queued_ms": _ms(self._told - self._made), **more})

    def _end(self, choice: Choice | None, more: Mapping[str, object] | None = None, must: bool = False) -> None:
        if self.tokens:
            self._metrics(must)
        about = {
            "tokens_out": len(choice.token_ids) if choice else self.tokens,
            "decode_time_ms": _ms(time.perf_counter() - self._first) if self.tokens else 0.0,
            "stop_reason": STOPS[choice.finish_reason] if choice else "cancelled",
            "stop_sequence_matched": choice.stop_string if choice else None,
        }
        self._tell("end", {**about, **(more or {})}, must)

    def _metrics(self, must: bool = False) -> None:
        self._told = now = time.perf_counter()
        took = now - self._first
        rate = (self.tokens - 1) / took if self.tokens > 1 and took else 0.0
        about = {"tokens_out": self.tokens, "tokens_per_s": round(rate, 2), "ttft_ms": _ms(self._first - self._made)}
        self._put("metrics", json.dumps(about), must)

    def _tell(self, name: str, about: dict[str, object], must: bool = False) -> None:
        self._put(name, json.dumps(about), must)
        self._wake()

    def _put(self, name: str, data: str, must: bool = False) -> None:
        """Keep an event. Raises ApiError where there is no room for it, but for short ones that must be told."""
        event = f"id: {len(self.events)}\nevent: {name}\ndata: {data}\n\n".encode()
        if self.size + len(event) > MOST_BYTES and not must:
            what = f"the events of this job take more than {MOST_BYTES >> 20} MiB"
            raise ApiError(413, f"{what}: ask for fewer tokens, concepts, projections or rules", "job_too_large")
        self._grow(len(event), must)
        self.size += len(event)
        self.events.append(event)

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


class Jobs:
    """All jobs of a server that can still be listened to."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._jobs: dict[str, Job] = {}
        self.held = 0

    def start(self, running: Running) -> Job:
        self._serving.admission.check()
        if len(self._jobs) >= MOST_JOBS:
            self._forget_oldest(f"{MOST_JOBS} jobs are unfinished: try again later")
        job = Job(running, self._grow, self._keep_for_a_while)
        self._jobs[job.id] = job
        return job

    def get(self, name: str) -> Job:
        if name not in self._jobs:
            raise ApiError(404, f"there is no job {name!r:.100}: it never was, or ended long ago", "not_found")
        return self._jobs[name]

    def forget(self, name: str) -> None:
        if (job := self._jobs.pop(name, None)) is not None:
            self.held -= job.size

    def _grow(self, size: int, must: bool) -> None:
        """Count `size` bytes more, in place of jobs that have ended where there is no room beside them. Raises ApiError
        where there is none at all, unless they `must` be kept."""
        with contextlib.suppress(ApiError) if must else contextlib.nullcontext():
            while self.held + size > MOST_HELD:
                self._forget_oldest(f"the events of unfinished jobs take {MOST_HELD >> 20} MiB: try again later")
        self.held += size

    def _forget_oldest(self, otherwise: str) -> None:
        oldest = next((job.id for job in self._jobs.values() if job.ended), None)
        if oldest is None:
            raise ApiError(429, otherwise, "queue_full", retry_after=10)
        self.forget(oldest)

    def _keep_for_a_while(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(self._serving.settings.capture_ttl_s, self.forget, job.id)

    async def close(self) -> None:
        await asyncio.gather(*(job.close() for job in self._jobs.values()))


def jobs_of(request: Request) -> Jobs:
    return request.app.state.jobs


@router.post("/v1/jobs", status_code=202, openapi_extra=body_of(ChatBody, CompletionBody))
async def start(request: Request) -> Response:
    """The body of a chat (`messages`) or of a completion (`prompt`), for one answer."""
    body = await json_body(request, _read)
    running = await prepare(request, body.model_copy(update={"stream": True}), f"job-{secrets.token_hex(12)}")
    job = jobs_of(request).start(running)
    return JSONResponse({"job_id": job.id, "sse_url": f"/v1/jobs/{job.id}/stream"}, 202)


def _read(given: dict[str, object]) -> ChatBody | CompletionBody:
    body = ChatBody.parse(given) if "messages" in given else CompletionBody.parse(given)
    problems = body.misfits()
    if (body.n or 1) > 1:
        problems.append(Problem("n", "a job has one answer", "start several jobs"))
    if isinstance(body, CompletionBody) and len(body.prompts) > 1:
        problems.append(Problem("prompt", "a job has one prompt", "start several jobs"))
    if isinstance(body, CompletionBody) and body.echo:
        problems.append(Problem("echo", "a job tells only what is new", "leave it out"))
    if problems:
        raise InvalidRequest(problems)
    return body


@router.get("/v1/jobs/{job_id}")
async def look(request: Request, job_id: str) -> Response:
    job = jobs_of(request).get(job_id)
    about = {"job_id": job.id, "object": "job", "ended": job.ended, "tokens_out": job.tokens, "events": len(job.events)}
    return JSONResponse(about)


@router.get("/v1/jobs/{job_id}/stream", response_class=Response)
async def stream(request: Request, job_id: str) -> Response:
    job = jobs_of(request).get(job_id)
    last = request.headers.get("last-event-id")
    if last is not None and not (last.isascii() and last.isdecimal() and len(last) < 10):
        what = f"{last!r:.60} is no event of this job"
        raise InvalidRequest([Problem("Last-Event-ID", what, f"send a number below {len(job.events)}")])
    at = 0 if last is None else int(last) + 1
    return EventStream(lambda: job.listen(at), serving_of(request).settings.stall_s)


@router.delete("/v1/jobs/{job_id}")
async def cancel(request: Request, job_id: str) -> Response:
    """One that runs is cancelled, and its events stay for those who listen; one that has ended is forgotten."""
    jobs = jobs_of(request)
    job = jobs.get(job_id)
    if job.ended:
        jobs.forget(job_id)
    else:
        job.cancel()
    return JSONResponse({"job_id": job.id, "object": "job", "cancelled": not job.ended, "deleted": job.ended})
