"""Captured rows that wait to be fetched: an id, a time to live, and the bytes of their file, made while they are sent.

Their bytes are the engine's capture budget until they are dropped and nobody is being sent them: a server that is full
refuses new captures, it does not drop old ones before their time.
"""

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from functools import cached_property

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.row_file import RowFile
from steerscope.capture.rows import Rows
from steerscope.serving.access import serving_of
from steerscope.serving.errors import ApiError
from steerscope.serving.sse import Watched

router = APIRouter()
_ID = re.compile(r"cap-[0-9a-f]{32}")
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})", re.ASCII)


@dataclass
class Kept:
    id: str
    handle: CaptureHandle
    rows: Rows
    until: float  # on the monotonic clock: one that is set must not drop rows, nor keep them
    readers: int = 0
    dropped: bool = False

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.rows.tensors.values())

    def about(self) -> dict[str, object]:
        rows = self.rows
        found: dict[str, object] = {"id": self.id, "rows": rows.n, "bytes": self.bytes, "layers": list(rows.layers)}
        expires = int(time.time() + self.until - time.monotonic())
        return {**found, "sites": list(rows.sites), "reduce": rows.reduce, "expires": expires}

    @cached_property
    def file(self) -> RowFile:
        return self.rows.file()

    def drop(self) -> None:
        """Give the room back, or let the last reader do it."""
        self.dropped = True
        if not self.readers:
            self.handle.close("the capture was dropped")


class Captures:
    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self._kept.values())

    def keep(self, handle: CaptureHandle) -> Kept:
        self.sweep()
        name = f"cap-{secrets.token_hex(16)}"  # who knows it may fetch it: it cannot be guessed
        kept = Kept(name, handle, handle.fetch(), time.monotonic() + self.ttl_s)
        self._kept[name] = kept
        return kept

    def get(self, name: str) -> Kept:
        self.sweep()
        found = self._kept.get(name) if _ID.fullmatch(name) else None
        if found is None:
            what = f"there is no capture {name!r:.60}: it was deleted, or fetched later than {self.ttl_s:g} s"
            raise ApiError(404, what, "capture_gone")
        return found

    def delete(self, name: str) -> None:
        self.get(name)
        self._kept.pop(name).drop()

    def sweep(self) -> None:
        """Drop what has lived long enough. They were kept in the order of their time."""
        now = time.monotonic()
        for kept in list(self._kept.values()):
            if kept.until > now:
                break
            del self._kept[kept.id]
            kept.drop()

    def close(self) -> None:
        for kept in self._kept.values():
            kept.drop()
        self._kept = {}


class _Rows(Watched):
    """The bytes of a capture's file, or a range of them."""

    def __init__(self, kept: Kept, asked: str | None, stall_s: float) -> None:
        super().__init__(stall_s)
        self.kept = kept
        size = kept.file.size
        found = _range(asked, size)
        self.status_code, (self.start, self.stop) = (200, (0, size)) if found is None else (206, found)
        self.headers_sent = [
            (b"content-type", b"application/octet-stream"),
            (b"content-disposition", f'attachment; filename="{kept.id}.safetensors"'.encode()),
            (b"content-length", str(self.stop - self.start).encode()),
            (b"accept-ranges", b"bytes"),
        ]
        if found is not None:
            self.headers_sent.append((b"content-range", f"bytes {self.start}-{self.stop - 1}/{size}".encode()))

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        self.kept.readers += 1
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.headers_sent})
            if scope["method"] != "HEAD":
                for piece in self.kept.file.pieces(self.start, self.stop):
                    await self._send(send, {"type": "http.response.body", "body": piece, "more_body": True})
                    await asyncio.sleep(0)  # a fast reader must not hold up the tokens of others
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.kept.readers -= 1
            if self.kept.dropped:
                self.kept.drop()


def _range(asked: str | None, size: int) -> tuple[int, int] | None:
    """The one range of bytes that was asked for. None, which is all of them, for anything but one range."""
    found = _RANGE.fullmatch(asked or "")
    if found is None or not (found[1] or found[2]):
        return None
    if found[1]:
        start, stop = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        if found[2] and int(found[2]) < start:
            return None
    else:
        start, stop = max(0, size - int(found[2])), size
    if start >= size:
        what = f"the file has {size} bytes: ask for a range within them"
        raise ApiError(416, what, "range_not_satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, stop


@router.head("/v1/captures/{capture_id}", include_in_schema=False)
@router.get("/v1/captures/{capture_id}")
async def fetch(request: Request, capture_id: str) -> Response:
    """The rows as a safetensors file: `layer.{i}.{site}` and `label.*`. One range of bytes is served."""
    serving = serving_of(request)
    return _Rows(serving.captures.get(capture_id), request.headers.get("range"), serving.settings.stall_s)


@router.get("/v1/captures/{capture_id}/labels")
async def labels(request: Request, capture_id: str) -> Response:
    """What each row is, as columns."""
    kept = serving_of(request).captures.get(capture_id)
    found = kept.rows.labels
    messages = found.message.tolist()
    columns = {
        "position": found.position.tolist(),
        "token_id": found.token_id.tolist(),
        "phase": ["generated" if made else "prompt" for made in found.generated.tolist()],
        "message": [None if message < 0 else message for message in messages],
        "role": [None if message < 0 else found.roles[message] for message in messages],
    }
    return JSONResponse({**kept.about(), "model": kept.rows.model, "request": found.request, "labels": columns})


@router.delete("/v1/captures/{capture_id}")
async def delete(request: Request, capture_id: str) -> Response:
    serving_of(request).captures.delete(capture_id)
    return JSONResponse({"id": capture_id, "object": "capture", "deleted": True})
