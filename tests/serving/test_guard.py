"""Who may come in, and how much they may send."""

import json
import socket
from pathlib import Path

import httpx
import openai
import pytest

from serving.conftest import KEY, Serve
from steerscope.serving.settings import ServerSettings
from steerscope.specs.errors import InvalidRequest
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

BODY = {"prompt": "one two", "max_tokens": 2}


class TestKeys:
    def test_without_a_key_only_loopback_is_bound(self) -> None:
        for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1"):
            assert ServerSettings(host=host).loopback
        for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
            with pytest.raises(
                InvalidRequest, match="without an API key only this machine may connect; bind 127.0.0.1"
            ):
                ServerSettings(host=host)
            assert ServerSettings.parse({"host": host, "api_key": "k"}).host == host

    def test_a_key_is_never_shown(self) -> None:
        settings = ServerSettings.parse({"api_key": "very-secret"})
        assert "very-secret" not in repr(settings) + settings.to_json()
        with pytest.raises(InvalidRequest, match="the API key is empty"):
            ServerSettings.parse({"api_key": " "})

    def test_every_route_but_health_and_the_page_asks_for_the_key(self, serve: Serve) -> None:
        live = serve(api_key=KEY).ready()
        for path in (
            "/v1/models",
            "/v1/vectors",
            "/v1/capabilities",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/v1/nothing",
        ):
            answer = live.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        for wrong in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer \xff", KEY):
            refused = live.http.get("/v1/models", headers={"Authorization": wrong.encode("latin-1")})
            assert refused.status_code == 401, wrong
            assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/"):
            assert live.http.get(path).status_code == 200, path
        assert [model.id for model in live.openai.models.list()] == ["tiny"]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="other", max_retries=0).models.list()

    def test_without_a_key_other_names_and_origins_are_refused(self, serve: Serve) -> None:
        """A page on the web that makes a browser of this machine ask."""
        live = serve().ready()
        assert live.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert (
            live.http.post("/v1/completions", json=BODY, headers={"Origin": "http://evil.example"}).status_code == 403
        )
        own = live.url.removeprefix("http://")
        assert live.http.post("/v1/completions", json=BODY, headers={"Origin": f"http://{own}"}).status_code == 200
        assert "access-control-allow-origin" not in live.http.get("/v1/models").headers

    def test_an_origin_that_was_named_may_ask(self, serve: Serve) -> None:
        live = serve(cors_origins=["http://app.example"], api_key=KEY).ready()
        asks = {"Origin": "http://app.example", "Access-Control-Request-Method": "POST"}
        asks["Access-Control-Request-Headers"] = "authorization,content-type"
        allowed = live.http.options("/v1/chat/completions", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "http://app.example"
        other = live.http.options("/v1/chat/completions", headers={**asks, "Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


class TestLimits:
    def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(self, serve: Serve) -> None:
        live = serve(max_body_bytes=2000, max_upload_bytes=5000).ready()
        body = json.dumps({**BODY, "prompt": "x" * 3000}).encode()
        said = live.http.post("/v1/completions", content=body)
        unsaid = live.http.post("/v1/completions", content=iter([body[:1000], body[1000:]]))
        for answer in (said, unsaid, live.http.post("/v1/vectors?name=x", content=b"x" * 6000)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert live.http.post("/v1/vectors?name=x", content=b"x" * 4000).status_code == 400
        assert live.http.post("/v1/completions", json=BODY).status_code == 200

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[1]",
            b"null",
            b'"x"',
            b'{"prompt": NaN}',
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"n": ' + b"9" * 5000 + b"}",
        ],
    )
    def test_what_is_not_a_json_object_is_refused(self, serve: Serve, body: bytes) -> None:
        answer = serve().ready().http.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    def test_a_body_that_does_not_come_is_not_waited_for(self, serve: Serve) -> None:
        live = serve(body_timeout_s=0.3).ready()
        with socket.create_connection(("127.0.0.1", httpx.URL(live.url).port or 0)) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            slow.settimeout(HUNG_S)
            answer = b"".join(iter(lambda: slow.recv(65536), b""))  # until the server closes the connection
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer

    def test_headers_that_do_not_come_or_do_not_end_close_the_connection(self, serve: Serve) -> None:
        live = serve(head_timeout_s=0.3).ready()
        address = ("127.0.0.1", httpx.URL(live.url).port or 0)
        for beginning in (b"", b"GET /health HTTP/1.1\r\nX: 1\r\n"):
            with socket.create_connection(address) as slow:
                slow.settimeout(HUNG_S)
                slow.sendall(beginning)
                assert slow.recv(100) == b""
        with socket.create_connection(address) as large:
            large.settimeout(HUNG_S)
            large.sendall(b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n")
            assert large.recv(100).startswith(b"HTTP/1.1 400")
        assert live.http.get("/health").status_code == 200

    def test_unknown_routes_and_methods_are_told_in_openais_shape(self, serve: Serve) -> None:
        live = serve().ready()
        for answer, status in (
            (live.http.get("/v1/nothing"), 404),
            (live.http.get("/v1/completions"), 405),
            (live.http.get("/ui/../../pyproject.toml"), 404),
            (live.http.get("/ui/%2e%2e/%2e%2e/settings.py"), 404),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_every_answer_has_a_request_id_and_a_clients_own_is_kept(serve: Serve) -> None:
    live = serve().ready()
    assert len(live.http.get("/health").headers["x-request-id"]) == 16
    assert live.http.get("/v1/nothing", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    hostile = live.http.get("/health", headers={"X-Request-Id": "x" * 500})
    assert len(hostile.headers["x-request-id"]) == 16


def test_a_folder_of_vectors_leaves_out_what_does_not_fit(serve: Serve, vectors: Path, tmp_path: Path) -> None:
    for file in vectors.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    (tmp_path / "notes.txt").write_text("no vector")
    live = serve(vectors=str(tmp_path)).ready()
    assert list(live.serving.vectors) == ["calm", "joy"]
