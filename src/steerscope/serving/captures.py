"""Captured rows that wait to be fetched: an id, a time to live, and the bytes of their file, made while they are sent.

Rows count in the engine's capture budget until they are dropped and no download of them runs. A full server refuses
new captures; it does not drop old ones before their time.
"""

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from functools import cached_property

from starlette.types import Receive, Scope, Send

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import RowFile, Rows
from steerscope.serving.errors import ApiError
from steerscope.serving.sse import WatchedResponse

_ID = re.compile(r"cap-[0-9a-f]{32}")
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})", re.ASCII)


@dataclass
class StoredCapture:
    id: str
    handle: CaptureHandle
    rows: Rows
    until: float  # on the monotonic clock, which setting the system's clock does not change
    readers: int = 0
    dropped: bool = False

    def about(self) -> dict[str, object]:
        rows = self.rows
        return {
            "id": self.id,
            "rows": rows.n,
            "bytes": sum(tensor.nbytes for tensor in rows.tensors.values()),
            "layers": list(rows.layers),
            "sites": list(rows.sites),
            "reduce": rows.reduce,
            "expires": int(time.time() + self.until - time.monotonic()),
        }

    @cached_property
    def file(self) -> RowFile:
        return self.rows.file()

    def drop(self) -> None:
        """Free the rows now, or when the last download ends."""
        self.dropped = True
        if not self.readers:
            self.handle.close("the capture was dropped")


class Captures:
    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._kept: dict[str, StoredCapture] = {}  # in the order of their time

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, handle: CaptureHandle) -> StoredCapture:
        self.sweep()
        name = f"cap-{secrets.token_hex(16)}"  # knowing it is the right to fetch it: it cannot be guessed
        capture = StoredCapture(name, handle, handle.fetch(), time.monotonic() + self.ttl_s)
        self._kept[name] = capture
        return capture

    def get(self, name: str) -> StoredCapture:
        self.sweep()
        found = self._kept.get(name) if _ID.fullmatch(name) else None
        if found is None:
            what = f"there is no capture {name!r:.60}: it was deleted, or has expired after {self.ttl_s:g} s"
            raise ApiError(404, what, "capture_gone")
        return found

    def delete(self, name: str) -> None:
        self.get(name)
        self._kept.pop(name).drop()

    def sweep(self) -> None:
        """Drop what has expired."""
        now = time.monotonic()
        for capture in list(self._kept.values()):
            if capture.until > now:
                break
            del self._kept[capture.id]
            capture.drop()

    def close(self) -> None:
        for capture in self._kept.values():
            capture.drop()
        self._kept = {}


class RowsResponse(WatchedResponse):
    """The bytes of a capture's file, or a range of them."""

    def __init__(self, capture: StoredCapture, asked_range: str | None, stall_s: float) -> None:
        super().__init__(stall_s)
        self._capture = capture
        size = capture.file.size
        found = _range(asked_range, size)
        self._start, self._stop = found or (0, size)
        headers = {
            "content-disposition": f'attachment; filename="{capture.id}.safetensors"',
            "content-length": str(self._stop - self._start),
            "accept-ranges": "bytes",
        }
        if found is not None:
            self.status_code = 206
            headers["content-range"] = f"bytes {self._start}-{self._stop - 1}/{size}"
        self.media_type = "application/octet-stream"
        self.init_headers(headers)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        capture = self._capture
        capture.readers += 1
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                for piece in capture.file.pieces(self._start, self._stop):
                    await self._send(send, {"type": "http.response.body", "body": piece, "more_body": True})
                    await asyncio.sleep(0)  # a fast reader must not hold up the tokens of others
            await send({"type": "http.response.body", "body": b""})
        finally:
            capture.readers -= 1
            if capture.dropped:
                capture.drop()


def _range(asked: str | None, size: int) -> tuple[int, int] | None:
    """Return the one range of bytes that was asked for, or None, which is all of them, for anything else."""
    found = _RANGE.fullmatch(asked or "")
    if found is None or found[0] == "bytes=-":
        return None
    first, last = (int(part) if part else None for part in found.groups())
    if first is None:  # the last bytes
        start = max(0, size - (last or 0))
        stop = size
    else:
        start = first
        stop = size if last is None else min(size, last + 1)
    if last is not None and first is not None and last < first:
        return None
    if start >= size:
        what = f"the file has {size} bytes: ask for a range within them"
        raise ApiError(416, what, "range_not_satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, stop
