"""Serving: what all requests share, and the life of the engine behind them.

The engine is started in the background, so that a server that is still loading can say so; it is ready once a first
text has been generated. An engine that dies is started again, if possible, three times in ten minutes; then the server
ends, and its supervisor (systemd) may start it anew.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from steerscope.engines.api import Engine
from steerscope.engines.results import TokenPrompt
from steerscope.serving.answers import TokenTexts
from steerscope.serving.captures import Captures
from steerscope.serving.errors import ApiError
from steerscope.serving.metrics import Metrics
from steerscope.serving.settings import ServerSettings
from steerscope.serving.vectors import Vectors
from steerscope.specs.errors import EngineClosed
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering

log = logging.getLogger("steerscope.serving")
Start = Callable[[], Engine]
_WRITES_PER_S = 1000.0
_LONGEST_PAUSE_S = 0.05
_MEMORY = 0.9  # weight of earlier requests in the mean duration of requests
_RESTARTS = 3
_WITHIN_S = 600.0
_LOOK_S = 0.5


class Admission:
    """A bounded queue before the engine, first come, first served; requests beyond the limits are refused with 429.

    A request of more choices than may run at once runs alone."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.waiting = 0
        self._turn = asyncio.Lock()  # held by the first waiting request
        self._freed = asyncio.Event()
        self._mean_s = 1.0

    @contextlib.asynccontextmanager
    async def place(self, choices: int) -> AsyncIterator[None]:
        self.check(choices)
        self.waiting += 1
        try:
            async with self._turn:
                while not self._fits(choices):
                    self._freed.clear()
                    await self._freed.wait()
                self.running += choices
        finally:
            self.waiting -= 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * (time.monotonic() - began)
            self.running -= choices
            self._freed.set()

    def check(self, choices: int = 1) -> None:
        """Refuse a request that can neither run now nor wait."""
        if self.waiting >= self.max_waiting and (self.waiting or not self._fits(choices)):
            what = f"{self.running} choices are running and {self.waiting} requests wait: try again later"
            retry_after = min(60.0, max(1.0, self._mean_s * (1 + self.waiting / self.max_running)))
            raise ApiError(429, what, "queue_full", retry_after=retry_after)

    def _fits(self, choices: int) -> bool:
        return self.running == 0 or self.running + choices <= self.max_running


class Serving:
    def __init__(self, start: Start | Engine, settings: ServerSettings) -> None:
        self.settings = settings
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self.vectors = Vectors(settings.max_vectors, None if settings.vectors is None else Path(settings.vectors))
        self.captures = Captures(settings.capture_ttl_s)
        self.metrics = Metrics(
            {
                "ready": ("1 when requests are taken", lambda: self.ready),
                "running_choices": ("choices given to the engine", lambda: self.admission.running),
                "waiting_requests": ("requests in the queue", lambda: self.admission.waiting),
                "captures": ("captures that wait to be fetched", lambda: len(self.captures)),
                "vectors": ("vectors known by name", lambda: len(self.vectors)),
            }
        )
        self.default_steering = Steering()  # set by clients, for every request
        self.draining = False
        self._stage = "starting"
        self.began = time.time()
        self.failure: Exception | None = None  # why the server has to end
        self.on_failure: Callable[[], None] = lambda: None
        self.texts: TokenTexts  # of single tokens, for log probabilities; set when an engine has started
        self._start = None if isinstance(start, Engine) else start
        self._engine = start if isinstance(start, Engine) else None
        self._warm = False  # this engine has generated a first text
        self._served = False  # this engine or an earlier one has generated a first text
        self._ends: deque[float] = deque()  # times at which engines ended
        self._life: asyncio.Task[None] | None = None

    # --- for requests

    @property
    def ready(self) -> bool:
        return self._warm and self._engine is not None and not self._engine.closed

    @property
    def public_stage(self) -> str:
        """The stage, without details if a key is required: they may name folders of this machine."""
        if self.settings.api_key is None or self.ready:
            return self.stage
        return "failed" if self.failure is not None else "loading"

    @property
    def engine(self) -> Engine:
        if self.draining:
            raise ApiError(503, "the server is stopping", "stopping", retry_after=10)
        if not self.ready or self._engine is None:
            raise ApiError(503, f"the model is not ready: {self.stage}", "not_ready", retry_after=2)
        return self._engine

    def pause(self) -> float:
        """Return the seconds between two writes of one stream that limit all streams to about 1,000 writes a second.

        A write costs more than a token, and a model in this process waits for it: tokens in between share one."""
        return min(_LONGEST_PAUSE_S, self.admission.running / _WRITES_PER_S)

    @property
    def model_name(self) -> str:
        if self.settings.model_name:
            return self.settings.model_name
        name = self._engine.facts.name if self._engine else "model"
        return Path(name).name if Path(name).is_absolute() else name  # clients need not know this machine's folders

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.model_name:
            what = f"the model {asked!r:.100} does not exist: this server has {self.model_name!r}"
            raise ApiError(404, what, "model_not_found", "model")

    # --- life

    @property
    def stage(self) -> str:
        return "the engine has failed" if self._warm and not self.ready else self._stage

    def tell(self, stage: str) -> None:
        """Set and log the stage of loading; from any thread."""
        self._stage = stage
        log.info("loading: %s", stage)

    async def open(self) -> None:
        self._life = asyncio.create_task(self._live())

    async def cut_off(self) -> None:
        """End all running requests."""
        if self._engine is not None:
            await self._engine.close()

    async def close(self) -> None:
        self._warm = False
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        self.captures.close()
        await self.cut_off()

    async def _live(self) -> None:
        while True:
            try:
                await self._begin()
                await self._run()
            except Exception as error:
                if not self._served:  # a model that never worked will not work at the next start
                    self._fail(error)
                    return
                log.error("the engine did not start: %s", error)
            self._stage = "the engine has failed"
            self._warm = False
            if self._start is None or not self._may_restart():
                self._fail(EngineClosed("the engine has ended and cannot be started again"))
                return
            await self.cut_off()  # the next engine needs its memory
            self._engine = None
            self._stage = "starting again"

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._ends.append(now)
        while now - self._ends[0] > _WITHIN_S:
            self._ends.popleft()
        return len(self._ends) <= _RESTARTS

    async def _run(self) -> None:
        """Return when the engine has ended."""
        self._stage = "ready"
        self._warm = self._served = True
        log.info("ready", extra={"model": self.model_name})
        while self._engine is not None and not self._engine.closed:
            await asyncio.sleep(_LOOK_S)
            self.captures.sweep()
        log.error("the engine has ended")

    async def _begin(self) -> None:
        if self._engine is None and self._start is not None:
            self._stage = "loading the model"
            self._engine = await _uncancelled(asyncio.to_thread(self._start))
        assert self._engine is not None
        engine = self._engine
        engine.budget.total = min(engine.budget.total, self.settings.captures_bytes)
        engine.capture_ttl = self.settings.capture_ttl_s
        self._stage = "loading vectors and lenses"
        await asyncio.to_thread(self._furnish, engine)
        self.texts = TokenTexts(engine)
        self._stage = "warming up"
        await engine.generate(TokenPrompt([0] * 8), Sampling(max_tokens=4, ignore_eos=True))
        async for _ in engine.stream(TokenPrompt([0]), Sampling(max_tokens=2, ignore_eos=True)):
            pass

    def _furnish(self, engine: Engine) -> None:
        """Register vectors, packs and the default steering: those of the settings, later those of the last engine."""
        if self._served:
            self.vectors.register_all(engine)
        else:
            self.vectors.read_folder(engine)
        for folder in self.settings.lenses:
            engine.register_pack(Path(folder).resolve().name, folder, any_model=self.settings.any_model)
        engine.default_steering = self.default_steering

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._stage = f"failed: {error}"
        log.error("the server ends: %s", error)
        self.on_failure()


async def shared(request: Request) -> Serving:
    return request.app.state.serving


Shared = Annotated[Serving, Depends(shared)]


async def _uncancelled(work: Awaitable[Engine]) -> Engine:
    """Await an engine that starts in a thread. When cancelled, wait until it has started, and close it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await (await task).close()
        raise
