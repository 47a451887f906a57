"""A stream is never silent: headers at once, an event for each token, and errors with their status."""

import socket
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch

from serving.live import Live, eventually, live, slowed, tiny_engine
from steerscope.client import Answer, AsyncClient, Client, Piece, ServerError
from steerscope.engines.hf import HFEngine
from steerscope.specs import Capture, InvalidRequest, Sampling
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

CHAT = [{"role": "user", "content": "How was your week?"}]
COUNT = 12
ASKED = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "stream": True}
ROUTES = {"/v1/completions": {"prompt": "one two"}, "/v1/chat/completions": {"messages": CHAT}}
TOKENS = [("metaspace", "<0xF0>"), ("bytes", "<|im_end|>")]  # neither has a text before the stream ends


def saying(engine: HFEngine, token: int) -> HFEngine:
    """Every token it samples is this one."""
    forward = engine._forward

    def say(*arguments: object, **more: object) -> torch.Tensor:
        logits = forward(*arguments, **more).clone()  # type: ignore[arg-type]
        logits[..., token] = 1e4
        return logits

    engine._forward = say  # type: ignore[method-assign]
    return engine


def port(server: Live) -> int:
    return httpx.URL(server.url).port or 0


@pytest.fixture(scope="module", params=TOKENS, ids=str)
def silent(request: pytest.FixtureRequest) -> Iterator[Live]:
    kind, name = request.param
    tokenizer = tiny.tokenizer(kind)
    engine = HFEngine(tiny.model(), tokenizer, name="tiny")
    with live(saying(engine, tokenizer.get_vocab()[name])) as server:
        yield server


@pytest.fixture
def go() -> threading.Event:
    found = threading.Event()
    found.set()
    return found


@pytest.fixture
def halted(go: threading.Event) -> Iterator[Live]:
    """No step is made while `go` is not set."""
    with live(lambda: slowed(tiny_engine(), go.wait, HUNG_S), max_running=1, max_waiting=1) as server:
        go.clear()
        yield server
        go.set()


# --- headers


@pytest.mark.parametrize("route", ROUTES)
def test_headers_come_before_the_first_token_and_while_a_request_waits_its_turn(
    halted: Live, go: threading.Event, route: str
) -> None:
    body = {**ROUTES[route], **ASKED}
    with (
        httpx.stream("POST", halted.url + route, json=body, timeout=HUNG_S) as running,
        httpx.stream("POST", halted.url + route, json=body, timeout=HUNG_S) as waiting,
    ):
        assert halted.serving.admission.waiting == 1
        for response in (running, waiting):
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
        assert halted.engine.stats()["tokens"] == 6, "those of the warm-up"
        refused = httpx.post(halted.url + route, json=body, timeout=HUNG_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        go.set()
        for response in (running, waiting):
            assert response.read().endswith(b"data: [DONE]\n\n")


def test_the_openai_package_has_its_stream_before_the_first_token(halted: Live, go: threading.Event) -> None:
    client = openai.OpenAI(base_url=f"{halted.url}/v1", api_key="none", max_retries=0, timeout=HUNG_S)
    with client.chat.completions.create(model="tiny", messages=CHAT, stream=True, max_tokens=3) as stream:  # type: ignore[call-overload]
        assert halted.engine.stats()["tokens"] == 6
        go.set()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")


def test_one_that_leaves_before_its_first_token_leaves_nothing_behind(halted: Live, go: threading.Event) -> None:
    body = {**ROUTES["/v1/completions"], **ASKED, "steerscope": {"capture": {"layers": "all"}}}
    for _ in range(2):  # the second waits for its turn
        with httpx.stream("POST", f"{halted.url}/v1/completions", json=body, timeout=HUNG_S):
            pass
    go.set()
    assert halted.idle()
    assert eventually(lambda: halted.engine.budget.used == 0)


# --- tokens


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stop", [None, "never"])
def test_each_token_is_an_event_though_it_has_no_text_yet(silent: Live, route: str, stop: str | None) -> None:
    client = openai.OpenAI(base_url=f"{silent.url}/v1", api_key="none", max_retries=0, timeout=HUNG_S)
    create = client.chat.completions.create if "chat" in route else client.completions.create
    given = {**ROUTES[route], **ASKED, "stop": stop}
    more = {"ignore_eos": given.pop("ignore_eos")}
    chunks = list(create(model="tiny", extra_body=more, **given))  # type: ignore[call-overload]
    told = [chunk.choices[0] for chunk in chunks]
    texts = [one.text if hasattr(one, "text") else one.delta.content for one in told if one.finish_reason is None]
    assert len(texts) == COUNT + ("chat" in route), "a chat also has an event that says who speaks"
    assert texts[:-1] == [""] * (len(texts) - 1), "an empty text, not none"
    assert told[-1].finish_reason == "length"


def test_our_clients_bring_a_piece_for_each_token(silent: Live) -> None:
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True)
    with Client(silent.url) as client:
        for *pieces, answer in (client.stream("one two", sampling), client.stream_chat(CHAT, sampling)):
            assert [type(piece) for piece in pieces] == [Piece] * COUNT
            assert isinstance(answer, Answer)
            assert "".join(piece.text for piece in pieces) == answer.text


async def test_so_does_the_async_client(silent: Live) -> None:
    async with AsyncClient(silent.url) as client:
        found = [piece async for piece in client.stream("one two", Sampling(max_tokens=COUNT, ignore_eos=True))]
    assert [type(piece) for piece in found] == [Piece] * COUNT + [Answer]


def test_a_text_that_may_become_a_stop_string_is_held_back_token_by_token() -> None:
    letter = tiny.tokenizer().get_vocab()["a"]
    body = {**ROUTES["/v1/completions"], **ASKED, "stop": ["a" * (COUNT + 1)]}
    with live(lambda: saying(tiny_engine(), letter)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HUNG_S).text
    assert answer.count('"text":""') == COUNT, "all but the last token, and the end"
    assert answer.count('"text":"' + "a" * COUNT) == 1


# --- errors


def test_what_is_refused_without_waiting_is_an_ordinary_answer() -> None:
    with live(captures_bytes=5000) as server, Client(server.url) as client:
        with pytest.raises(ServerError, match="the capture budget is") as refused:
            list(client.stream("one two", Sampling(max_tokens=100), capture=Capture(layers="all")))
        assert refused.value.status == 429
        with pytest.raises(InvalidRequest, match="layer 99"):
            list(client.stream("one two", capture=Capture(layers=99)))
        body = {**ROUTES["/v1/completions"], **ASKED, "steerscope": {"capture": {"layers": "all"}}}
        assert httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 100}).status_code == 429


def test_a_failure_after_the_headers_is_an_event_with_its_status() -> None:
    engine = tiny_engine()
    with live(engine) as server, Client(server.url) as client:
        engine._forward = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(ServerError) as failed:
            list(client.stream("one two", Sampling(max_tokens=3)))
        assert (failed.value.status, failed.value.code) == (503, "engine_failed")
        official = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HUNG_S)
        with pytest.raises(openai.APIError) as told:
            list(official.completions.create(model="tiny", prompt="one two", stream=True))
        assert told.value.code == "engine_failed"
        assert 'steerscope_rejected_total{reason="engine_failed"} 2.0' in httpx.get(f"{server.url}/metrics").text


def test_headers_are_on_the_wire_at_once(halted: Live, go: threading.Event) -> None:
    """Without a client's help: the bytes themselves."""
    body = b'{"prompt": "one two", "max_tokens": 3, "stream": true}'
    with socket.create_connection(("127.0.0.1", port(halted)), timeout=HUNG_S) as wire:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        wire.sendall(head.encode() + body)
        assert wire.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert halted.engine.stats()["tokens"] == 6
        go.set()
        rest = b""
        while b"[DONE]" not in rest:
            rest += wire.recv(1 << 16)
