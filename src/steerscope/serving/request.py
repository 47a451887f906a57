"""One request of an OpenAI route on its way through the engine: its plans, its events, and the answer made of them."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, MutableMapping, Sequence
from json.encoder import encode_basestring_ascii as quoted

from steerscope.capture.rows import Rows
from steerscope.engines.detokenizer import Decoder, Detokenizer
from steerscope.engines.plan import Prompt
from steerscope.engines.results import Choice, EndEvent, Event, Generation, TokenEvent, TokenLogprobs
from steerscope.serving.answers import ChoiceExtras, Writer
from steerscope.serving.bodies import Body, CompletionBody, SteerscopeOptions
from steerscope.serving.errors import ApiError
from steerscope.serving.metrics import RequestTimes
from steerscope.serving.projections import Projections, Projector
from steerscope.serving.state import Serving
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Interval, SelectorError, resolve

_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat goes on to the end of the context
_LISTED = re.compile(r"prompts\[(\d+)\]\.?(.*)", re.DOTALL)
_NO_LIMIT = 2048  # for a model that does not say how long its context is


class GenerationRequest:
    """Planned when it is made, so that mistakes are reported at once; runs when chunks or the whole are asked for."""

    def __init__(
        self,
        serving: Serving,
        body: Body,
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
        self.on_start: Callable[[], None] = lambda: None  # called when its turn has come
        self.times = RequestTimes(serving.metrics)
        self._echoes = echoes
        self._engine = serving.engine
        self._options = body.steerscope
        self._names = [f"{writer.id}.{i}" if len(prompts) > 1 else writer.id for i in range(len(prompts))]
        self._samplings = [body.sampling(self._room(prompt)) for prompt in prompts]
        self._n = self._samplings[0].n
        self._projector: Projector | None = None
        self._selected: list[list[Interval]] = []  # of each prompt, the tokens that the answer returns
        needs_events = body.stream or self._options is not None
        self._streams = self._plan(self._options or SteerscopeOptions()) if needs_events else []
        self._extras: dict[int, ChoiceExtras] = {}
        self._offsets: dict[int, int] = {}  # where the next token's text begins, for log probabilities of completions

    def _room(self, prompt: Prompt) -> int:
        context = self._engine.facts.context
        left = _NO_LIMIT if context is None else context - len(prompt.token_ids)
        return min(_COMPLETION_TOKENS, left) if isinstance(self.body, CompletionBody) else left

    def _plan(self, options: SteerscopeOptions) -> list[AsyncGenerator[list[Event]]]:
        problems: list[Problem] = []
        streams: list[AsyncGenerator[list[Event]]] = []
        capture, watch = options.capture, options.whole_watch
        pause = self.serving.pause if self.body.stream else None
        try:
            if options.project:
                self._projector = Projector(options.project, self.serving.vectors, self._engine.facts, options.prompt)
                capture = self._projector.capture(options.capture)
            if options.prompt is not None:
                self._selected = [_select(options.prompt, prompt) for prompt in self.prompts]
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
                self.times.batch(i, batch)
                texts: list[str] = []
                for event in batch:
                    if isinstance(event, TokenEvent):
                        texts += self._token_chunks(i, event, opened)
                    elif isinstance(event, EndEvent):
                        done[i] = event.generation
                        texts += await self._last_chunks(i, event.generation)
                    elif self._options is not None:
                        self._extra(i, event.choice).rule(event)
                if found := "".join(texts):
                    yield found.encode()
        if self.body.include_usage:
            yield self.writer.usage_chunk(list(done.values())).encode()

    def _token_chunks(self, i: int, event: TokenEvent, opened: set[int]) -> Iterator[str]:
        writer = self.writer
        index = i * self._n + event.choice
        if index not in opened:
            opened.add(index)
            if writer.chat:
                yield writer.opening(index)
            elif self._echoes[i]:
                yield writer.token(index, self._echoes[i])
        logprobs = "null" if event.logprobs is None else self._logprobs(i, index, (event.logprobs,))
        extra = "" if self._options is None else self._extra(i, event.choice).token(event)
        yield writer.token(index, event.text, logprobs, extra)

    async def _last_chunks(self, i: int, generation: Generation) -> list[str]:
        self._end(generation)
        return [
            self.writer.last(i * self._n + choice.index, choice, await self._last_extra(i, choice))
            for choice in generation.choices
        ]

    # --- as a whole

    async def whole(self) -> bytes:
        done = await (self._generate() if self._options is None else self._collect())
        parts: list[str] = []
        for i, generation in enumerate(done):
            self._end(generation)
            for choice in generation.choices:
                index, text = i * self._n + choice.index, self._echoes[i] + choice.text
                logprobs = self._logprobs(i, index, choice.logprobs) if choice.logprobs else "null"
                extra = await self._last_extra(i, choice)
                parts.append(self.writer.choice(index, choice, text, logprobs, extra))
        return self.writer.whole(parts, done).encode()

    async def _collect(self) -> list[Generation]:
        ended: dict[int, Generation] = {}
        async with contextlib.aclosing(self.batches()) as batches:
            async for i, batch in batches:
                self.times.batch(i, batch)
                for event in batch:
                    if isinstance(event, EndEvent):
                        ended[i] = event.generation
                    elif isinstance(event, TokenEvent):
                        self._extra(i, event.choice).token(event)
                    else:
                        self._extra(i, event.choice).rule(event)
        return [ended[i] for i in sorted(ended)]

    async def _generate(self) -> list[Generation]:
        async with self.serving.admission.place(self._n * len(self.prompts)):
            try:
                done = await self._engine.generate(list(self.prompts), self._samplings)
            except InvalidRequest as error:
                raise InvalidRequest(_of_prompts(error.problems, len(self.prompts))) from None
        for generation in done:
            self.times.whole(generation)
        return done

    # --- events

    async def batches(self) -> AsyncGenerator[tuple[int, list[Event]]]:
        """Yield the events of all prompts, each with its prompt's number; in one list those that came together."""
        async with self.serving.admission.place(self._n * len(self.prompts)):
            self.on_start()
            if len(self._streams) == 1:
                async with contextlib.aclosing(self._streams[0]) as stream:
                    async for batch in stream:
                        yield 0, batch
                return
            async with contextlib.aclosing(_merged(self._streams)) as several:
                async for found in several:
                    yield found

    def cancel(self) -> bool:
        """End between two steps with the tokens so far. Returns whether anything was running."""
        return any([self._engine.cancel(name) for name in self._names])

    # --- what the answer has beside the text

    def _logprobs(self, i: int, index: int, found: Sequence[TokenLogprobs]) -> str:
        texts = self.serving.texts
        assert texts is not None
        if self.writer.chat:
            return texts.chat(found)
        offset = self._offsets.get(index, len(self._echoes[i]))
        self._offsets[index] = offset + sum(len(texts.of(one.token_id)[0]) for one in found)
        return texts.completion(found, offset)

    def _extra(self, i: int, choice: int) -> ChoiceExtras:
        index = i * self._n + choice
        found = self._extras.get(index)
        if found is None:
            length, whole = len(self.prompts[i].token_ids), not self.body.stream
            found = self._extras[index] = ChoiceExtras(length, whole, self.prompt_json(i))
        return found

    def prompt_json(self, i: int) -> str | None:
        """Return the selected tokens of a prompt as JSON; None if the request selects none."""
        texts = self.serving.texts
        if not self._selected or texts is None:
            return None
        return _tokens_json(texts.decoder, self.prompts[i].token_ids, self._selected[i])

    async def _last_extra(self, i: int, choice: Choice) -> str:
        if self._options is None:
            return ""
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
        found = {"projections": projector.project(rows, p, len(choice.token_ids))}
        if self._selected:
            positions = [at for start, stop in self._selected[i] for at in range(start, stop)]
            every = projector.project(rows, 0, p)
            found["prompt_projections"] = {
                name: {layer: [values[at] for at in positions] for layer, values in layers.items()}
                for name, layers in every.items()
            }
        return found

    def _end(self, generation: Generation) -> None:
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise ApiError(503, "the request was ended because the server stops", "stopping", retry_after=10)
        self.times.done(generation)
        n_tokens = sum(len(choice.token_ids) for choice in generation.choices)
        before = self.note.get("tokens", 0)
        self.note["tokens"] = n_tokens + (before if isinstance(before, int) else 0)


# --- tokens of the prompt that a request selects: `"prompt": "message=2"`


def _select(selector: str, prompt: Prompt) -> list[Interval]:
    p = len(prompt.token_ids)
    try:
        return list(resolve(selector, p, prompt.messages, prompt.open_message, p).within(0, p))
    except SelectorError as error:
        raise InvalidRequest([Problem.of("steerscope.prompt", error)]) from None


def _tokens_json(decoder: Decoder, ids: Sequence[int], intervals: list[Interval]) -> str:
    """Return position, id and text of each token. The text of a character that has several stands at the last one."""
    found: list[str] = []
    for start, stop in intervals:
        text = Detokenizer(decoder)
        if start:
            text.push(ids[start - 1])  # some tokenizers drop a leading space where a text begins
        for at in range(start, stop):
            piece = text.push(ids[at]) + (text.flush() if at == stop - 1 else "")
            found.append(f'{{"position":{at},"id":{ids[at]},"t":{quoted(piece)}}}')
    return ",".join(found)


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
