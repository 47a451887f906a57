"""The Engine: async first, one protocol for both engines.

This class does everything that does not depend on what runs the model: prompts and chats to tokens, specs to plans,
room for captures, n choices, and stable return types. An engine below it runs plans.
"""

import asyncio
import contextlib
import functools
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, overload
from weakref import WeakKeyDictionary

from steerscope.capture.budget import ByteBudget
from steerscope.capture.handle import CaptureHandle, fetch_all
from steerscope.capture.rows import Rows
from steerscope.engines.options import (
    ChatOptions,
    Each,
    Many,
    ManyChat,
    One,
    OneChat,
    SteerLike,
    Stream,
    StreamChat,
    per_prompt,
    split,
)
from steerscope.engines.plan import Plan, Planner, Prompt, RequestSpecs, TemplateCache
from steerscope.engines.prompts import all_of, rendered, tokenized
from steerscope.engines.result_channels import LoopWaker, Pause, ResultChannel, discard, open_channel, sleep, waits_here
from steerscope.engines.results import (
    Choice,
    EndEvent,
    EngineJob,
    Event,
    Generation,
    PromptLike,
    TokenPrompt,
    assembled,
    singles,
)
from steerscope.engines.scopes import Scopes, as_steering
from steerscope.specs.capture import Capture
from steerscope.specs.chat import Chat
from steerscope.specs.errors import EngineClosed, InvalidRequest, Problem, RequestFailed
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Ablate, Add, Cap, Steering
from steerscope.specs.watch import Watch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Engine(Scopes, ABC):
    """Run requests on one model. Methods are coroutines; `engine.sync` is the same without await."""

    tokenizer: "PreTrainedTokenizerBase"
    capture_ttl: float
    dtype: "torch.dtype"  # of the activations
    device: "torch.device"  # of the model; of one that is spread over several, the first

    def __init__(self, budget: ByteBudget) -> None:
        super().__init__()
        self.budget = budget
        self._jobs: dict[str, list[EngineJob]] = {}
        self._numbers = itertools.count()
        self._noticed = threading.Event()  # a job was cancelled
        self._wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = WeakKeyDictionary()
        self._templates = TemplateCache()
        self.closed = False

    # --- what an engine does

    @abstractmethod
    def _submit(self, jobs: Sequence[EngineJob]) -> None:
        """Start jobs; each reports TokenEvents (if it streams), then its Choice or an exception. Never blocks."""

    def _row_bytes(self, plan: Plan) -> int:
        """Host bytes that the plan's capture can take at most."""
        capture = plan.capture
        return 0 if capture is None else capture.n_bytes(plan.most_rows, self.facts.hidden, self.dtype.itemsize)

    def _check_sampling(self, sampling: Sampling) -> list[Problem]:
        """What this engine cannot honour is refused, not ignored."""
        del sampling
        return []

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters and sizes since the start."""

    @abstractmethod
    def room_for(self, batch: int, tokens: int) -> str:
        """Say what memory `batch` texts of `tokens` tokens take, and whether the device has it."""

    @abstractmethod
    def _stop(self) -> None:
        """Release the model; running requests end as cancelled."""

    # --- requests

    @overload
    async def generate(
        self, prompt: PromptLike, sampling: Sampling | None = None, **options: Unpack[One]
    ) -> Generation: ...
    @overload
    async def generate(
        self,
        prompt: list[str] | list[TokenPrompt] | list[Prompt],
        sampling: Each[Sampling] = None,
        **options: Unpack[Many],
    ) -> list[Generation]: ...
    async def generate(self, prompt: Any, sampling: Each[Sampling] = None, **options: Unpack[Many]) -> Any:
        """Continue a prompt, or each of a list, with one spec for all or a list of specs, one each.

        Options: `steer`, `capture`, `watch`.
        """
        return await self._answer(prompt, isinstance(prompt, list), self.tokenize, sampling, options)

    @overload
    async def chat(
        self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[OneChat]
    ) -> Generation: ...
    @overload
    async def chat(
        self, messages: Sequence[Chat], sampling: Each[Sampling] = None, **options: Unpack[ManyChat]
    ) -> list[Generation]: ...
    async def chat(self, messages: Any, sampling: Each[Sampling] = None, **options: Unpack[ManyChat]) -> Any:
        """Answer a chat, `[{"role": "user", "content": "…"}]`, or each of several.

        Options: `steer`, `capture`, `watch`, `continue_final_message`, `template_options`.
        """
        many = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        of_template, of_request = split(options)
        render = functools.partial(self.render, **of_template)
        return await self._answer(messages, many, render, sampling, of_request)

    def stream(
        self, prompt: PromptLike, sampling: Sampling | None = None, **options: Unpack[Stream]
    ) -> AsyncGenerator[Event]:
        """Tokens as they are sampled, then one EndEvent. Leaving the loop early cancels the request.

        Options: `steer`, `capture`, `watch`, `request_id`.
        """
        return self._stream(self._plan_stream(self.tokenize(prompt), sampling, options))

    def batches(
        self,
        prompt: PromptLike,
        sampling: Sampling | None = None,
        pause: Pause | None = None,
        **options: Unpack[Stream],
    ) -> AsyncGenerator[list[Event]]:
        """`stream`, with all events that have come since the last time in one list; `pause` says how many seconds lie
        between two of them at least, unless the end has come."""
        return self._batches(self._plan_stream(self.tokenize(prompt), sampling, options), pause)

    def stream_chat(
        self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[StreamChat]
    ) -> AsyncGenerator[Event]:
        """`stream` for a chat; its options and those of `chat`."""
        of_template, of_request = split(options)
        return self._stream(self._plan_stream(self.render(messages, **of_template), sampling, of_request))

    def cancel(self, request_id: str) -> bool:
        """End a request between two steps; it finishes with what it has. False if it is not running."""
        jobs = self._jobs.get(request_id, [])
        for job in jobs:
            job.cancel()
        return bool(jobs)

    async def fetch_all(
        self, handles: Sequence[CaptureHandle], copy: bool = False, room: "torch.Tensor | None" = None
    ) -> list[Rows]:
        """The rows of many captures in one round trip. With `copy` they are in memory of your own, copied by several
        threads, and the room they had is free for other requests (rows that were fetched before keep their memory).
        `room` is memory to copy to, a uint8 tensor of `steerscope.capture.private_bytes(rows)` bytes that is used
        again and again, which is faster than fresh memory. What it holds is yours alone: the handles are closed, and
        rows that were copied there before are overwritten.
        """
        work = functools.partial(fetch_all, handles, copy, room)
        return work() if waits_here() else await asyncio.to_thread(work)

    # --- life

    async def close(self) -> None:
        """End running requests as cancelled; other calls that wait raise EngineClosed."""
        self.budget.closed = True
        if waits_here():
            self._stop()
            return
        try:
            await asyncio.to_thread(self._stop)
        except RuntimeError:  # the interpreter is ending and starts no threads any more
            self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- prompts

    def tokenize(self, prompt: PromptLike) -> Prompt:
        """What `generate` and `stream` make of a prompt, and take in its place. May be called from any thread."""
        return tokenized(self.tokenizer, prompt)  # type: ignore[arg-type]

    def render(self, chat: Chat, **options: Unpack[ChatOptions]) -> Prompt:
        """What `chat` makes of messages; `generate` and `stream` take it. May be called from any thread."""
        return rendered(self.tokenizer, self.facts.name, chat, options, self.facts.context)  # type: ignore[arg-type]

    # --- inside

    def _plan(
        self,
        prompts: Sequence[Prompt],
        many: bool,
        sampling: Each[Sampling],
        options: Mapping[str, Any],
        request_id: str | None = None,
    ) -> list[Plan]:
        """Plans of all prompts, or one error with the problems of all of them."""
        if self.closed:
            raise EngineClosed(f"the engine of {self.facts.name} was closed: load it again")
        version = self.names_version  # before names are looked up
        asked = self._specs(len(prompts), many, sampling, **options)
        plans: list[Plan] = []
        problems: list[Problem] = []
        for i, (prompt, specs) in enumerate(zip(prompts, asked, strict=True)):
            planner = Planner(self.facts, self._vectors, self._packs)
            planner.problems += self._check_sampling(specs.sampling)
            try:
                plans.append(self._templates.plan(planner, request_id or self._new_name(), prompt, specs, version))
            except InvalidRequest as error:
                problems += [p.under(f"prompts[{i}]") if many else p for p in error.problems]
        if problems:
            raise InvalidRequest(problems)
        return plans

    def _specs(
        self,
        count: int,
        many: bool,
        sampling: Each[Sampling],
        steer: Each[SteerLike] = None,
        capture: Each[Capture] = None,
        watch: Each[Watch] = None,
    ) -> list[RequestSpecs]:
        """Return the specs of each prompt, steering with what surrounds it."""
        problems: list[Problem] = []
        samplings = per_prompt(sampling, (Sampling,), count, many, "sampling", problems)
        steers = per_prompt(steer, (Steering, Add, Cap, Ablate), count, many, "steer", problems)
        captures = per_prompt(capture, (Capture,), count, many, "capture", problems)
        watches = per_prompt(watch, (Watch,), count, many, "watch", problems)
        if problems:
            raise InvalidRequest(problems)
        around = self.surrounding()
        usual = Sampling()
        return [
            RequestSpecs(sampling or usual, around.then(as_steering(steer)), capture, watch)
            for sampling, steer, capture, watch in zip(samplings, steers, captures, watches, strict=True)
        ]

    def _plan_stream(self, prompt: Prompt, sampling: Sampling | None, options: Mapping[str, Any]) -> Plan:
        """Plan at the call, not at the first event: errors and the surrounding steering are the caller's."""
        specs = dict(options)
        request_id = specs.pop("request_id", None)
        (plan,) = self._plan([prompt], False, sampling, specs, request_id)
        return plan

    def _new_name(self) -> str:
        return next(name for number in self._numbers if (name := f"r{number}") not in self._jobs)

    async def _start(
        self, plans: Sequence[Plan], stream: bool, pause: Pause | None = None
    ) -> tuple[list[EngineJob], ResultChannel]:
        """Reserve room, fan n out into single sequences, and submit them together."""
        channel = open_channel(self._wakers, pause)
        jobs: list[EngineJob] = []
        try:
            for plan in plans:
                mine = [
                    EngineJob(single, lambda _: None, stream, None, noticed=self._noticed) for single in singles(plan)
                ]
                if self._jobs.setdefault(plan.request_id, mine) is not mine:
                    what = f"{plan.request_id!r} is already running"
                    raise InvalidRequest([Problem("request_id", what, "choose another")])
                for job in mine:
                    job.report = functools.partial(channel.put, job)
                jobs += mine
            needs = [self._row_bytes(job.plan) for job in jobs]
            pool = await self.budget.reserve(sum(needs), "this capture", sleep) if any(needs) else None
            for job, need in zip(jobs, needs, strict=True):
                job.held = pool.split(need) if pool and need else None
            self._submit(jobs)
        except BaseException:  # closed, refused, or the caller was cancelled while it waited
            self._finish(jobs)
            for job in jobs:
                if job.held:
                    job.held.release()
            raise
        return jobs, channel

    def _finish(self, jobs: Sequence[EngineJob], channel: ResultChannel | None = None, ended: bool = False) -> None:
        """Cancel unfinished jobs (none, if they have `ended`), free rows that were not taken, and free the names."""
        for job in jobs:
            self._jobs.pop(job.plan.request_id, None)
            if not ended:
                job.abandoned = True
                job.cancel()
        if channel is not None:
            channel.discard_rest()

    async def _answer(
        self,
        given: Any,
        many: bool,
        to_prompt: Callable[[Any], Prompt],
        sampling: Each[Sampling],
        options: Mapping[str, Any],
    ) -> Any:
        prompts = all_of(to_prompt, given) if many else [to_prompt(given)]
        done = await self._generate(self._plan(prompts, many, sampling, options))
        return done if many else done[0]

    async def _generate(self, plans: Sequence[Plan]) -> list[Generation]:
        if not plans:
            return []
        jobs, channel = await self._start(plans, stream=False)
        choices: dict[str, list[Choice]] = {plan.request_id: [] for plan in plans}
        failure: RequestFailed | None = None
        left = len(jobs)
        try:
            while left:
                for job, outcome in await channel.take():
                    left -= 1
                    if isinstance(outcome, Choice):
                        choices[job.plan.request_id].append(outcome)
                    elif isinstance(outcome, RequestFailed):
                        failure = failure or outcome
        except BaseException:  # the caller was cancelled
            for choice in itertools.chain.from_iterable(choices.values()):
                discard(choice)
            raise
        finally:
            self._finish(jobs, channel, ended=not left)
        done = [assembled(p, of) if len(of := choices[p.request_id]) == p.sampling.n else None for p in plans]
        if failure is not None:
            failure.completed = done
            raise failure
        return [generation for generation in done if generation is not None]

    async def _stream(self, plan: Plan) -> AsyncGenerator[Event]:
        left: list[Event] = []
        async with contextlib.aclosing(self._batches(plan, None)) as batches:
            try:
                async for left in batches:
                    while left:
                        yield left.pop(0)
            finally:  # a caller that leaves early does not get the rows
                for event in left:
                    for choice in event.generation.choices if isinstance(event, EndEvent) else ():
                        discard(choice)

    async def _batches(self, plan: Plan, pause: Pause | None) -> AsyncGenerator[list[Event]]:
        jobs, channel = await self._start([plan], stream=True, pause=pause)
        choices: list[Choice] = []
        told = False
        try:
            while not told:
                events: list[Event] = []
                failure: RequestFailed | None = None
                for _, outcome in await channel.take():
                    if isinstance(outcome, Choice):
                        choices.append(outcome)
                    elif isinstance(outcome, RequestFailed):
                        failure = failure or outcome
                    elif failure is None:
                        events.append(outcome)
                if failure is None and len(choices) == len(jobs):
                    events.append(EndEvent(assembled(plan, choices)))
                    told = True
                if events:
                    yield events
                if failure is not None:
                    raise failure
        finally:
            self._finish(jobs, channel, ended=told)
            for choice in () if told else choices:
                discard(choice)
