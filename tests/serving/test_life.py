"""From loading to the end: readiness, queues, clients that leave, engines that fail, and signals."""

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch

from serving.conftest import Live, Serve, hf_engine
from serving.live import slowed
from steerscope.engines.hf import HFEngine
from steerscope.serving.logs import JsonLines, Pretty
from steerscope.specs.errors import ModelNotFound
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow

LONG = {"prompt": "one two", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 3}


class TestLoading:
    def test_a_server_that_loads_says_so_and_takes_requests_once_it_is_warm(self, serve: Serve) -> None:
        go = threading.Event()

        def start() -> HFEngine:
            go.wait(HUNG_S)
            return hf_engine()

        live = serve(start)
        assert live.http.get("/health").json() == {"status": "ok", "stage": "loading the model"}
        waiting = live.http.get("/ready")
        assert (waiting.status_code, waiting.json()["ready"]) == (503, False)
        refused = live.http.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) >= 1
        go.set()
        live.ready()
        assert live.http.get("/ready").json()["ready"] is True
        assert live.serving.engine.stats()["tokens"] == 6, "it was warmed up"

    def test_a_model_that_does_not_load_ends_the_server(self, serve: Serve) -> None:
        listens = threading.Event()

        def start() -> HFEngine:
            listens.wait(HUNG_S)
            raise ModelNotFound("there is no such model")

        live = serve(start)
        listens.set()
        live.until(lambda: not live._thread.is_alive())
        assert isinstance(live.serving.failure, ModelNotFound)


class TestQueue:
    def test_beyond_the_queue_requests_are_told_when_to_come_back(self, serve: Serve) -> None:
        go, statuses = threading.Event(), list[int]()
        go.set()
        live = serve(lambda: slowed(hf_engine(), go.wait, HUNG_S), max_running=1, max_waiting=1).ready()
        go.clear()

        def ask() -> None:
            statuses.append(httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=HUNG_S).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        live.until(lambda: live.serving.admission.running == 1)
        threads[1].start()
        live.until(lambda: live.serving.admission.waiting == 1)
        refused = live.http.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        streamed = live.http.post("/v1/completions", json={**SHORT, "stream": True})
        assert streamed.status_code == 429
        go.set()
        for thread in threads:
            thread.join()
        assert statuses == [200, 200]
        assert live.http.post("/v1/completions", json=SHORT).status_code == 200
        assert 'steerscope_rejected_total{reason="queue_full"} 2.0' in live.http.get("/metrics").text

    def test_a_capture_without_room_is_told_so_and_expired_ones_make_room(self, serve: Serve) -> None:
        body = {**SHORT, "steerscope": {"capture": {"layers": "all"}}}
        live = serve(lambda: hf_engine(capture_wait=0.2), captures_bytes=8000).ready()
        first = live.http.post("/v1/completions", json=body).json()["choices"][0]["steerscope"]["captures"]
        full = live.http.post("/v1/completions", json=body)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "capacity_exceeded")
        never = live.http.post("/v1/completions", json={**body, "max_tokens": 100})
        assert never.status_code == 429
        live.serving.captures.get(first["id"]).until = 0.0
        live.until(lambda: live.serving.engine.budget.used == 0)
        gone = live.http.get(f"/v1/captures/{first['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "capture_gone")
        assert live.http.post("/v1/completions", json=body).status_code == 200


class TestLeaving:
    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_takes_its_request_along(self, serve: Serve, stream: bool) -> None:
        live = serve(lambda: slowed(hf_engine())).ready()
        asked = {"capture": {"layers": "all"}} if stream else None
        body = {**LONG, "stream": stream, "steerscope": asked}

        async def leave() -> None:
            async with httpx.AsyncClient() as client:
                call = asyncio.create_task(client.post(f"{live.url}/v1/completions", json=body))
                while live.serving.engine.stats()["running"] < 1:
                    await asyncio.sleep(0.01)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

        before = live.serving.engine.stats()["tokens"]
        asyncio.run(leave())
        live.until(lambda: live.serving.engine.stats()["running"] == 0 and live.serving.admission.running == 0)
        live.until(lambda: live.serving.engine.budget.used == 0)
        assert live.serving.engine.stats()["tokens"] - before < 200, "it did not run to its end"
        assert live.http.post("/v1/completions", json=SHORT).status_code == 200
        assert "steerscope_cancelled_total 1.0" in live.http.get("/metrics").text

    def test_one_that_waits_in_the_queue_leaves_it(self, serve: Serve) -> None:
        go = threading.Event()
        go.set()
        live = serve(lambda: slowed(hf_engine(), go.wait, HUNG_S), max_running=1).ready()
        go.clear()
        first = threading.Thread(target=lambda: httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=HUNG_S))
        first.start()
        live.until(lambda: live.serving.admission.running == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=httpx.Timeout(HUNG_S, read=0.3))
        live.until(lambda: live.serving.admission.waiting == 0)
        assert live.serving.admission.running == 1
        go.set()
        first.join()

    def test_one_that_does_not_read_is_not_written_to_for_ever(self, serve: Serve) -> None:
        live = serve(stall_s=0.5).ready()
        body = json.dumps({**LONG, "max_tokens": 240, "stream": True, "n": 32, "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", httpx.URL(live.url).port))
            deaf.sendall(head + body)
            live.until(lambda: live.serving.admission.running == 32)
            live.until(lambda: live.serving.admission.running == 0)
            live.until(lambda: live.serving.engine.stats()["running"] == 0)
        assert "steerscope_cancelled_total 1.0" in live.http.get("/metrics").text


class TestFailing:
    def test_a_step_that_fails_is_a_503_and_the_next_request_works(self, serve: Serve) -> None:
        engine = hf_engine()
        live = serve(engine).ready()
        forward, failures = engine._forward, [torch.OutOfMemoryError("out of memory")] * 2

        def broken(*arguments: object, **more: object) -> torch.Tensor:
            if failures:
                raise failures.pop()
            return forward(*arguments, **more)  # type: ignore[arg-type]

        engine._forward = broken  # type: ignore[method-assign]
        failed = live.http.post("/v1/completions", json=SHORT)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
        assert "out of memory" in failed.json()["error"]["message"]
        streamed = live.http.post("/v1/completions", json={**SHORT, "stream": True})  # its headers were sent before
        told = json.loads(streamed.text.split("\n")[0].removeprefix("data: "))["error"]
        assert (told["status"], told["code"]) == (503, "engine_failed")
        assert "out of memory" in told["message"]
        assert live.http.post("/v1/completions", json=SHORT).status_code == 200
        assert live.serving.ready

    def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(self, serve: Serve) -> None:
        engine = slowed(hf_engine())
        live = serve(engine).ready()
        with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            engine._forward = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"

    def test_an_engine_that_dies_is_started_again_with_its_vectors_and_steering(
        self, serve: Serve, vectors: Path
    ) -> None:
        live = serve(vectors=str(vectors)).ready()
        data = (vectors / "joy.safetensors").read_bytes()
        live.http.post("/v1/vectors?name=mine", content=data)
        live.http.put("/v1/steering", json=[{"op": "add", "vector": "mine", "scale": 3}])
        wanted = live.http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
        engine = live.serving.engine
        engine._stop()
        live.until(lambda: live.serving.ready and live.serving.engine is not engine)
        assert live.http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == wanted
        assert list(live.serving.vectors) == ["calm", "joy", "mine"]

    def test_three_starts_are_tried_and_then_the_server_ends(self, serve: Serve) -> None:
        told = threading.Event()
        outcomes: list[Exception | None] = [None, ValueError("no memory yet"), None, ValueError("still none")]

        def start() -> HFEngine:
            if len(outcomes) < 4:
                told.wait(HUNG_S)
            if (error := outcomes.pop(0)) is not None:
                raise error
            return hf_engine()

        live = serve(start).ready()
        engine = live.serving.engine
        engine._stop()
        refused = live.http.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        told.set()
        live.until(lambda: live.serving.ready)
        assert live.http.post("/v1/completions", json=SHORT).status_code == 200
        live.serving.engine._stop()
        live.until(lambda: not live._thread.is_alive())
        assert outcomes == []
        assert "cannot be started again" in str(live.serving.failure)

    def test_an_engine_that_cannot_be_started_again_ends_the_server(self, serve: Serve) -> None:
        live = serve(hf_engine()).ready()
        live.serving.engine._stop()
        live.until(lambda: not live._thread.is_alive())
        assert "cannot be started again" in str(live.serving.failure)


class TestStopping:
    def test_requests_that_run_finish_and_new_ones_are_refused(self, serve: Serve) -> None:
        live = serve(lambda: slowed(hf_engine(), seconds=0.01), drain_s=HUNG_S).ready()
        with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            live.server.handle_exit(signal.SIGTERM, None)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        live.until(lambda: not live._thread.is_alive())

    def test_who_does_not_finish_in_time_is_told_so(self, serve: Serve) -> None:
        live = serve(lambda: slowed(hf_engine()), drain_s=0.3).ready()
        with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            live.server.handle_exit(signal.SIGTERM, None)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "stopping"
        assert rest[-1] == "data: [DONE]"

    def test_the_command_serves_and_sigterm_ends_it_in_good_order(self, tmp_path: Path) -> None:
        tiny.model().save_pretrained(tmp_path / "tiny")
        tiny.tokenizer().save_pretrained(tmp_path / "tiny")
        command = [sys.executable, "-m", "steerscope.cli.main", "serve", str(tmp_path / "tiny"), "--port", "0"]
        command += ["--log-format", "json", "--device", "cpu", "--drain", "300"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines: list[dict] = []
            url = ""
            for line in process.stderr:
                lines.append(json.loads(line))
                if found := re.search(r"http://[\d.:]+", lines[-1]["message"]):
                    url = found[0]
                if lines[-1]["message"] == "ready":
                    break
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=HUNG_S
            ) as response:
                stream = response.iter_lines()
                next(stream)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in stream if line]
            assert rest[-1] == "data: [DONE]"
            lines += [json.loads(line) for line in process.stderr]
            assert process.wait(HUNG_S) == 0
        told = next(line for line in lines if line["message"] == "request")
        assert (told["status"], told["path"], told["tokens"]) == (200, "/v1/completions", 200)
        assert re.fullmatch(r"[0-9a-f]{16}", told["request_id"])
        assert len(lines) < 25, "nothing is logged per token"


def test_log_lines_cannot_be_forged_by_clients() -> None:
    hostile = {"request_id": "a", "path": '/x\n{"level": "error"}', "status": 404}
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", **hostile})
    assert json.loads(JsonLines().format(record))["path"] == hostile["path"]
    assert "\n" not in JsonLines().format(record) + Pretty().format(record)


def test_live_servers_share_nothing(serve: Serve) -> None:
    one, other = serve().ready(), serve().ready()
    assert isinstance(one, Live)
    one.http.put("/v1/steering", json=[{"op": "add", "vector": [1.0] * 64, "layers": 1}])
    assert other.http.get("/v1/steering").json()["ops"] == []
