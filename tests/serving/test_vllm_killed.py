"""vLLM's engine core is killed under a server that has requests: they fail with the reason, and another core starts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT, saved
from support.waiting import HUNG_S

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")]
ARGUMENTS = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 64}
ARGUMENTS |= {"max_model_len": 4096, "hf_overrides": {"max_position_embeddings": 4096}}
LONG = {"prompt": "one two", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 8}
URL = "/v1/completions"


class Served:
    """`steerscope serve --engine vllm` in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        command = [sys.executable, "-m", "steerscope.cli.main", "serve", str(folder), "--engine", "vllm", "--port", "0"]
        command += ["--dtype", "float32", "--max-batch", "8", "--captures-bytes", str(8 << 20)]
        command += ["--vllm", json.dumps(ARGUMENTS), *options]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if found := re.search(r"http://[\d.:]+", line):
                break
        assert found, self.log
        self.reader = ThreadPoolExecutor(1)
        self.rest = self.reader.submit(self.process.stderr.read)  # a full pipe would stop the server
        self.http = httpx.Client(base_url=found[0], timeout=HUNG_S)

    def until(self, holds: Callable[[], bool], seconds: float = HUNG_S) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it never came true"
            assert self.process.poll() is None, self.rest.result()
            time.sleep(0.3)

    def ready(self) -> None:
        self.until(lambda: self.http.get("/ready").status_code == 200)

    def kill(self, name: str) -> None:
        """The process of vLLM with this name, with requests of every kind in it; they fail with the reason."""
        with ThreadPoolExecutor(1) as pool, self.http.stream("POST", URL, json={**LONG, "stream": True}) as streamed:
            lines = streamed.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            whole = pool.submit(self.http.post, URL, json={**LONG, "steerscope": {"capture": {"layers": [1]}}})
            self.until(lambda: "steerscope_engine_running 2.0" in self.http.get("/metrics").text)
            next(one for one in self.children() if name in one.name()).kill()
            told = [line.removeprefix("data: ") for line in lines if line]
            assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "engine_failed")
            assert int(whole.result().headers["retry-after"]) >= 1
        assert json.loads(told[-2])["error"]["code"] == "engine_failed"
        assert told[-1] == "[DONE]"
        refused = self.http.post(URL, json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert self.http.get("/ready").json()["ready"] is False
        assert self.http.get("/health").status_code == 200

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        """As an administrator would, at any time."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(HUNG_S) == 0, self.rest.result()


@pytest.fixture
def served(vectors: Path) -> Iterator[Served]:
    one = Served(saved("llama", "bytes", None, {}), "--vectors", str(vectors))
    yield one
    one.http.close()
    for child in [*one.children(), one.process] if one.process.poll() is None else []:
        child.kill()
    one.reader.shutdown()


@pytest.mark.long
def test_a_killed_core_fails_its_requests_and_is_started_again_and_sigterm_ends_it_even_then(served: Served) -> None:
    served.ready()
    body = {**SHORT, "steerscope": {"steer": "joy", "capture": {"layers": [1]}}}
    wanted = served.http.post(URL, json=body).json()["choices"][0]["text"]
    before = [one for one in served.children() if "VLLM" in one.name()]
    assert before
    served.kill("EngineCore")
    served.ready()
    assert not psutil.wait_procs(before, timeout=HUNG_S)[1], "processes of the engine that was killed live on"
    assert served.http.post(URL, json=body).json()["choices"][0]["text"] == wanted
    served.kill("Worker")
    left = served.children()
    served.end()
    assert not psutil.wait_procs(left, timeout=HUNG_S)[1]
