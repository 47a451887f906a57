"""The body of one request as it arrives, limited in size and time.

A connection is only used again when the whole body was read. A route may answer without having read it: then a small
rest is read and dropped, and for a large one the answer says `Connection: close`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from starlette.types import Message, Receive

from steerscope.serving.errors import ApiError

CLOSE = {"Connection": "close"}
_SMALL_BYTES, _SMALL_S = 64 << 10, 1.0  # a rest up to this is dropped, if it arrives in this time
_LINGER_BYTES, _LINGER_S = 16 << 20, 1.0  # dropped of a larger one while the client reads the answer


class RequestBody:
    def __init__(self, receive: Receive, headers: Mapping[bytes, str], hold: Callable[[int], None]) -> None:
        """`hold` is called with the size of each part before it is passed on, and may refuse it."""
        self._receive, self._hold = receive, hold
        length = headers.get(b"content-length", "0")
        self._length = int(length) if length.isdecimal() else 0
        self._waits_for_continue = headers.get(b"expect", "").lower() == "100-continue"
        self._complete = not self._length and b"transfer-encoding" not in headers
        self._read = 0
        self._max_bytes = 0
        self._seconds = 0.0
        self._deadline = 0.0

    def limit(self, max_bytes: int, seconds: float) -> None:
        """Limit the bytes, and the seconds from now in which they must arrive."""
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        if self._length > max_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next message for the app. Raises ApiError beyond a limit."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._next()
        except TimeoutError:
            what = f"the body did not arrive within {self._seconds:g} s"
            raise ApiError(408, what, "body_timeout", headers=CLOSE) from None
        if self._read > self._max_bytes:
            raise self._too_large()
        self._hold(len(message.get("body", b"")))
        return message

    async def dropped(self) -> bool:
        """Read and drop the rest if it is small. Returns whether nothing is left."""
        if self._length - self._read > _SMALL_BYTES or (self._waits_for_continue and not self._read):
            return self._complete
        await self._drop(_SMALL_BYTES, _SMALL_S)
        return self._complete

    async def linger(self) -> None:
        """Read and drop for a moment: a client may read its answer only when it has sent everything, and one whose
        connection is closed on unread bytes may lose the answer."""
        await self._drop(_LINGER_BYTES, _LINGER_S)

    async def _drop(self, max_bytes: int, seconds: float) -> None:
        until = self._read + max_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._complete and self._read <= until:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._read += len(message.get("body", b""))
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", "body_too_large")
