"""What answers of vLLM's server say about saved rows, with an application that answers as vLLM's does."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

from capture.test_handle import make
from steerscope.capture.reserved import ReservedFile
from steerscope.engines.vllm.client.stock_frontend import SAVES
from steerscope.serving.vllm_saves import SaveReports
from steerscope.specs.errors import NameInUse

HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
WHOLE = json.dumps({**HEAD, "choices": [{"text": "}{ \u00e9"}]}).encode()
EVENTS = [f"data: {json.dumps({**HEAD, 'choices': [{'text': t}]})}\n\n".encode() for t in "ab"]
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "no", "code": 400}}\n\n'


def post(folder: Path, stream: bool, *saves: str) -> httpx.Response:
    """A file is saved, fails because another program writes it, or belongs to a text that ends with an error."""
    app = FastAPI()
    app.add_middleware(SaveReports)
    threads = ThreadPoolExecutor(1)

    def run() -> None:
        known = SAVES.get()
        assert known is not None
        for i, what in enumerate(saves):
            try:
                file = ReservedFile(folder / f"{what}-{i}.safetensors")
            except NameInUse as error:
                known.refused = error
                raise
            known.files.append(file)
            if what == "fails":
                file.path.write_bytes(b"theirs")
            if what != "ends":
                file.write_in(threads, threads.submit(make).result())

    @app.post("/v1/completions")
    async def complete() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                run()
                for event in EVENTS:
                    yield event
            except NameInUse:
                yield ERROR
            yield DONE

        if stream:
            return StreamingResponse(pieces(), media_type="text/event-stream")
        try:
            run()
        except NameInUse:
            return Response(b'{"error": {"code": 400}}', 400, media_type="application/json")
        cuts = sorted(random.Random(len(saves)).sample(range(len(WHOLE)), 3))
        parts = [WHOLE[a:b] for a, b in zip([0, *cuts], [*cuts, len(WHOLE)], strict=True)]
        headers = {"content-length": str(len(WHOLE))}
        return StreamingResponse(iter(parts), 200, headers, media_type="application/json")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions")

    return asyncio.run(ask())


def test_answers_without_saves_pass_byte_for_byte(tmp_path: Path) -> None:
    for stream, wanted in ((False, WHOLE), (True, b"".join(EVENTS) + DONE)):
        answer = post(tmp_path, stream)
        assert (answer.status_code, answer.content) == (200, wanted)


def test_each_save_is_told_in_order_and_the_text_is_as_it_was(tmp_path: Path) -> None:
    saves = ["good", "fails", "ends", "good"]
    for stream in (False, True):
        folder = tmp_path / str(stream)
        folder.mkdir()
        answer = post(folder, stream, *saves)
        assert answer.status_code == 200
        body = answer.content
        if stream:
            start, end = b"".join(EVENTS), DONE
            assert (body[: len(start)], body[-len(end) :]) == (start, end)
            told = json.loads(body[len(start) : -len(end)].removeprefix(b"data: "))
            assert {name: told[name] for name in HEAD} == HEAD
            assert told["choices"] == []
        else:
            told = answer.json()
            assert {**told, "steerscope": None} == {**json.loads(WHOLE), "steerscope": None}
        captures = told["steerscope"]["captures"]
        assert [(one["id"], one["saved"]) for one in captures] == [
            (f"{what}-{i}", what == "good") for i, what in enumerate(saves)
        ]
        assert "exists" in captures[1]["error"]
        assert "did not end" in captures[2]["error"]
        assert str(tmp_path) not in json.dumps(told)


def test_a_name_in_use_is_a_conflict(tmp_path: Path) -> None:
    for stream in (False, True):
        held = ReservedFile(tmp_path / "good-0.safetensors")
        answer = post(tmp_path, stream, "good")
        held.release()
        if stream:
            assert answer.content.endswith(b"\n\n" + DONE)
            error = json.loads(answer.content.partition(b"\n\n")[0].removeprefix(b"data: "))["error"]
            assert error["status"] == 409
        else:
            assert answer.status_code == 409
            error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("name_in_use", "save_as")
        assert "'good-0' is in use" in error["message"]
