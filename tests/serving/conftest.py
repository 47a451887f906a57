"""A real server on a real socket, over each engine that is installed."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from engines.conftest import ENGINES, saved, start_vllm
from lenses import packs
from steerscope import SteeringVector, save_vector
from steerscope.engines.api import Engine
from steerscope.engines.hf import HFEngine
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from steerscope.serving.state import Serving
from support import tiny
from support.waiting import HUNG_S

NAME = "tiny"
KEY = "sk-test"

for part in ("connect", "read", "write", "pool"):  # five seconds otherwise, wherever a test names none
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, HUNG_S)


class Live:
    """A server in a thread of its own."""

    def __init__(self, start: Callable[[], Engine] | Engine, settings: ServerSettings) -> None:
        self.server = Server(create_app(start, settings))
        self.serving: Serving = self.server.serving
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        self.until(lambda: self.server.started)
        self.url = self.server.address
        self.http = httpx.Client(base_url=self.url, timeout=HUNG_S)

    def until(self, holds: Callable[[], bool], seconds: float = HUNG_S) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.01)

    def ready(self) -> "Live":
        self.until(lambda: self.serving.ready or self.serving.failure is not None)
        assert self.serving.failure is None, self.serving.failure
        return self

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=HUNG_S)

    @property
    def async_openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=HUNG_S)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(timeout=HUNG_S)
        assert not self._thread.is_alive()


def hf_engine(kind: str = "bytes", **options: object) -> HFEngine:
    return HFEngine(tiny.model(), tiny.tokenizer(kind), name=NAME, **options)  # type: ignore[arg-type]


def make_engine(engine: str, kind: str = "bytes") -> Engine:
    if engine == "vllm":
        return start_vllm(saved("llama", kind, None, {}), NAME, {}).aio
    return hf_engine(kind)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`joy` has layers 1 and 2, `calm` is shared by all. Uploads go there too."""
    folder = tmp_path_factory.mktemp("vectors")
    generator = torch.Generator().manual_seed(1)
    joy = SteeringVector({layer: torch.randn(64, generator=generator) for layer in (1, 2)}, model=NAME)
    save_vector(joy, folder / "joy.safetensors")
    save_vector(SteeringVector.shared(torch.randn(64, generator=generator)), folder / "calm.safetensors")
    return folder


@pytest.fixture(scope="session")
def lens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "moods"
    packs.make([3, 6], hidden=64).save(folder)
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest, vectors: Path, lens: Path) -> Iterator[Live]:
    settings = ServerSettings(port=0, vectors=str(vectors), lenses=(str(lens),), any_model=True)
    server = Live(lambda: make_engine(request.param), settings).ready()
    yield server
    server.stop()


Serve = Callable[..., Live]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers on a tiny model with other settings."""
    running: list[Live] = []

    def begin(start: Callable[[], Engine] | Engine | None = None, **settings: object) -> Live:
        one = Live(start or hf_engine, ServerSettings.parse({"port": 0, **settings}))
        running.append(one)
        return one

    yield begin
    for one in running:
        one.stop()
