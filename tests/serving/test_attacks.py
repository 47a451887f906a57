"""Attacks that worked once, and those that the threat model (docs/security.md) says do not: each against a server."""

import io
import json
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator

import httpx
import pytest
import safetensors.torch
import torch
from starlette.testclient import TestClient

from serving.live import Live, eventually, live
from steerscope.engines.api import Engine
from steerscope.serving import jobs
from steerscope.serving.app import create_app
from steerscope.serving.logs import JsonLines
from steerscope.serving.settings import ServerSettings
from steerscope.vectors.files import load_upload
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEY = "a-key-nobody-knows"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        yield found


def refused(server: Live, path: str = "/v1/chat/completions", **more: object) -> str:
    answer = httpx.post(server.url + path, json={**CHAT, **more}, timeout=HUNG_S)
    assert answer.status_code == 400, answer.text[:300]
    assert len(answer.content) < 10_000
    return answer.json()["error"]["message"]


# --- programs


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "tokenizer_kwargs"])
def test_a_client_cannot_bring_a_template_of_its_own(server: Live, name: str) -> None:
    said = refused(server, chat_template_kwargs={name: "{% for i in range(99999) %}x{% endfor %}"})
    assert said == f"chat_template_kwargs.{name}: is not a variable of the chat template; leave it out"


def pickle_like_safetensors() -> bytes:
    """A zip's local header has the compression method where safetensors has its first brace."""
    file = io.BytesIO()
    torch.save(torch.ones(64), file)
    data = bytearray(file.getvalue())
    data[8:9] = b"{"
    return bytes(data)


def test_an_uploaded_pickle_is_not_opened_whatever_it_looks_like(server: Live) -> None:
    answer = httpx.post(f"{server.url}/v1/vectors?name=x.pt", content=pickle_like_safetensors())
    assert answer.status_code == 400
    assert "neither safetensors nor GGUF" in answer.json()["error"]["message"]


# --- work and memory


def test_a_body_that_would_cost_more_than_it_may_is_refused(server: Live) -> None:
    wide = {"op": "add", "vector": "x", "layers": ",".join(["0-9999"] * 20_000)}
    assert "more than 10000 layers are named" in refused(server, steerscope={"steer": [wide]})
    op = {"op": "add", "vector": "x", "layers": [1]}
    assert "there are 513 ops; give at most 512" in refused(server, steerscope={"steer": [op] * 513})
    assert "give 1 to 4096" in refused(server, messages=[{"role": "user", "content": ""}] * 4097)
    part = {"type": "text", "text": "a"}
    assert "at most 256" in refused(server, messages=[{"role": "user", "content": [part] * 257}])
    rule = {"when": {"kind": "when", "concept": "a", "above": 0.5}, "then": {"kind": "flag", "name": "n"}}
    assert "at most 64" in refused(server, steerscope={"watch": {"pack": "x"}, "rules": [rule] * 65})
    several = {"when": {"kind": "any_of", "of": [rule["when"]] * 65}, "then": rule["then"]}
    assert "more than 64 conditions" in refused(server, steerscope={"watch": {"pack": "x", "rules": [several]}})


def test_all_choices_of_a_request_are_bounded_together(server: Live) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["a"] * 128, "n": 3})
    assert "384 choices of 128 prompts; ask for at most 256" in answer.json()["error"]["message"]


def test_a_hundred_thousand_mistakes_are_one_problem(server: Live) -> None:
    assert "100000 problems, too many to list" in refused(server, steerscope={"steer": {"ops": [], **many("x")}})
    assert "100001 problems, too many to list" in refused(server, **many("y"), n="many")


def many(name: str) -> dict[str, int]:
    return {f"{name}{i}": 1 for i in range(100_000)}


def test_an_upload_is_no_larger_than_a_vector_of_the_model(server: Live) -> None:
    header = b'{"a":' + b"[" * (2 << 20)
    answer = httpx.post(f"{server.url}/v1/vectors?name=x", content=struct.pack("<Q", len(header)) + header)
    assert answer.status_code == 400
    assert "a vector of 4 layers of 64 numbers has at most" in answer.json()["error"]["message"]
    notes = {"format": "steerscope-vector", "version": "1", "metadata": json.dumps({"model": "m" * 900_000})}
    assert load_upload(safetensors.torch.save({"shared": torch.ones(64)}, notes), "x", 4, 64).hidden == 64


def test_all_bodies_together_are_bounded() -> None:
    with live(max_body_bytes=2000, max_upload_bytes=2000, body_timeout_s=60.0) as server:
        address = httpx.URL(server.url)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2000\r\n\r\n" + "x" * 1900
        held = [socket.create_connection((address.host, address.port or 0)) for _ in range(4)]
        for one in held:
            one.sendall(head.encode())

        def status() -> int:
            return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 600, "max_tokens": 1}).status_code

        assert eventually(lambda: status() == 429)
        for one in held:
            one.close()
        assert eventually(lambda: status() == 400)  # it is read again: longer than the context


def test_jobs_that_have_ended_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_HELD", 2500)
    with live() as server:
        kept: jobs.Jobs = server.app.state.jobs
        ids = []
        for _ in range(6):
            ids.append(httpx.post(f"{server.url}/v1/jobs", json=CHAT).json()["job_id"])
            assert "event: end" in httpx.get(f"{server.url}/v1/jobs/{ids[-1]}/stream").text
        assert 0 < kept.held <= 2500
        assert httpx.get(f"{server.url}/v1/jobs/{ids[0]}").status_code == 404
        assert httpx.get(f"{server.url}/v1/jobs/{ids[-1]}").status_code == 200
        large = {**CHAT, "messages": [{"role": "user", "content": "hi", "name": None}], "user": "u" * 4000}
        answer = httpx.post(f"{server.url}/v1/jobs", json=large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert kept.held == 0, "what was forgotten is not counted any more"


# --- browsers


def test_every_answer_says_what_a_browser_may_do_with_it(server: Live) -> None:
    for path in ("/", "/docs", "/health", "/v1/models", "/v1/nothing", "/ui/js/app.js"):
        headers = httpx.get(server.url + path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy, path
        assert "frame-ancestors 'none'" in policy
        assert "script-src" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_no_page_loads_anything_from_elsewhere(server: Live) -> None:
    for path in ("/", "/docs"):
        text = httpx.get(server.url + path).text
        assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text), path
    assert "/v1/chat/completions" in httpx.get(f"{server.url}/docs").text
    assert httpx.get(f"{server.url}/redoc").status_code == 404


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "evil.example"),
        ("Host", "127.0.0.1.evil.example"),
        ("Host", "localhost:80@evil.example"),
        ("Host", "[::1]evil.example"),
        ("Origin", "null"),
        ("Origin", "http://localhost:3000"),
        ("Origin", "http://evil.example"),
    ],
)
def test_a_page_of_another_site_cannot_use_the_browser_of_this_machine(server: Live, header: str, value: str) -> None:
    """Under a name that was made to mean this address, or from another origin, with a body that needs no preflight."""
    headers = {"Content-Type": "text/plain", header: value}
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
    assert answer.status_code == 403


# --- leaks


def test_who_has_no_key_learns_nothing_of_folders() -> None:
    told, go_on = threading.Event(), threading.Event()

    def start() -> Engine:
        app.state.serving.tell("converting a model into /home/somebody/.cache")
        told.set()
        go_on.wait(HUNG_S)
        raise OSError("/home/somebody/models is not there")

    app = create_app(start, ServerSettings.parse({"api_key": KEY}))
    with TestClient(app) as client:
        assert told.wait(HUNG_S)
        assert client.get("/health").json() == {"status": "ok", "stage": "loading"}
        assert client.get("/ready").json()["stage"] == "loading"
        go_on.set()
        assert eventually(lambda: client.get("/health").json() == {"status": "failed", "stage": "failed"})
        assert client.get("/v1/models").status_code == 401


def test_logs_hold_neither_prompts_nor_texts_nor_keys() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("steerscope")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        with live(api_key=KEY) as server:
            own = {"Authorization": f"Bearer {KEY}"}
            said = {**CHAT, "messages": [{"role": "user", "content": "my-secret-prompt"}]}
            for body in (said, {**said, "nonsense": "my-secret-prompt"}, {**said, "stream": True}):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=own)
            httpx.get(f"{server.url}/v1/models?q=my-secret-prompt", headers={"Authorization": "Bearer my-secret-key"})
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    lines = stream.getvalue()
    assert lines.count('"path": "/v1/chat/completions"') == 3
    assert "my-secret" not in lines
    assert KEY not in lines


def test_captures_are_found_by_their_id_alone(server: Live) -> None:
    ids = []
    for _ in range(2):
        body = {**CHAT, "steerscope": {"capture": {"layers": [1]}}}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        ids.append(answer["choices"][0]["steerscope"]["captures"]["id"])
    assert all(re.fullmatch(r"cap-[0-9a-f]{32}", one) for one in ids)
    assert sum(a != b for a, b in zip(*ids, strict=True)) > 16, "nothing of one tells of the other"
    assert httpx.get(f"{server.url}/v1/captures").status_code == 404
    for name in ("cap-" + "0" * 32, "..%2f..%2fetc%2fpasswd", ids[0].upper(), ids[0] + ".safetensors"):
        assert httpx.get(f"{server.url}/v1/captures/{name}").status_code == 404
    assert httpx.get(f"{server.url}/v1/captures/{ids[0]}").status_code == 200
