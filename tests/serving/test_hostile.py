"""Clients that mean no good, or do not know better: each gets one clear answer or none, and no other client notices."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from serving.live import Live, eventually, live, slowed, tiny_engine
from steerscope import SteeringVector, save_vector
from steerscope.client import Client
from steerscope.specs import Capture, Sampling
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow

KEY = "open sesame"
CHAT = {"messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 8, "temperature": 0}
LONG = {**CHAT, "max_tokens": 200, "ignore_eos": True, "stream": True}
MOST = 64 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    # Longer than a busy machine stands still, or requests that were not held up time out.
    limits = {"max_body_bytes": MOST, "max_upload_bytes": 4 * MOST, "body_timeout_s": 3.0, "head_timeout_s": 3.0}
    with live(**limits) as found:
        yield found


@pytest.fixture(autouse=True)
def unhurt(server: Live) -> Iterator[None]:
    """Whatever a test did, the server then works, and holds nothing of it."""
    yield
    assert server.idle()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


def connect(server: Live) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HUNG_S)


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    size = f"Content-Length: {len(body) if length is None else length}"
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", size, *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def hung_up(connection: socket.socket) -> bool:
    """Whether the server ends the connection by itself."""
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


# --- auth


def test_without_the_key_nothing_is_let_in() -> None:
    with live(api_key=KEY) as server:
        paths = json.loads(httpx.get(f"{server.url}/openapi.json", headers=bearer(KEY)).text)["paths"]
        routes = [(method, path) for path, methods in paths.items() for method in methods]
        assert len(routes) > 20
        for method, path in routes:
            open_to_all = path in ("/health", "/ready")
            for headers in ({}, bearer("open"), bearer(KEY + "x"), {"Authorization": f"Basic {KEY}"}):
                answer = httpx.request(method, server.url + path.replace("{", "").replace("}", ""), headers=headers)
                assert (answer.status_code == 401) != open_to_all, (method, path, headers)
                if not open_to_all and method != "head":
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert KEY not in answer.text
        assert httpx.get(f"{server.url}/v1/models", headers=bearer(KEY)).status_code == 200


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_other_sites_cannot_use_a_browser_to_come_in(server: Live) -> None:
    chat = f"{server.url}/v1/chat/completions"
    assert httpx.post(chat, json=CHAT, headers={"Origin": "https://evil.example"}).status_code == 403
    assert httpx.post(chat, json=CHAT, headers={"Host": "evil.example"}).status_code == 403


# --- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": NaN}',
        b'{"messages": [' * 4000,
        b"[" * 20000 + b"]" * 20000,
        b'{"a":' * 9000 + b"1" + b"}" * 9000,
        b"\xff\xfe\x00",
        b'{"max_tokens": ' + b"9" * 9000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"messages": 3, "prompt": {"a": 1}, "steerscope": 7}',
        b'{"prompt": [[[1]]], "messages": [[1]]}',
        b'{"prompt": [-1], "echo": true}',
        b'{"prompt": [1, -99999999999]}',
        b'{"prompt": [99999999999999999999], "messages": [{"role": "user", "content": "x"}], "top_k": 1e400}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/jobs"])
def test_what_is_no_request_is_answered_with_400(server: Live, path: str, body: bytes) -> None:
    answer = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(post("/v1/chat/completions", b"", length=1 << 40))
        assert b"413" in connection.recv(65536).split(b"\r\n")[0]
    huge = {**CHAT, "user": "x" * MOST}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=huge)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(server: Live) -> None:
    """A client that never stops sending gets an error, or is disconnected, after little more than the limit."""
    sent = 0
    with connect(server) as connection:
        head = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.format("/v1/chat/completions").encode())
        block = b"%x\r\n%s\r\n" % (1 << 16, b"x" * (1 << 16))
        try:
            while sent < 512 << 20:
                connection.sendall(block)
                sent += 1 << 16
        except OSError:
            pass
    assert sent < 64 << 20


def test_an_upload_beyond_the_limit_is_refused(server: Live) -> None:
    answer = httpx.post(f"{server.url}/v1/vectors?name=big", content=b"x" * (4 * MOST + 1))
    assert answer.status_code == 413
    assert httpx.get(f"{server.url}/v1/vectors").json()["data"] == []


# --- slow ones


def test_clients_that_never_end_their_head_are_hung_up_on(server: Live) -> None:
    half = [connect(server) for _ in range(40)]
    for i, connection in enumerate(half):
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX-A: b"[: i + 1])
    began = time.monotonic()
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200
    assert all(hung_up(connection) for connection in half)
    assert time.monotonic() - began < 60
    for connection in half:
        connection.close()


def test_a_head_that_trickles_in_is_not_waited_for(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        connection.settimeout(0.05)
        for _ in range(300):
            try:
                connection.sendall(b"X: y\r\n")
                if not connection.recv(100):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        raise AssertionError("it still waits")


def test_a_second_request_on_a_connection_has_a_deadline_too(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"200" in connection.recv(65536)
        connection.sendall(b"GET /health HT")
        assert hung_up(connection)


def test_a_body_that_trickles_in_gets_408(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(post("/v1/chat/completions", b"{", length=500))
        received = b""
        for _ in range(200):
            connection.settimeout(0.1)
            try:
                received += connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(b" ")
        assert b"408" in received.split(b"\r\n")[0]
        assert b"body_timeout" in received


# --- clients that leave


@pytest.mark.parametrize("body", [LONG, {**LONG, "stream": False}], ids=["stream", "whole"])
def test_who_leaves_stops_their_request_and_no_other(server: Live, body: dict[str, object]) -> None:
    before = server.engine.stats()["tokens"]
    with Client(server.url) as other:
        stays = other.stream("The lazy dog", Sampling(max_tokens=60, ignore_eos=True))
        first = next(stays)
        for _ in range(6):
            connection = connect(server)
            connection.sendall(post("/v1/chat/completions", json.dumps(body).encode()))
            if body["stream"]:
                assert b"200" in connection.recv(64)
            connection.close()
        rest = list(stays)
        alone = other.generate("The lazy dog", Sampling(max_tokens=60, ignore_eos=True))
    assert first.text + "".join(piece.text for piece in rest[:-1]) == alone.text
    assert server.idle()
    assert server.engine.stats()["tokens"] - before < 60 + 60 + 6 * 200


def test_who_leaves_the_queue_is_not_run() -> None:
    with live(lambda: slowed(tiny_engine()), max_running=1) as server:
        runs = httpx.Client(base_url=server.url)
        with runs.stream("POST", "/v1/chat/completions", json={**LONG, "n": 32}) as stream:
            chunks = stream.iter_bytes()
            next(chunks)
            waiting = [connect(server) for _ in range(5)]
            for connection in waiting:
                connection.sendall(post("/v1/chat/completions", json.dumps(LONG).encode()))
            assert eventually(lambda: server.serving.admission.waiting == 5)
            for connection in waiting:
                connection.close()
            assert eventually(lambda: server.serving.admission.waiting == 0)
        assert server.idle()
        assert server.engine.stats()["finished"] <= 2 + 32  # those of the warm-up, those that ran, and no others


def test_a_queue_that_is_full_answers_429_with_a_time_to_come_back() -> None:
    with live(max_running=1, max_waiting=1) as server:
        statuses: list[tuple[int, str | None]] = []

        def ask() -> None:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={**LONG, "stream": False}, timeout=HUNG_S)
            statuses.append((answer.status_code, answer.headers.get("retry-after")))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [wait for status, wait in statuses if status == 429]
        assert len(refused) + sum(status == 200 for status, _ in statuses) == 12
        assert refused
        assert all(wait is not None and int(wait) >= 1 for wait in refused)


def test_rows_of_a_capture_nobody_waited_for_are_given_back(server: Live) -> None:
    body = {**LONG, "steerscope": {"capture": {"layers": "all"}}}
    for _ in range(4):
        connection = connect(server)
        connection.sendall(post("/v1/chat/completions", json.dumps(body).encode()))
        assert b"200" in connection.recv(64)
        connection.close()
    assert server.idle()
    assert eventually(lambda: server.engine.budget.used == sum(k.handle._held.size for k in kept(server)))


def kept(server: Live) -> list:
    return list(server.serving.captures._kept.values())


# --- paths

TRICKS = [
    "..",
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%5c..%5cetc%5cpasswd",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "%00",
    "cap-%00",
    "joy%00.safetensors",
    "~root",
    "file:%2f%2f%2fetc%2fpasswd",
    "%252e%252e%252fetc%252fpasswd",
    "a" * 5000,
    "%ff%fe",
]


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick[:24])
def test_no_path_leads_out_of_captures_vectors_or_the_page(server: Live, trick: str) -> None:
    for method in ("GET", "DELETE", "HEAD"):
        for place in ("/v1/captures/", "/v1/vectors/", "/v1/lenses/", "/v1/jobs/", "/ui/"):
            status, body = raw(server, method, place + trick)
            assert status in (200, 400, 404, 405, 414, 431), (method, place, status)
            assert b"root:" not in body
            if status == 200:  # what stays inside: the list of a folder's parent, or the page itself
                assert place == "/ui/" or trick in ("..", "%2e%2e/%2e%2e/etc/passwd"), (method, place, body[:200])


def raw(server: Live, method: str, path: str) -> tuple[int, bytes]:
    """Without a client that would tidy the path up."""
    with connect(server) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while block := connection.recv(65536):
            received += block
    return int(received.split(b" ", 2)[1]), received.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "name", ["../out", "/tmp/out", "a/b", "..", ".hidden", "", "x" * 300, "a\x00b", "a\nb", "con\\x"]
)
def test_no_vector_gets_a_name_that_is_a_path(server: Live, name: str, tmp_path: Path) -> None:
    save_vector(SteeringVector.shared(torch.ones(64)), tmp_path / "v.safetensors")
    data = (tmp_path / "v.safetensors").read_bytes()
    answer = httpx.post(f"{server.url}/v1/vectors", params={"name": name}, content=data)
    assert answer.status_code == 400
    form = httpx.post(f"{server.url}/v1/vectors", data={"name": name}, files={"file": ("../../x.safetensors", data)})
    assert form.status_code in (201, 400)
    if form.status_code == 201:  # an empty name: the file's own, without its folders
        assert (name, form.json()["id"]) == ("", "x")
        assert httpx.delete(f"{server.url}/v1/vectors/x").status_code == 200
    assert httpx.get(f"{server.url}/v1/vectors").json()["data"] == []


def test_files_that_could_run_code_are_not_opened(server: Live, tmp_path: Path) -> None:
    torch.save({"vector": torch.ones(64)}, tmp_path / "v.pt")
    for data in ((tmp_path / "v.pt").read_bytes(), b"\x80\x04cos\nsystem\n", b"", b"GGUF", b"GGUF" + b"\xff" * 64):
        answer = httpx.post(f"{server.url}/v1/vectors?name=evil", content=data)
        assert answer.status_code == 400, data[:10]
        assert answer.json()["error"]["code"] in ("bad_file", "invalid_request")


@pytest.mark.parametrize(
    "ranges", ["bytes=0-9", "bytes=-5", "bytes=9-", "bytes=99999999999-", "bytes=5-1", "x", "bytes=" + "0-0," * 2000]
)
def test_any_range_of_a_capture_is_answered(server: Live, ranges: str) -> None:
    with Client(server.url) as client:
        answer = client.chat([{"role": "user", "content": "x"}], Sampling(max_tokens=3), capture=Capture(layers=1))
        assert answer.capture is not None
        whole = httpx.get(f"{server.url}/v1/captures/{answer.capture.id}")
        part = httpx.get(f"{server.url}/v1/captures/{answer.capture.id}", headers={"Range": ranges})
        assert part.status_code in (200, 206, 400, 416)
        if ranges == "bytes=0-9":
            assert part.content == whole.content[:10]
        if ranges == "bytes=-5":
            assert part.content == whole.content[-5:]
        client.forget(answer.capture)
