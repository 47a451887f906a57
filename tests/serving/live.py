"""A real server on a real socket, in a thread of this process, over a tiny engine or any other."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import torch
from fastapi import FastAPI

from steerscope.engines.api import Engine
from steerscope.engines.hf import HFEngine
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from steerscope.serving.state import Serving
from support import tiny
from support.waiting import HUNG_S


@dataclass
class Live:
    url: str
    server: Server

    @property
    def app(self) -> FastAPI:
        return self.server.config.app  # type: ignore[return-value]

    @property
    def serving(self) -> Serving:
        return self.server.serving

    @property
    def engine(self) -> Engine:
        return self.server.serving.engine

    def idle(self, seconds: float = HUNG_S) -> bool:
        """Whether the engine comes to rest with all memory given back."""

        def rests() -> bool:
            stats = self.engine.stats()
            busy = self.serving.admission.running + self.serving.admission.waiting + len(self.engine._jobs)
            return not busy and not stats["running"] and not stats["waiting"]

        return eventually(rests, seconds)


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
    server = Server(create_app(start, ServerSettings.parse({"port": 0, "drain_s": 2.0, **settings})))
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert eventually(lambda: server.started or not thread.is_alive(), HUNG_S)
        assert eventually(lambda: server.serving.ready or server.serving.failure is not None, HUNG_S)
        assert server.serving.failure is None, server.serving.failure
        assert httpx.get(f"{server.address}/ready").status_code == 200
        yield Live(server.address, server)
    finally:
        server.should_exit = True
        thread.join(HUNG_S)
        assert not thread.is_alive()
