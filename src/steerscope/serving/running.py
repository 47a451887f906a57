"""One request of an OpenAI route on its way through the engine: its plans, its events, and the answer made of them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, MutableMapping, Sequence

from steerscope.capture.rows import Rows
from steerscope.engines.plan import Prompt
from steerscope.engines.results import Choice, EndEvent, Event, Generation, RuleEvent, TokenEvent, TokenLogprobs
from steerscope.serving.answers import Writer
from steerscope.serving.bodies import Asked, Body, CompletionBody
from steerscope.serving.errors import ApiError
from steerscope.serving.extras import Extras
from steerscope.serving.merging import merged, of_prompt, of_prompts
from steerscope.serving.projecting import Projecting, Projections
from steerscope.serving.prompts import chosen, told
from steerscope.serving.state import Serving
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Interval

_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat goes on to the end of the context
_NO_LIMIT = 2048  # for a model that does not say how long its context is


class Running:
    """Planned when it is made, so that mistakes are told at once; runs when it is asked for chunks or the whole."""

    def __init__(
        self,
        serving: Serving,
        body: Body,
        prompts: Sequence[Prompt],
        echoes: Sequence[str],
        writer: Writer,
        note: MutableMapping[str, object],
    ) -> None:
        self.serving, self.body, self.writer, self.note = serving, body, writer, note
        self.prompts, self.echoes = prompts, echoes
        self.engine, self.asked = serving.engine, body.steerscope
        self.names = [f"{writer.id}.{i}" if len(prompts) > 1 else writer.id for i in range(len(prompts))]
        self.samplings = [body.sampling(self._room(prompt)) for prompt in prompts]
        self.n = self.samplings[0].n
        self.on_start: Callable[[], None] = lambda: None  # called when its turn has come
        self.projecting: Projecting | None = None
        self.chosen: list[list[Interval]] = []  # of each prompt, the tokens that are told
        self.streams = self._plan(self.asked or Asked()) if body.stream or self.asked is not None else []
        self.tally = serving.metrics.tally()
        self._extras: dict[int, Extras] = {}
        self._offsets: dict[int, int] = {}  # where the next token's text begins, for log probabilities of completions

    def _room(self, prompt: Prompt) -> int:
        context = self.engine.facts.context
        left = _NO_LIMIT if context is None else context - len(prompt.token_ids)
        return min(_COMPLETION_TOKENS, left) if isinstance(self.body, CompletionBody) else left

    def _plan(self, asked: Asked) -> list[AsyncGenerator[list[Event]]]:
        problems: list[Problem] = []
        streams: list[AsyncGenerator[list[Event]]] = []
        capture, watch = asked.capture, asked.whole_watch
        pause = self.serving.pause if self.body.stream else None
        try:
            if asked.project:
                self.projecting = Projecting(asked.project, self.serving.vectors, self.engine.facts, asked.prompt)
                capture = self.projecting.capture(asked.capture)
            if asked.prompt is not None:
                self.chosen = [chosen(asked.prompt, prompt) for prompt in self.prompts]
        except InvalidRequest as error:
            problems += error.problems
        for i, (prompt, sampling) in enumerate(zip(self.prompts, self.samplings, strict=True)):
            try:
                streams.append(
                    self.engine.batches(
                        prompt,
                        sampling,
                        pause,
                        steer=asked.steer,
                        capture=capture,
                        watch=watch,
                        request_id=self.names[i],
                    )
                )
            except InvalidRequest as error:
                problems += of_prompt(error.problems, i, len(self.prompts))
        if problems:
            raise InvalidRequest(dict.fromkeys(problems))
        return streams

    # --- as a stream

    async def chunks(self) -> AsyncGenerator[bytes]:
        writer, chat, asked, tally, n = self.writer, self.writer.chat, self.asked is not None, self.tally, self.n
        done: dict[int, Generation] = {}
        opened: set[int] = set()
        async with contextlib.aclosing(self.batches()) as batches:
            async for i, batch in batches:
                texts: list[str] = []
                tally.tokens(i, batch)
                for event in batch:
                    if isinstance(event, TokenEvent):
                        index = i * n + event.choice
                        extra = self._extra(i, index).token(event) if asked else ""
                        if index not in opened:
                            opened.add(index)
                            texts.append(writer.opening(index) if chat else self._echo(i, index))
                        if event.logprobs is not None:
                            told = self._logprobs(i, index, (event.logprobs,))
                            texts.append(writer.token(index, event.text, told, extra))
                        else:
                            texts.append(writer.token(index, event.text, "null", extra))
                    elif isinstance(event, RuleEvent):
                        if asked:
                            self._extra(i, i * n + event.choice).rule(event)
                    else:
                        done[i] = event.generation
                        texts.append(await self._last(i, event.generation))
                if found := "".join(texts):
                    yield found.encode()
        if self.body.include_usage:
            yield writer.usage_chunk(list(done.values())).encode()

    def _echo(self, i: int, index: int) -> str:
        return self.writer.token(index, self.echoes[i]) if self.echoes[i] else ""

    async def _last(self, i: int, generation: Generation) -> str:
        self._end(generation)
        found = ""
        for choice in generation.choices:
            extra = await self._ended(i, choice) if self.asked is not None else ""
            found += self.writer.last(i * self.n + choice.index, choice, extra)
        return found

    # --- as a whole

    async def whole(self) -> bytes:
        if self.asked is None:
            done = await self._generate()
            for generation in done:
                self.tally.untold(generation)
        else:
            done = await self._collect()
        parts: list[str] = []
        for i, generation in enumerate(done):
            self._end(generation)
            for choice in generation.choices:
                index, text = i * self.n + choice.index, self.echoes[i] + choice.text
                told = self._logprobs(i, index, choice.logprobs) if choice.logprobs else "null"
                extra = await self._ended(i, choice) if self.asked is not None else ""
                parts.append(self.writer.choice(index, choice, text, told, extra))
        return self.writer.whole(parts, done).encode()

    async def _collect(self) -> list[Generation]:
        ended: dict[int, Generation] = {}
        async with contextlib.aclosing(self.batches()) as batches:
            async for i, batch in batches:
                self.tally.tokens(i, batch)
                for event in batch:
                    if isinstance(event, EndEvent):
                        ended[i] = event.generation
                        continue
                    extra = self._extra(i, i * self.n + event.choice)
                    extra.token(event) if isinstance(event, TokenEvent) else extra.rule(event)
        return [ended[i] for i in sorted(ended)]

    async def _generate(self) -> list[Generation]:
        async with self.serving.admission.place(self.n * len(self.prompts)):
            try:
                return await self.engine.generate(list(self.prompts), self.samplings)
            except InvalidRequest as error:
                raise InvalidRequest(of_prompts(error.problems, len(self.prompts))) from None

    # --- events

    async def batches(self) -> AsyncGenerator[tuple[int, list[Event]]]:
        """Events of all prompts, as they come; in one list those that came together."""
        async with self.serving.admission.place(self.n * len(self.prompts)):
            self.on_start()
            if len(self.streams) == 1:
                async with contextlib.aclosing(self.streams[0]) as stream:
                    async for batch in stream:
                        yield 0, batch
                return
            async with contextlib.aclosing(merged(self.streams)) as several:
                async for found in several:
                    yield found

    def cancel(self) -> bool:
        """End what runs between two steps, with what it has; False: nothing runs."""
        return any([self.engine.cancel(name) for name in self.names])

    # --- what is told beside the text

    def _logprobs(self, i: int, index: int, found: Sequence[TokenLogprobs]) -> str:
        texts = self.serving.texts
        assert texts is not None
        if self.writer.chat:
            return texts.chat(found)
        offset = self._offsets.get(index, len(self.echoes[i]))
        self._offsets[index] = offset + sum(len(texts.of(one.token_id)[0]) for one in found)
        return texts.completion(found, offset)

    def _extra(self, i: int, index: int) -> Extras:
        found = self._extras.get(index)
        if found is None:
            length, whole = len(self.prompts[i].token_ids), not self.body.stream
            found = self._extras[index] = Extras(length, whole, self.prompt_told(i))
        return found

    def prompt_told(self, i: int) -> str | None:
        """The tokens of a prompt that are to be told, as JSON; None: nobody asked."""
        texts = self.serving.texts
        return told(texts.decoder, self.prompts[i], self.chosen[i]) if self.chosen and texts is not None else None

    async def _ended(self, i: int, choice: Choice) -> str:
        """How a choice ended, with its projections and its rows."""
        return self._extra(i, i * self.n + choice.index).last(choice, await self.more(i, choice))

    async def more(self, i: int, choice: Choice) -> dict[str, object]:
        """The projections of a choice, and where its rows are kept."""
        more: dict[str, object] = {}
        handle = choice.capture
        if handle is not None and self.projecting is not None:
            more |= await asyncio.to_thread(self._projected, handle.fetch(), i, len(choice.token_ids))
        if handle is not None and self.asked is not None and self.asked.capture is not None:
            more["captures"] = self.serving.captures.keep(handle).about()
        elif handle is not None:
            handle.close()
        return more

    def _projected(self, rows: Rows, i: int, count: int) -> dict[str, Projections]:
        assert self.projecting is not None
        p = len(self.prompts[i].token_ids)
        found = {"projections": self.projecting.of(rows, p, count)}
        if self.chosen:
            places = [at for start, stop in self.chosen[i] for at in range(start, stop)]
            every = self.projecting.of(rows, 0, p)
            found["prompt_projections"] = {
                name: {layer: [values[at] for at in places] for layer, values in layers.items()}
                for name, layers in every.items()
            }
        return found

    def _end(self, generation: Generation) -> None:
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise ApiError(503, "the request was ended because the server stops", "stopping", retry_after=10)
        self.tally.done(generation)
        made = sum(len(choice.token_ids) for choice in generation.choices)
        before = self.note.get("tokens", 0)
        self.note["tokens"] = made + (before if isinstance(before, int) else 0)
