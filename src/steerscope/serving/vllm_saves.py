"""Reports on `save_as` in the answers of vLLM's own server: which rows were saved, and whether a name is in use.

vLLM's answers have no field for it, so a middleware adds it: `steerscope.captures` in a JSON answer, or an event of its
own before the end of a stream. Only this last piece waits for the files. Other answers pass unchanged.
"""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steerscope.capture.reserved import ReservedFile
from steerscope.engines.vllm.client.stock_frontend import SAVES, Saves
from steerscope.serving.errors import api_error
from steerscope.specs.errors import SaveFailed

_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'


class SaveReports:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        saves = Saves()
        token = SAVES.set(saves)
        try:
            await self.app(scope, receive, ReportingSend(saves, send))
        finally:
            SAVES.reset(token)


class ReportingSend:
    """The `send` of one request, which adds the report to its answer."""

    def __init__(self, saves: Saves, send: Send) -> None:
        self._saves = saves
        self._send = send
        self._start: Message | None = None  # of a JSON answer, held until its body is whole
        self._body = b""
        self._reported = False

    async def __call__(self, message: Message) -> None:
        saves = self._saves
        kind = message["type"]
        if not (saves.files or saves.refused):
            await self._send(message)
        elif kind == "http.response.start" and _is_json(message):
            self._start = message
        elif kind == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_json(self._start)
        elif kind == "http.response.body":
            await self._send_event(message)
        else:
            await self._send(message)

    async def _send_json(self, start: Message) -> None:
        body = self._body.rstrip()
        if self._saves.refused and start["status"] == 400:
            refusal = api_error(self._saves.refused)
            start = {**start, "status": refusal.status}
            body = refusal.json().encode()
        elif start["status"] == 200 and body.endswith(b"}"):
            body = body[:-1] + b',"steerscope":' + json.dumps(await self._report()).encode() + b"}"
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _send_event(self, message: Message) -> None:
        """Send a piece of a stream, with the report before its end."""
        body = message.get("body", b"")
        if self._saves.refused and body.startswith(_ERROR):
            body = f"data: {api_error(self._saves.refused).json(with_status=True)}\n\n".encode()
        ends = body.startswith(_DONE) or b"\n" + _DONE in body or not message.get("more_body")
        if self._saves.files and not self._saves.refused and ends and not self._reported:
            self._reported = True
            event = {**_head(self._body), "choices": [], "steerscope": await self._report()}
            at = body.rfind(_DONE) if _DONE in body else len(body)
            body = body[:at] + f"data: {json.dumps(event)}\n\n".encode() + body[at:]
        elif b'"choices"' in body:
            self._body = body
        await self._send({**message, "body": body})

    async def _report(self) -> dict[str, object]:
        return {"captures": [await _about(file) for file in self._saves.files]}


async def _about(file: ReservedFile) -> dict[str, object]:
    try:
        if not file.writing:  # no thread will write it: its text ended with an error
            file.release()
        await asyncio.wrap_future(file.saved)
    except SaveFailed as error:
        return {"id": file.name, "saved": False, "error": str(error)}
    return {"id": file.name, "saved": True}


def _is_json(start: Message) -> bool:
    return any(name.lower() == b"content-type" and b"json" in value for name, value in start["headers"])


def _head(last: bytes) -> dict[str, Any]:
    """Return the fields that all events of a stream share, from one of them."""
    try:
        found = json.loads(last.strip().rpartition(b"data: ")[2])
        return {name: found[name] for name in ("id", "object", "created", "model")}
    except (ValueError, LookupError, TypeError):
        return {}
