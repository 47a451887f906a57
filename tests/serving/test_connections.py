"""A connection is used again after any answer, or the answer says that it is not: no request is lost between them."""

import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse

import httpx
import pytest

from serving.live import Live, live
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

KEY = "sesame"
SMALL, LARGE = 60_000, 3_000_000
LIMIT = 1_000_000
REFUSED = {  # none of these reads its body
    "404": ("POST", "/v1/nothing", KEY, 404),
    "405": ("POST", "/health", KEY, 405),
    "401": ("POST", "/v1/completions", "wrong", 401),
    "404 of a vector": ("POST", "/v1/vectors/a/b", KEY, 404),
    "200": ("GET", "/health", KEY, 200),
    "404 of a job": ("DELETE", "/v1/jobs/job-0", KEY, 404),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(api_key=KEY, max_body_bytes=LIMIT, max_upload_bytes=LIMIT) as found:
        yield found


class Wire:
    """One connection, and what is really on it."""

    def __init__(self, server: Live) -> None:
        url = httpx.URL(server.url)
        self.socket = socket.create_connection((url.host, url.port or 0), timeout=HUNG_S)

    def head(self, method: str, path: str, *more: str, key: str = KEY) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}", *more]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def answer(self) -> HTTPResponse:
        found = HTTPResponse(self.socket)
        found.begin()
        found.body = found.read()  # type: ignore[attr-defined]
        return found

    def serves(self) -> bool:
        """Whether a second request is answered."""
        self.head("GET", "/health")
        return self.answer().status == 200

    def hung_up(self) -> bool:
        try:
            return not self.socket.recv(1)
        except ConnectionError:
            return True

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.mark.parametrize("name", REFUSED)
def test_after_an_unread_small_body_the_connection_is_used_again(server: Live, name: str) -> None:
    method, path, key, status = REFUSED[name]
    with Wire(server) as wire:
        for _ in range(3):
            wire.head(method, path, f"Content-Length: {SMALL}", key=key)
            time.sleep(0.02)  # the route is done before the body comes
            wire.socket.sendall(b"x" * SMALL)
            answer = wire.answer()
            assert (answer.status, answer.getheader("connection")) == (status, None)
        time.sleep(1.2)
        assert wire.serves()


def test_so_it_is_after_a_chunked_body(server: Live) -> None:
    with Wire(server) as wire:
        wire.head("POST", "/v1/nothing", "Transfer-Encoding: chunked")
        time.sleep(0.02)
        wire.socket.sendall(b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
        answer = wire.answer()
        assert (answer.status, answer.getheader("connection")) == (404, None)
        assert wire.serves()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("sends_all_first", [True, False])
def test_a_large_body_is_not_read_and_the_answer_says_that_it_is_the_last(
    server: Live, name: str, sends_all_first: bool
) -> None:
    method, path, key, status = REFUSED[name]
    size = LIMIT - 1
    with Wire(server) as wire:
        wire.head(method, path, f"Content-Length: {size}", key=key)
        if sends_all_first:
            time.sleep(0.05)
            wire.socket.sendall(b"x" * size)
        answer = wire.answer()
        assert (answer.status, answer.getheader("connection")) == (status, "close")
        assert wire.hung_up()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/vectors?name=x"])
def test_a_body_beyond_the_limit_is_told_so_though_the_client_reads_only_at_its_end(server: Live, path: str) -> None:
    with Wire(server) as wire:
        wire.head("POST", path, f"Content-Length: {LARGE}")
        wire.socket.sendall(b"x" * LARGE)
        answer = wire.answer()
        assert (answer.status, answer.getheader("connection")) == (413, "close")
        assert b"body_too_large" in answer.body  # type: ignore[attr-defined]
        assert wire.hung_up()


def test_a_little_beyond_the_limit_the_connection_stays() -> None:
    with live(api_key=KEY, max_body_bytes=2000) as server, Wire(server) as wire:
        wire.head("POST", "/v1/completions", "Content-Length: 3000")
        wire.socket.sendall(b"x" * 3000)
        answer = wire.answer()
        assert (answer.status, answer.getheader("connection")) == (413, None)
        assert wire.serves()


def test_a_body_that_was_only_announced_is_not_asked_for(server: Live) -> None:
    with Wire(server) as wire:
        wire.head("POST", "/v1/nothing", "Content-Length: 10", "Expect: 100-continue")
        assert wire.socket.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 404"
        assert wire.answer().getheader("connection") == "close"


def test_a_body_that_does_not_come_does_not_hold_up_the_answer_for_long(server: Live) -> None:
    with Wire(server) as wire:
        wire.head("POST", "/v1/nothing", "Content-Length: 10")
        answer = wire.answer()
        assert (answer.status, answer.getheader("connection")) == (404, "close")


def test_a_keep_alive_client_loses_no_request(server: Live) -> None:
    def parts(size: int) -> Iterator[bytes]:
        for _ in range(10):
            time.sleep(0.005)
            yield b"x" * (size // 10)

    statuses, wanted = [], []
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    with httpx.Client(base_url=server.url, limits=limits, timeout=HUNG_S) as client:
        for size in (10, SMALL, LARGE // 4):
            for pause in (0.0, 0.0, 0.5, 1.2):
                for method, path, key, status in REFUSED.values():
                    headers = {"Authorization": f"Bearer {key}"}
                    content = parts(size) if pause else b"x" * size
                    statuses.append(client.request(method, path, headers=headers, content=content).status_code)
                    wanted.append(status)
                time.sleep(pause)
                statuses.append(client.get("/health").status_code)
                wanted.append(200)
    assert statuses == wanted
