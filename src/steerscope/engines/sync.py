"""The Engine without await. Its coroutines run in the caller's thread, which blocks where they wait. So this works in
scripts, in threads, and inside notebooks whose loop is already running, and steering blocks (context variables) are the
caller's own."""

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from steerscope.engines.api import Engine
from steerscope.engines.options import SteerLike
from steerscope.engines.plan import Facts
from steerscope.engines.result_channels import in_this_thread
from steerscope.lenses.pack import Pack
from steerscope.specs.steering import Steering, VectorData

P = ParamSpec("P")
T = TypeVar("T")


def _same(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate["SyncEngine", P], T]:
    """Return a method that calls this one of the engine."""

    @functools.wraps(method)
    def call(self: "SyncEngine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return getattr(self.aio, method.__name__)(*args, **kwargs)

    return call


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncEngine", P], T]:
    """Return a method that runs this coroutine of the engine to its end."""

    @functools.wraps(method)
    def call(self: "SyncEngine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return in_this_thread(getattr(self.aio, method.__name__)(*args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T]],
) -> Callable[Concatenate["SyncEngine", P], Iterator[T]]:
    """Return a method that iterates over this asynchronous generator of the engine."""

    @functools.wraps(method)
    def call(self: "SyncEngine", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(getattr(self.aio, method.__name__)(*args, **kwargs))

    return call


def _iterate(events: AsyncGenerator[T]) -> Iterator[T]:
    async def step() -> T | None:
        return await anext(events, None)

    async def end() -> None:
        await events.aclose()

    try:
        while (event := in_this_thread(step())) is not None:
            yield event
    finally:
        in_this_thread(end())


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

        with model.steering(happy.add(1.7, layers=19)):  # all requests inside the block
            for event in model.stream("Once upon a time", ss.Sampling(max_tokens=10)):
                if isinstance(event, ss.TokenEvent):
                    print(event.text, end="")
    ```
    """

    def __init__(self, engine: Engine) -> None:
        self.aio = engine

    generate = _blocking(Engine.generate)
    chat = _blocking(Engine.chat)
    stream = _iterated(Engine.stream)
    stream_chat = _iterated(Engine.stream_chat)
    fetch_all = _blocking(Engine.fetch_all)
    cancel = _same(Engine.cancel)
    steering = _same(Engine.steering)
    register = _same(Engine.register)
    unregister = _same(Engine.unregister)
    register_pack = _same(Engine.register_pack)
    unregister_pack = _same(Engine.unregister_pack)
    stats = _same(Engine.stats)
    close = _blocking(Engine.close)

    @property
    def facts(self) -> Facts:
        """What is known of the model: name, layers, hidden size, context, and sites that it lacks."""
        return self.aio.facts

    @property
    def vectors(self) -> Mapping[str, VectorData]:
        """The registered vectors by name."""
        return self.aio.vectors

    @property
    def packs(self) -> Mapping[str, Pack]:
        """The registered packs by name."""
        return self.aio.packs

    @property
    def default_steering(self) -> Steering:
        """What every request gets before anything else; None clears it, `Steering.none()` in a request drops it."""
        return self.aio.default_steering

    @default_steering.setter
    def default_steering(self, steering: SteerLike | None) -> None:
        self.aio.default_steering = steering  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
