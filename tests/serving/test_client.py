"""The typed client against a real server: what comes back equals what the engine itself gives."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from lenses import packs
from serving.live import Live, live, tiny_engine
from steerscope import SteeringVector, load_vector
from steerscope.client import Answer, AsyncClient, Client, Piece, ServerError
from steerscope.client.answers import Gathered, ServerEvent
from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Ablate, Add, Capture, InvalidRequest, Sampling, Steering, Watch
from steerscope.specs.watch import flag, when
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

CHAT = [{"role": "user", "content": "The quick brown fox"}]
SHORT = Sampling(max_tokens=12, ignore_eos=True)
PUSH = Add(vector=np.random.default_rng(4).normal(size=64).astype(np.float32), scale=4.0, layers=1)
Cli = Callable[..., object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    packs.make([3, 6], hidden=64).save(folder / "moods")
    with live(lenses=(str(folder / "moods"),), any_model=True) as found:
        yield found


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SyncEngine]:
    """The same model without a server."""
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as made:
        packs.make([3, 6], hidden=64).save(folder / "again")
        made.register_pack("moods", folder / "again", any_model=True)
        yield made


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def test_texts_are_the_engines(client: Client, engine: SyncEngine) -> None:
    assert client.chat(CHAT, SHORT).text == engine.chat(CHAT, SHORT).text
    alone = engine.generate("The lazy dog", SHORT, steer=PUSH)
    found = client.generate("The lazy dog", SHORT, steer=PUSH)
    assert (found.text, found.token_ids) == (alone.text, alone.token_ids)
    assert found.text != client.generate("The lazy dog", SHORT).text
    assert client.generate(alone.prompt_token_ids, SHORT).text == engine.generate("The lazy dog", SHORT).text
    assert found.usage is not None
    assert found.usage.completion_tokens == 12
    assert found.finish_reason == "length"


def test_a_stream_brings_pieces_and_then_the_same_answer(client: Client) -> None:
    whole = client.chat(CHAT, SHORT, steer=PUSH)
    *pieces, answer = client.stream_chat(CHAT, SHORT, steer=PUSH)
    assert isinstance(answer, Answer)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == answer.text == whole.text
    assert answer.token_ids == whole.token_ids
    assert "".join(token.text for token in answer.choices[0].tokens) == whole.text
    assert answer.usage == whole.usage


def test_several_choices_each_have_their_own(client: Client) -> None:
    sampling = Sampling(max_tokens=12, ignore_eos=True, n=3, temperature=1.5, seed=5)
    whole = client.generate("The lazy dog", sampling)
    *_, answer = client.stream("The lazy dog", sampling)
    assert isinstance(answer, Answer)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in whole.choices]
    assert len({choice.text for choice in whole.choices}) == 3


def test_rows_are_the_engines_until_they_are_forgotten(client: Client, engine: SyncEngine, tmp_path: Path) -> None:
    asked = Capture(layers=[0, 3], sites=("resid_post", "mlp_out"))
    answer = client.chat(CHAT, SHORT, capture=asked, steer=PUSH)
    assert answer.capture is not None
    alone = engine.chat(CHAT, SHORT, capture=asked, steer=PUSH).rows
    rows = client.rows(answer.capture)
    assert set(rows) == set(alone)
    for key in alone:
        torch.testing.assert_close(rows[key], alone[key], rtol=1e-5, atol=1e-5)
    assert rows.labels.token_id.tolist() == alone.labels.token_id.tolist()
    assert answer.capture.rows == rows.n
    assert client.save_rows(answer.capture, tmp_path / "rows.safetensors").stat().st_size > answer.capture.bytes
    client.forget(answer.capture)
    with pytest.raises(ServerError, match="there is no capture") as gone:
        client.rows(answer.capture)
    assert gone.value.status == 404


def test_readings_and_firings_are_the_engines(client: Client, engine: SyncEngine) -> None:
    concept = engine.packs["moods"].concepts[0].id
    watch = Watch(pack="moods", top_k=3, rules=[when(concept, above=0.01).then(flag("seen"))])
    alone = engine.chat(CHAT, SHORT, watch=watch)
    for answer in (client.chat(CHAT, SHORT, watch=watch), [*client.stream_chat(CHAT, SHORT, watch=watch)][-1]):
        assert isinstance(answer, Answer)
        assert [one.position for one in answer.readings] == [one.position for one in alone.readings]
        for mine, theirs in zip(answer.readings, alone.readings, strict=True):
            assert [c.id for c in mine.concepts] == [c.id for c in theirs.concepts]
            assert [c.score for c in mine.concepts] == pytest.approx([c.probability for c in theirs.concepts], rel=1e-3)
        told = [(one.rule, one.action, one.position) for one in answer.firings]
        assert told == [(one.rule, one.action, one.position) for one in alone.firings]


def test_vectors_go_up_are_used_by_name_and_go_away(client: Client, engine: SyncEngine, tmp_path: Path) -> None:
    vector = SteeringVector({1: torch.randn(64, generator=torch.Generator().manual_seed(1))})
    client.upload_vector("up", vector)
    assert "up" in [one["id"] for one in client.vectors()]
    by_name = client.chat(CHAT, SHORT, steer=Add(vector="up", scale=5.0))
    assert by_name.text == engine.chat(CHAT, SHORT, steer=vector.add(5.0)).text
    assert client.chat(CHAT, SHORT, steer="up").text == engine.chat(CHAT, SHORT, steer=vector.add(1.0)).text
    client.delete_vector("up")
    with pytest.raises(InvalidRequest, match="up"):
        client.chat(CHAT, SHORT, steer="up")
    with pytest.raises(InvalidRequest, match="say what the server shall call"):
        client.upload_vector(None, vector)
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ServerError, match="neither safetensors nor GGUF"):
        client.upload_vector(None, tmp_path / "bad.safetensors")
    for name in ("up", "../../etc/passwd"):
        with pytest.raises(ServerError) as gone:
            client.delete_vector(name)
        assert gone.value.status == 404


def test_the_default_steering_is_got_set_and_cleared(client: Client) -> None:
    plain = client.chat(CHAT, SHORT).text
    steered = client.chat(CHAT, SHORT, steer=PUSH).text
    client.default_steering = PUSH
    try:
        assert client.default_steering == Steering.of(PUSH)
        assert client.chat(CHAT, SHORT).text == steered
        assert client.chat(CHAT, SHORT, steer=Steering.none()).text == plain
    finally:
        client.default_steering = None
    assert client.default_steering == Steering()
    assert client.chat(CHAT, SHORT).text == plain


def test_what_the_server_has_is_told(client: Client) -> None:
    assert client.models() == ["tiny"]
    assert client.capabilities()["layers"] == 4
    assert [one["id"] for one in client.lenses()] == ["moods"]
    assert len(client.lens("moods")["concepts"]) == 9


def test_problems_are_the_librarys_error_with_all_of_them(client: Client) -> None:
    steer = Steering.of(Add(vector=[1.0] * 64, layers=99), Ablate(vector="nobody", layers=1))
    for call in (client.chat, lambda *a, **k: [*client.stream_chat(*a, **k)]):
        with pytest.raises(InvalidRequest) as refused:
            call(CHAT, SHORT, steer=steer)
        assert len(refused.value.problems) == 2
    with pytest.raises(InvalidRequest, match="strength: is no option"):
        client.chat(CHAT, SHORT, strength=3)  # type: ignore[call-arg]
    with pytest.raises(ServerError, match="this server has 'tiny'"), Client(client.url, model="x") as other:
        other.chat(CHAT)


def test_leaving_a_stream_ends_the_request(client: Client, server: Live) -> None:
    stream = client.stream_chat(CHAT, Sampling(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert server.idle()


def test_no_server_and_a_wrong_address_are_said_plainly() -> None:
    with pytest.raises(ServerError, match="start one with steerscope serve"):
        Client("http://127.0.0.1:9").models()
    with pytest.raises(InvalidRequest, match="is not an address"):
        Client("localhost:8000")


@pytest.mark.parametrize(
    "answer", [b"<html>hello</html>", b'{"choices": 3}', b"[]", b'data: {"choices": [1]}\n\n', b"data: {\n\n"]
)
def test_an_answer_of_another_kind_of_server_is_one_clear_error(answer: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{other.server_port}")
        with pytest.raises(ServerError, match="was not understood"):
            client.chat(CHAT, SHORT)
        with pytest.raises(ServerError, match=r"was not understood|before its end was told"):
            list(client.stream_chat(CHAT, SHORT))
        other.shutdown()


def test_a_key_is_sent_and_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tiny_engine, api_key="sesame") as server:
        with pytest.raises(ServerError) as refused:
            Client(server.url).models()
        assert refused.value.status == 401
        assert Client(server.url, api_key="sesame").models() == ["tiny"]
        monkeypatch.setenv("STEERSCOPE_API_KEY", "sesame")
        assert Client(f"{server.url}/v1").models() == ["tiny"]


async def test_the_async_client_does_the_same(server: Live, client: Client) -> None:
    async with AsyncClient(server.url) as other:
        expected = client.chat(CHAT, SHORT, steer=PUSH)
        answer, whole = await asyncio.gather(other.chat(CHAT, SHORT, steer=PUSH), other.generate("The lazy dog", SHORT))
        assert answer.text == expected.text
        assert whole.text == client.generate("The lazy dog", SHORT).text
        pieces = [piece async for piece in other.stream_chat(CHAT, SHORT, steer=PUSH, capture=Capture(layers=2))]
        last = pieces[-1]
        assert isinstance(last, Answer)
        assert last.text == expected.text
        assert last.capture is not None
        assert (await other.rows(last.capture)).n == last.capture.rows
        await other.forget(last.capture)
        await other.set_default_steering(PUSH)
        assert await other.default_steering() == Steering.of(PUSH)
        await other.set_default_steering(None)
        job = await other.start_job(CHAT, SHORT)
        events = [event async for event in other.job_events(job)]
        assert events[-1].name == "end"
        rest = [event async for event in other.job_events(job, after=events[4])]
        assert rest == events[5:]
        assert (await other.models(), (await other.capabilities())["hidden"]) == (["tiny"], 64)
        with pytest.raises(InvalidRequest):
            await other.chat(CHAT, steer=Add(vector=[1.0] * 64, layers=99))
        stream = other.stream_chat(CHAT, Sampling(max_tokens=200, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
    assert await asyncio.to_thread(server.idle)


def test_a_job_tells_readings_and_its_capture(client: Client) -> None:
    watch, capture = Watch(pack="moods", top_k=2), Capture(layers=1)
    events = list(client.job_events(client.start_job(CHAT, SHORT, watch=watch, capture=capture)))
    positions = [event.data["position"] for event in events if event.name == "reading"]
    rows = client.rows(events[-1].data["captures"]["id"])
    assert positions == list(range(rows.n))


# --- steerscope chat --server


@pytest.fixture
def talk(server: Live) -> Callable[..., tuple[list[str], str]]:
    from typer.testing import CliRunner

    from steerscope.cli.main import app

    def run(*lines: str, flags: tuple[object, ...] = ()) -> tuple[list[str], str]:
        arguments = ["chat", "--server", server.url, "--max-tokens", "6", *map(str, flags)]
        result = CliRunner().invoke(app, arguments, input="".join(line + "\n" for line in lines))
        assert result.exit_code == 0, result.output
        return result.stdout.removesuffix("\n").split("\n") if result.stdout else [], result.stderr

    return run


def test_chat_talks_to_a_server(
    talk: Callable[..., tuple[list[str], str]], engine: SyncEngine, client: Client, tmp_path: Path
) -> None:
    vector = SteeringVector({1: torch.randn(64, generator=torch.Generator().manual_seed(1))})
    client.upload_vector("up", vector)
    file, six = tmp_path / "rows.safetensors", Sampling(max_tokens=6)
    said, notes = talk(
        *("hello", "again", "/clear", "/steer up@1 5", "hello", "/steer up@9 5", "/clear", "/unsteer"),
        *("/capture 77", "/capture 2", "hello", f"/save {file}"),
    )
    client.delete_vector("up")
    first = engine.chat([{"role": "user", "content": "hello"}], six).text
    history = [("user", "hello"), ("assistant", first), ("user", "again")]
    second = engine.chat([{"role": role, "content": text} for role, text in history], six).text
    steered = engine.chat([{"role": "user", "content": "hello"}], six, steer=vector.add(5.0)).text
    assert said == [first, second, steered, first]
    assert "layer 77 is out of range" in notes
    assert "the vector has no layers [9]" in notes
    from steerscope import load_rows

    assert load_rows(file)[2].shape[1] == 64


def test_chat_with_a_server_takes_files_and_refuses_what_is_the_servers(
    talk: Callable[..., tuple[list[str], str]], engine: SyncEngine, server: Live, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from steerscope import save_vector
    from steerscope.cli.main import app

    file = tmp_path / "own.safetensors"
    save_vector(SteeringVector({1: torch.randn(64, generator=torch.Generator().manual_seed(2))}), file)
    said, _ = talk("hello", flags=("--steer", f"{file}:5"))
    steer = load_vector(file).add(5.0)
    assert said == [engine.chat([{"role": "user", "content": "hello"}], Sampling(max_tokens=6), steer=steer).text]
    for arguments, what in (
        (["chat"], "MODEL: is missing"),
        (["chat", "--server", server.url, "--device", "cpu"], "cannot be combined with --server"),
        (["chat", "--server", "http://127.0.0.1:9"], "there is no server at"),
    ):
        result = CliRunner().invoke(app, arguments, input="hello\n")
        assert result.exit_code == 2
        assert what in result.stderr


@pytest.mark.parametrize("choice", [{"index": "m", "text": "Hi"}, {"index": 0, "text": 5}, {"index": True, "text": ""}])
def test_a_chunk_whose_choices_have_no_number_or_no_text_is_one_clear_error(choice: dict[str, object]) -> None:
    stream = Gathered()
    with pytest.raises(ServerError, match="was not understood"):
        stream.read(ServerEvent(json.dumps({"id": "c", "model": "m", "choices": [choice]})))
    assert stream.answer().choices == ()
