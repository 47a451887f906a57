"""The Engine without await. Its coroutines run in the caller's thread, which blocks where they wait. So this works in
scripts, in threads, and inside notebooks whose loop is already running, and steering blocks (context variables) are the
caller's own."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, overload

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.engines.api import Engine
from steerscope.engines.options import Each, Many, ManyChat, One, OneChat, PackKeywords, SteerLike, Stream, StreamChat
from steerscope.engines.packs import LOAD_S
from steerscope.engines.plan import Facts, Prompt
from steerscope.engines.result_channels import in_this_thread
from steerscope.engines.results import Event, Generation, PromptLike, TokenPrompt
from steerscope.lenses.pack import Pack
from steerscope.specs.chat import Chat
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering, Vector, VectorData

if TYPE_CHECKING:
    import torch


class SyncEngine:
    """A running model, as `steerscope.load` gives it. Works in scripts, threads and notebooks; `.aio` is the same with
    `await`.

    Every request may have `steer`, `capture` and `watch`; requests in a list run in one batch.

    ```python
    import steerscope as ss

    happy = ss.load_vector("happy.safetensors")
    with ss.load("smollm2-135m") as model:
        up, plain = model.generate(
            ["The weather today is"] * 2,
            ss.Sampling(max_tokens=10),
            steer=[happy.add(1.7, layers=19), None],
            capture=ss.Capture(layers=20),
        )
        print(up.text, plain.text, (up.rows[20] - plain.rows[20])[0].norm())
    ```
    """

    def __init__(self, engine: Engine) -> None:
        self.aio = engine

    @property
    def facts(self) -> Facts:
        """What is known of the model: name, layers, hidden size, context, and sites that it lacks."""
        return self.aio.facts

    @overload
    def generate(self, prompt: PromptLike, sampling: Sampling | None = None, **options: Unpack[One]) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[TokenPrompt] | list[Prompt],
        sampling: Each[Sampling] = None,
        **options: Unpack[Many],
    ) -> list[Generation]: ...
    def generate(self, prompt, sampling=None, **options):  # type: ignore[no-untyped-def]
        """Continue a prompt, or each of a list, with one spec for all or a list of specs, one each.

        Options: `steer`, `capture`, `watch`.
        """
        return in_this_thread(self.aio.generate(prompt, sampling, **options))

    @overload
    def chat(self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[OneChat]) -> Generation: ...
    @overload
    def chat(
        self, messages: Sequence[Chat], sampling: Each[Sampling] = None, **options: Unpack[ManyChat]
    ) -> list[Generation]: ...
    def chat(self, messages, sampling=None, **options):  # type: ignore[no-untyped-def]
        """Answer a chat, `[{"role": "user", "content": "…"}]`, or each of several.

        Options: `steer`, `capture`, `watch`, `continue_final_message`, `template_options`.
        """
        return in_this_thread(self.aio.chat(messages, sampling, **options))

    def stream(
        self, prompt: PromptLike, sampling: Sampling | None = None, **options: Unpack[Stream]
    ) -> Iterator[Event]:
        """Tokens as they are sampled, then one EndEvent. Leaving the loop early ends the request.

        Options: `steer`, `capture`, `watch`, `request_id`.

        ```python
        import steerscope as ss

        with ss.load("smollm2-135m") as model:
            for event in model.stream("Once upon a time", ss.Sampling(max_tokens=10)):
                if isinstance(event, ss.TokenEvent):
                    print(event.text, end="")
        ```
        """
        return self._iterate(self.aio.stream(prompt, sampling, **options))

    def stream_chat(
        self, messages: Chat, sampling: Sampling | None = None, **options: Unpack[StreamChat]
    ) -> Iterator[Event]:
        """`stream` for a chat; its options and those of `chat`."""
        return self._iterate(self.aio.stream_chat(messages, sampling, **options))

    def _iterate(self, events: AsyncGenerator[Event]) -> Iterator[Event]:
        async def step() -> Event | None:
            return await anext(events, None)

        async def end() -> None:
            await events.aclose()

        try:
            while (event := in_this_thread(step())) is not None:
                yield event
        finally:
            in_this_thread(end())

    def fetch_all(
        self, handles: Sequence[CaptureHandle], copy: bool = False, room: "torch.Tensor | None" = None
    ) -> list[Rows]:
        """The rows of many captures in one round trip. With `copy` they are in memory of your own, copied by several
        threads, and the room they had is free for other requests (rows that were fetched before keep their memory).
        `room` is memory to copy to, a uint8 tensor of `steerscope.capture.private_bytes(rows)` bytes that is used
        again and again, which is faster than fresh memory. What it holds is yours alone: the handles are closed, and
        rows that were copied there before are overwritten.
        """
        return in_this_thread(self.aio.fetch_all(handles, copy, room))

    def cancel(self, request_id: str) -> bool:
        """End a request between two steps; it finishes with what it has. False if it is not running."""
        return self.aio.cancel(request_id)

    def steering(self, steering: SteerLike) -> AbstractContextManager[None]:
        """Steer all requests inside the block. Blocks nest, from the outside in.

        ```python
        import steerscope as ss

        happy = ss.load_vector("happy.safetensors")
        with ss.load("smollm2-135m") as model, model.steering(happy.add(1.7, layers=19)):
            print(model.generate("The weather today is", ss.Sampling(max_tokens=10)).text)
        ```
        """
        return self.aio.steering(steering)

    @property
    def default_steering(self) -> Steering:
        """What every request gets before anything else; None clears it, `Steering.none()` in a request drops it."""
        return self.aio.default_steering

    @default_steering.setter
    def default_steering(self, steering: SteerLike | None) -> None:
        self.aio.default_steering = steering  # type: ignore[assignment]

    def register(self, name: str, vector: Vector) -> None:
        """Give a vector a name that ops may use: `Add(vector="happy", scale=1.7)`."""
        self.aio.register(name, vector)

    def unregister(self, name: str) -> None:
        """Forget a vector's name; requests that run with it go on."""
        self.aio.unregister(name)

    @property
    def vectors(self) -> Mapping[str, VectorData]:
        """The registered vectors by name."""
        return self.aio.vectors

    def register_pack(
        self, name: str, pack: Pack | str | Path, *, timeout_s: float = LOAD_S, **options: Unpack[PackKeywords]
    ) -> Pack:
        """Load a lens pack under a name that `Watch(pack=…)` may use. Requests run on meanwhile. Raises TimedOut when
        it is not loaded within `timeout_s`; then it is not registered.

        Options: `weights` (`"fp32"`, `"bf16"`, `"int8"`), `budget` or `budget_bytes` (keep only so much on the device),
        `base_levels`, `pinned`, `any_model`, `workspace`.
        """
        return self.aio.register_pack(name, pack, timeout_s=timeout_s, **options)

    def unregister_pack(self, name: str) -> None:
        """Forget a pack."""
        self.aio.unregister_pack(name)

    @property
    def packs(self) -> Mapping[str, Pack]:
        """The registered packs by name."""
        return self.aio.packs

    def stats(self) -> dict[str, float]:
        """Counters and sizes since the start."""
        return self.aio.stats()

    def close(self) -> None:
        """End running requests as cancelled; other calls that wait raise EngineClosed."""
        in_this_thread(self.aio.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
