"""Answers that stop when the client leaves: a stream of server-sent events, or one body that takes a while to make.

Both watch the connection while they work. When the client disconnects, or leaves data unread for too long, the work is
cancelled, and with it the requests in the engine, which end between two steps.
"""

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from steerscope.serving.errors import api_error
from steerscope.specs.errors import SteerscopeError

log = logging.getLogger("steerscope.serving")
DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class WatchedResponse(Response):
    """An answer that is cancelled when the client disconnects or leaves data unread for too long."""

    def __init__(self, stall_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.cancelled():
                scope["state"]["left"] = True
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    @abstractmethod
    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            raise asyncio.CancelledError("the client does not read") from None


async def _disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(WatchedResponse):
    """Chunks of an async generator, each sent as it comes, behind headers that are sent at once.

    An error that is raised without waiting (a full queue, a capture beyond the whole budget) is an ordinary answer.
    Any later one is the last event but `[DONE]`, with its status in the event.
    """

    def __init__(self, chunks: Callable[[], AsyncGenerator[bytes]], stall_s: float) -> None:
        super().__init__(stall_s)
        self._chunks = chunks

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        async with contextlib.aclosing(self._chunks()) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            try:
                await asyncio.sleep(0)  # the generator runs until it waits for something
                if first.done():
                    first.result()
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                await self._pass_on(first, chunks, scope, scope["state"].get("send", send))
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _pass_on(
        self, first: asyncio.Future[bytes], chunks: AsyncGenerator[bytes], scope: Scope, send: Send
    ) -> None:
        last = DONE
        try:
            await self._send(send, {"type": "http.response.body", "body": await first, "more_body": True})
            async for chunk in chunks:
                await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            shown = api_error(error)
            scope["state"]["error"] = shown.name
            if not isinstance(error, SteerscopeError):
                log.error("unexpected", exc_info=error, extra={"request_id": scope["state"].get("request_id")})
            last = b"data: " + shown.json(with_status=True).encode() + b"\n\n" + DONE
        await self._send(send, {"type": "http.response.body", "body": last})


class WholeResponse(WatchedResponse):
    """One JSON body, made while the connection is watched."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], stall_s: float) -> None:
        super().__init__(stall_s)
        self._make = make

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        body = await self._make()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, {"type": "http.response.body", "body": body})
