"""A real server on a real socket, in a thread of this process, over a tiny engine or any other."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import torch
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI

from steerscope.engines.api import Engine
from steerscope.engines.hf import HFEngine
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from steerscope.serving.state import Serving
from support import tiny
from support.waiting import HUNG_S

KEY = "sk-test"


class Live:
    """A server in a thread of its own; `ready` waits until it takes requests."""

    def __init__(self, start: Callable[[], Engine] | Engine, settings: ServerSettings) -> None:
        self.server = Server(create_app(start, settings))
        self.serving: Serving = self.server.serving
        self._thread = threading.Thread(target=self.server.run, name="server", daemon=True)
        self._thread.start()
        self.until(lambda: self.server.started or not self._thread.is_alive())
        self.url = self.server.address
        self.http = httpx.Client(base_url=self.url, timeout=HUNG_S)

    def ready(self) -> "Live":
        self.until(lambda: self.serving.ready or self.serving.failure is not None)
        assert self.serving.failure is None, self.serving.failure
        return self

    def until(self, holds: Callable[[], bool]) -> None:
        assert eventually(holds), "it never came true"

    @property
    def app(self) -> FastAPI:
        return self.server.config.app  # type: ignore[return-value]

    @property
    def engine(self) -> Engine:
        return self.serving.engine

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=HUNG_S)

    @property
    def async_openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=HUNG_S)

    def idle(self, seconds: float = HUNG_S) -> bool:
        """Whether the engine comes to rest with all memory given back."""

        def rests() -> bool:
            stats = self.engine.stats()
            busy = self.serving.admission.running + self.serving.admission.waiting + len(self.engine._jobs)
            return not busy and not stats["running"] and not stats["waiting"]

        return eventually(rests, seconds)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(HUNG_S)
        assert not self._thread.is_alive()


def eventually(holds: Callable[[], bool], seconds: float = HUNG_S) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def slowed(engine: HFEngine, wait: Callable[[float], object] = time.sleep, seconds: float = 0.1) -> HFEngine:
    """It waits before its every step: some time, or for an event."""
    forward = engine._forward

    def slowly(*arguments: object, **more: object) -> torch.Tensor:
        wait(seconds)
        return forward(*arguments, **more)  # type: ignore[arg-type]

    engine._forward = slowly  # type: ignore[method-assign]
    return engine


def tiny_engine(**options: object) -> HFEngine:
    return HFEngine(tiny.model(), tiny.tokenizer(), name="tiny", **options)  # type: ignore[arg-type]


@contextmanager
def live(start: Callable[[], Engine] | Engine = tiny_engine, **settings: object) -> Iterator[Live]:
    server = Live(start, ServerSettings.parse({"port": 0, "drain_s": 2.0, **settings}))
    try:
        server.ready()
        assert httpx.get(f"{server.url}/ready").status_code == 200
        yield server
    finally:
        server.stop()
