"""Captured rows that wait to be fetched: an id, a time to live, and a file that is written when somebody asks.

Their bytes are the engine's capture budget until they are dropped: a server that is full refuses new captures, it does
not drop old ones before their time.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.serving.access import serving_of
from steerscope.serving.errors import ApiError
from steerscope.specs.errors import BadFile

router = APIRouter()
_DISK_S = 30.0  # when to come back after a write that failed
log = logging.getLogger("steerscope.serving")
_ID = re.compile(r"cap-[0-9a-f]{32}")


@dataclass
class Kept:
    id: str
    handle: CaptureHandle
    rows: Rows
    until: float  # on the monotonic clock: one that is set must not drop rows, nor keep them
    file: Path
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
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

    async def write(self) -> Path:
        async with self.writing:
            if not self.file.exists():
                try:
                    await asyncio.to_thread(self.rows.save, self.file)
                except BadFile as error:  # where it is on this machine is nobody's business
                    log.error("a capture was not written: %s", error)
                    what = "the server has no room on its disk to send these rows: they are kept, fetch them later"
                    raise ApiError(507, what, "disk_full", retry_after=_DISK_S) from None
        return self.file

    def drop(self) -> None:
        """Give the room back; the file goes when nobody reads it any more."""
        self.dropped = True
        self.handle.close("the capture was dropped")
        if not self.readers:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)


class Captures:
    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._kept: dict[str, Kept] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self._kept.values())

    def keep(self, handle: CaptureHandle) -> Kept:
        self.sweep()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="steerscope-captures-")
        name = f"cap-{secrets.token_hex(16)}"  # who knows it may fetch it: it cannot be guessed
        file = Path(self._folder.name) / f"{name}.safetensors"
        kept = Kept(name, handle, handle.fetch(), time.monotonic() + self.ttl_s, file)
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
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _File(FileResponse):
    """A file that stays until it has been sent."""

    def __init__(self, kept: Kept) -> None:
        name = f"{kept.id}.safetensors"
        super().__init__(kept.file, media_type="application/octet-stream", filename=name)
        self.kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.kept.readers -= 1
            if self.kept.dropped:
                self.kept.drop()


@router.head("/v1/captures/{capture_id}", include_in_schema=False)
@router.get("/v1/captures/{capture_id}")
async def fetch(request: Request, capture_id: str) -> Response:
    """The rows as a safetensors file: `layer.{i}.{site}` and `label.*`. Ranges are served."""
    kept = serving_of(request).captures.get(capture_id)
    kept.readers += 1
    try:
        await kept.write()
        return _File(kept)
    except BaseException:
        kept.readers -= 1
        raise


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
