"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`, as OpenAI's clients use them.

A `GenerationRequest` is one request on its way through the engine: its plans, its events, and the answer made of them.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Iterable, MutableMapping, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from steerscope.capture.rows import Rows
from steerscope.engines.plan import Prompt
from steerscope.engines.results import Choice, EndEvent, Event, Generation, TokenEvent, TokenLogprobs, TokenPrompt
from steerscope.serving.answers import Json, Writer
from steerscope.serving.bodies import ChatBody, CompletionBody, SteerscopeOptions, body_of, in_thread_if_long, json_body
from steerscope.serving.errors import ApiError
from steerscope.serving.extras import Extras, Projections, Projector, about_tokens, select
from steerscope.serving.metrics import RequestTimes
from steerscope.serving.sse import EventStream, WholeResponse
from steerscope.serving.state import Serving, Shared, shared
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Interval

router = APIRouter()
_MESSAGE = 1000  # cost of a message beside its text, in characters
_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat goes on to the end of the context
_LISTED = re.compile(r"prompts\[(\d+)\]\.?(.*)", re.DOTALL)
_NO_LIMIT = 2048  # for a model that does not say how long its context is


# --- routes


@router.get("/v1/models")
async def models(serving: Shared) -> dict:
    return {"object": "list", "data": [_model(serving)]}


@router.get("/v1/models/{name:path}")
async def model(serving: Shared, name: str) -> dict:
    serving.check_model(name)
    return _model(serving)


def _model(serving: Serving) -> dict[str, object]:
    return {"id": serving.model_name, "object": "model", "created": int(serving.began), "owned_by": "steerscope"}


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
async def chat(request: Request) -> Response:
    return await _answer(request, await json_body(request, ChatBody.read))


@router.post("/v1/completions", openapi_extra=body_of(CompletionBody))
async def completions(request: Request) -> Response:
    return await _answer(request, await json_body(request, CompletionBody.read))


async def _answer(request: Request, body: ChatBody | CompletionBody) -> Response:
    prepared = await prepare(request, body)
    stall_s = prepared.serving.settings.stall_s
    return EventStream(prepared.chunks, stall_s) if body.stream else WholeResponse(prepared.whole, stall_s)


async def prepare(request: Request, body: ChatBody | CompletionBody, name: str | None = None) -> "GenerationRequest":
    """Return a request that is planned and can run; `name` replaces its id of OpenAI's kind."""
    serving = await shared(request)
    serving.check_model(body.model)
    engine = serving.engine

    def render(chat: ChatBody) -> list[Prompt]:
        messages = [message.plain() for message in chat.messages]
        final = chat.continue_final_message
        options = chat.chat_template_kwargs
        return [engine.render(messages, continue_final_message=final, template_options=options)]

    def tokenize(completion: CompletionBody) -> list[Prompt]:
        return [engine.tokenize(one if isinstance(one, str) else TokenPrompt(one)) for one in completion.prompts]

    if isinstance(body, ChatBody):
        size = sum(_MESSAGE + len(message.content) for message in body.messages)
        prompts = await in_thread_if_long(lambda: render(body), size)
        echoes = [""]
    else:
        prompts = await in_thread_if_long(lambda: tokenize(body), sum(map(len, body.prompts)))
        echoes = [_echo(serving, one) if body.echo else "" for one in body.prompts]
    writer = Writer(isinstance(body, ChatBody), serving.model_name, body.include_usage, name)
    return GenerationRequest(serving, body, prompts, echoes, writer, request.scope["state"])


def _echo(serving: Serving, prompt: str | Sequence[int]) -> str:
    """Return a prompt's text. Ids that the model does not have are refused later, with every other problem."""
    if isinstance(prompt, str):
        return prompt
    fits = all(0 <= one < serving.engine.facts.vocab for one in prompt)
    return str(serving.engine.tokenizer.decode(list(prompt))) if fits else ""


# --- one request


class GenerationRequest:
    """Planned when it is made, so that mistakes are reported at once; runs when chunks or the whole are asked for."""

    def __init__(
        self,
        serving: Serving,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        echoes: Sequence[str],
        writer: Writer,
        note: MutableMapping[str, object],
    ) -> None:
        self.serving = serving
        self.body = body
        self.prompts = prompts
        self.writer = writer
        self.note = note
        self._times = RequestTimes(serving.metrics)
        self._echoes = echoes
        self._engine = serving.engine
        self._options = body.steerscope
        self._names = [f"{writer.id}.{i}" if len(prompts) > 1 else writer.id for i in range(len(prompts))]
        self._samplings = [body.sampling(self._room(prompt)) for prompt in prompts]
        self._projector: Projector | None = None
        self._selected: list[list[Interval]] = []  # of each prompt, the tokens that the answer returns
        needs_events = body.stream or self._options is not None
        self._streams = self._plan(self._options or SteerscopeOptions()) if needs_events else []
        self._extras: dict[int, Extras] = {}
        self._offsets: dict[int, int] = {}  # where the next token's text begins, for log probabilities of completions

    def _room(self, prompt: Prompt) -> int:
        context = self._engine.facts.context
        left = _NO_LIMIT if context is None else context - len(prompt.token_ids)
        return min(_COMPLETION_TOKENS, left) if isinstance(self.body, CompletionBody) else left

    def _plan(self, options: SteerscopeOptions) -> list[AsyncGenerator[list[Event]]]:
        problems: list[Problem] = []
        streams: list[AsyncGenerator[list[Event]]] = []
        capture = options.capture
        watch = options.whole_watch
        pause = self.serving.pause if self.body.stream else None
        try:
            if options.project:
                self._projector = Projector(options.project, self.serving.vectors, self._engine.facts, options.prompt)
                capture = self._projector.capture(options.capture)
            if options.prompt is not None:
                self._selected = [select(options.prompt, prompt) for prompt in self.prompts]
        except InvalidRequest as error:
            problems += error.problems
        for i, (prompt, sampling) in enumerate(zip(self.prompts, self._samplings, strict=True)):
            name = self._names[i]
            try:
                stream = self._engine.batches(
                    prompt, sampling, pause, steer=options.steer, capture=capture, watch=watch, request_id=name
                )
                streams.append(stream)
            except InvalidRequest as error:
                problems += [problem.under(f"prompts[{i}]") for problem in error.problems]
        if problems:
            raise InvalidRequest(_of_prompts(problems, len(self.prompts)))
        return streams

    # --- as a stream

    async def chunks(self) -> AsyncGenerator[bytes]:
        done: dict[int, Generation] = {}
        opened: set[int] = set()
        async with contextlib.aclosing(self.batches()) as batches:
            async for i, batch in batches:
                texts: list[str] = []
                for event in batch:
                    if isinstance(event, TokenEvent):
                        texts += self._token_chunks(i, event, opened)
                    elif isinstance(event, EndEvent):
                        done[i] = event.generation
                        texts += await self._last_chunks(i, event.generation)
                    elif self._options is not None:
                        self._extra(i, event.choice).add(event)
                if texts:
                    yield "".join(texts).encode()
        if self.body.include_usage:
            yield self.writer.usage_chunk(list(done.values())).encode()

    def _token_chunks(self, i: int, event: TokenEvent, opened: set[int]) -> list[str]:
        index = self._index(i, event.choice)
        chunks: list[str] = []
        if index not in opened:
            opened.add(index)
            if self.writer.chat:
                chunks.append(self.writer.opening(index))
            elif self._echoes[i]:
                chunks.append(self.writer.token(index, self._echoes[i]))
        logprobs = None if event.logprobs is None else self._logprobs(i, index, [event.logprobs])
        extra = None
        if self._options is not None:
            extras = self._extra(i, event.choice)
            extras.add(event)
            extra = extras.take()
        return [*chunks, self.writer.token(index, event.text, logprobs, extra)]

    async def _last_chunks(self, i: int, generation: Generation) -> list[str]:
        self._end(generation)
        return [
            self.writer.last(self._index(i, choice.index), choice, await self._last_extra(i, choice))
            for choice in generation.choices
        ]

    # --- as a whole

    async def whole(self) -> bytes:
        done = await (self._generate() if self._options is None else self._collect())
        parts: list[Json] = []
        for i, generation in enumerate(done):
            self._end(generation)
            for choice in generation.choices:
                index = self._index(i, choice.index)
                logprobs = self._logprobs(i, index, choice.logprobs) if choice.logprobs else None
                extra = await self._last_extra(i, choice)
                parts.append(self.writer.choice(index, choice, self._echoes[i] + choice.text, logprobs, extra))
        return self.writer.whole(parts, done)

    async def _collect(self) -> list[Generation]:
        ended: dict[int, Generation] = {}
        async with contextlib.aclosing(self.batches()) as batches:
            async for i, batch in batches:
                for event in batch:
                    if isinstance(event, EndEvent):
                        ended[i] = event.generation
                    else:
                        self._extra(i, event.choice).add(event)
        return [ended[i] for i in sorted(ended)]

    async def _generate(self) -> list[Generation]:
        async with self.serving.admission.place(self._samplings[0].n * len(self.prompts)):
            try:
                done = await self._engine.generate(list(self.prompts), self._samplings)
            except InvalidRequest as error:
                raise InvalidRequest(_of_prompts(error.problems, len(self.prompts))) from None
        for generation in done:
            self._times.whole(generation)
        return done

    # --- events

    async def batches(self) -> AsyncGenerator[tuple[int, list[Event]]]:
        """Yield the events of all prompts, each with its prompt's number; in one list those that came together. The
        first list is empty: the request's turn has come."""
        async with self.serving.admission.place(self._samplings[0].n * len(self.prompts)):
            yield 0, []
            async with contextlib.aclosing(_merged(self._streams)) as several:
                async for i, batch in several:
                    self._times.batch(i, batch)
                    yield i, batch

    def cancel(self) -> bool:
        """End between two steps with the tokens so far. Returns whether anything was running."""
        return any([self._engine.cancel(name) for name in self._names])

    # --- what the answer has beside the text

    def _index(self, i: int, choice: int) -> int:
        return i * self._samplings[0].n + choice

    def _logprobs(self, i: int, index: int, found: Sequence[TokenLogprobs]) -> Json:
        texts = self.serving.texts
        if self.writer.chat:
            return texts.chat(found)
        offset = self._offsets.get(index, len(self._echoes[i]))
        self._offsets[index] = offset + sum(len(texts.of(one.token_id)[0]) for one in found)
        return texts.completion(found, offset)

    def _extra(self, i: int, choice: int) -> Extras:
        index = self._index(i, choice)
        if index not in self._extras:
            self._extras[index] = Extras(len(self.prompts[i].token_ids), self.selected(i))
        return self._extras[index]

    def selected(self, i: int) -> list[dict[str, object]] | None:
        """Return the selected tokens of a prompt; None if the request selects none."""
        if not self._selected:
            return None
        return about_tokens(self.serving.texts.decoder, self.prompts[i].token_ids, self._selected[i])

    async def _last_extra(self, i: int, choice: Choice) -> Json | None:
        if self._options is None:
            return None
        return self._extra(i, choice.index).last(choice, await self.rows_about(i, choice))

    async def rows_about(self, i: int, choice: Choice) -> dict[str, object]:
        """Return the projections of a choice and the capture its rows can be fetched from."""
        found: dict[str, object] = {}
        handle = choice.capture
        if handle is None:
            return found
        if self._projector is not None:
            found |= await asyncio.to_thread(self._projected, self._projector, handle.fetch(), i, choice)
        if self._options is not None and self._options.capture is not None:
            found["captures"] = self.serving.captures.keep(handle).about()
        else:
            handle.close()
        return found

    def _projected(self, projector: Projector, rows: Rows, i: int, choice: Choice) -> dict[str, Projections]:
        p = len(self.prompts[i].token_ids)
        found = {"projections": projector.project(rows, range(p, p + len(choice.token_ids)))}
        if self._selected:
            positions = [at for start, stop in self._selected[i] for at in range(start, stop)]
            found["prompt_projections"] = projector.project(rows, positions)
        return found

    def _end(self, generation: Generation) -> None:
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise ApiError(503, "the request was ended because the server stops", "stopping", retry_after=10)
        self._times.done(generation)
        n_tokens = sum(len(choice.token_ids) for choice in generation.choices)
        before = self.note.get("tokens", 0)
        self.note["tokens"] = n_tokens + (before if isinstance(before, int) else 0)


# --- several prompts


def _of_prompts(problems: Iterable[Problem], count: int) -> list[Problem]:
    """Name the prompt in problems of one of several: `prompts[0].prompt` → `prompt[0]`; other fields are shared."""
    found: list[Problem] = []
    for problem in problems:
        listed = _LISTED.fullmatch(problem.field)
        number, field = listed.groups() if listed else ("", problem.field)
        name = f"prompt[{number}]" if field == "prompt" and listed and count > 1 else field
        found.append(Problem(name, problem.what, problem.remedy))
    return list(dict.fromkeys(found))


async def _merged(streams: Sequence[AsyncGenerator[list[Event]]]) -> AsyncGenerator[tuple[int, list[Event]]]:
    """Yield batches of several streams in the order they come; the first error ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for batch in stream:
                yield 0, batch
        return
    found: asyncio.Queue[tuple[int, list[Event] | Exception]] = asyncio.Queue()

    async def pump(i: int, stream: AsyncGenerator[list[Event]]) -> None:
        try:
            async for batch in stream:
                found.put_nowait((i, batch))
        except Exception as error:
            found.put_nowait((i, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            i, batch = await found.get()
            if isinstance(batch, Exception):
                raise batch
            left -= isinstance(batch[-1], EndEvent)
            yield i, batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
