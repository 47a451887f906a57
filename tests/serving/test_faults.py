"""Faults around a running server: a full disk, a clock that is set, clients that are killed, SIGTERM under load. Each
says what is promised; nothing is lost and nothing hangs."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from serving.conftest import Live, Serve
from serving.live import eventually
from steerscope.capture.rows import load_rows
from steerscope.serving import captures
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

BODY = {"prompt": "Hello there", "max_tokens": 40, "ignore_eos": True, "steerscope": {"capture": {"layers": "all"}}}


def captured(http: httpx.Client, max_tokens: int = 40) -> str:
    answer = http.post("/v1/completions", json={**BODY, "max_tokens": max_tokens})
    return answer.json()["choices"][0]["steerscope"]["captures"]["id"]


def captured_beyond_buffers(live: Live) -> str:
    """Capture more than a connection's buffers take, so that it is not sent before the client has read some of it."""
    for server in live.server.servers:
        for listening in server.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    return captured(live.http, 200)


def test_rows_are_fetched_though_the_disk_is_full(serve: Serve) -> None:
    """They go from memory to the wire. A limit on the size of files stands for the disk."""
    live = serve().ready()
    name = captured(live.http)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        full = live.http.get(f"/v1/captures/{name}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.status_code == 200
    assert len(full.content) > 10_000
    assert live.http.get(f"/v1/captures/{name}").content == full.content


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_is_set_neither_drops_rows_nor_keeps_them(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    live = serve(capture_ttl_s=8.0).ready()
    name = captured(live.http)
    real = time.time
    monkeypatch.setattr(captures.time, "time", lambda: real() + jump)
    assert live.http.get(f"/v1/captures/{name}").status_code == 200
    live.until(lambda: live.serving.engine.budget.used == 0)
    assert live.http.get(f"/v1/captures/{name}").status_code == 404


LARGE_CAPTURE = """
import resource
import httpx, numpy as np, torch
from serving.live import live
from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels

with live() as server:
    block = torch.ones(4000, 8, 4096, dtype=torch.bfloat16)  # 250 MiB, strided as an engine's rows are
    labels = make_labels("r", np.arange(4000), [7] * 4000, 9, None, False)
    rows = Rows({(j, "resid_post"): block[:, j] for j in range(8)}, labels, "m")
    budget = server.engine.budget
    kept = server.serving.captures.keep(CaptureHandle("r", 4000, lambda: rows, budget, budget.take(1), 600.0))
    url = f"{server.url}/v1/captures/{kept.id}"
    httpx.get(url, headers={"Range": "bytes=0-99"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        with httpx.stream("GET", url, timeout=600) as answer:
            size = sum(map(len, answer.iter_raw()))
        assert size == int(answer.headers["content-length"]) > 250 << 20
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_capture_is_sent_without_a_copy_of_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LARGE_CAPTURE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 30 << 10, "KiB beyond the 250 MiB that the rows take"


GREEDY_CLIENT = """
import socket, sys, time
with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    s.connect(("127.0.0.1", int(sys.argv[1])))
    s.sendall(f"GET /v1/captures/{sys.argv[2]} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n".encode())
    assert s.recv(600).startswith(b"HTTP/1.1 200")
    print("reading", flush=True)
    time.sleep(1200)
"""


def test_a_client_that_is_killed_while_it_fetches_hurts_nobody_and_the_rows_can_be_fetched_again(
    serve: Serve, tmp_path: Path
) -> None:
    live = serve().ready()
    name = captured_beyond_buffers(live)
    port = str(httpx.URL(live.url).port)
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY_CLIENT, port, name], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "reading\n"
        kept = live.serving.captures.get(name)
        assert kept.readers == 1
        client.kill()
    live.until(lambda: kept.readers == 0)
    (tmp_path / "rows").write_bytes(live.http.get(f"/v1/captures/{name}").content)
    found, wanted = load_rows(tmp_path / "rows"), kept.rows
    assert found.n == wanted.n
    assert all(found[key].equal(tensor) for key, tensor in wanted.items())
    assert live.http.delete(f"/v1/captures/{name}").status_code == 200
    assert live.serving.engine.budget.used == 0


def test_rows_that_are_dropped_while_they_are_sent_take_room_until_they_are(serve: Serve) -> None:
    live = serve(stall_s=5.0).ready()
    name = captured_beyond_buffers(live)
    kept = live.serving.captures.get(name)
    port = str(httpx.URL(live.url).port)
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY_CLIENT, port, name], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "reading\n"
        assert kept.readers == 1
        assert live.http.delete(f"/v1/captures/{name}").status_code == 200
        assert live.serving.engine.budget.used > 0
        live.until(lambda: live.serving.engine.budget.used == 0)  # it does not read, and is hung up on
        client.kill()


async def _under_load(url: str, process: subprocess.Popen[str]) -> list[list[str]]:
    """Streams with captures, all running when SIGTERM comes; the lines of each."""
    running = asyncio.Event()
    started = 0

    async def one(client: httpx.AsyncClient, i: int) -> list[str]:
        nonlocal started
        body = {**BODY, "prompt": f"Number {i}", "max_tokens": 120, "stream": True}
        lines: list[str] = []
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line and not lines:
                    started += 1
                    if started == 16:
                        running.set()
                lines += [line] if line else []
        return lines

    async with httpx.AsyncClient(timeout=HUNG_S) as client:
        streams = [asyncio.create_task(one(client, i)) for i in range(16)]
        await asyncio.wait_for(running.wait(), HUNG_S)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*streams)


@pytest.mark.slow
@pytest.mark.parametrize("drain", ["300", "0.2"])
def test_sigterm_under_load_ends_every_stream_with_its_text_or_with_the_reason(tmp_path: Path, drain: str) -> None:
    tiny.model().save_pretrained(tmp_path / "tiny")
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "steerscope.cli.main", "serve", str(tmp_path / "tiny"), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen(
        [*command, "--drain", drain, "--device", "cpu"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if found := re.search(r"http://[\d.:]+", line):
                url = found[0]
            if "ready" in line:
                break
        streams = asyncio.run(_under_load(url, process))
        process.stderr.read()
        assert process.wait(HUNG_S) == 0
    for lines in streams:
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        told = last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]
        assert told in (("length",) if drain == "300" else ("length", "stopping"))
    assert eventually(lambda: not list((tmp_path / "scratch").glob("steerscope-captures-*"))), "files were left"
