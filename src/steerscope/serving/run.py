"""Serve an app with uvicorn: SIGTERM and Ctrl-C drain and stop it, a second Ctrl-C ends it at once.

uvicorn itself waits forever for a client that opens a connection and sends nothing, or half a request. It also reads
and drops the whole body of a request that was answered before its end. Answers that pass the guard say whether the
connection stays open; after any other one the connection of a client that still sends is closed, after a moment for
reading the answer.
"""

import asyncio
import contextlib
import math
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from steerscope.serving.state import Serving

HEADER_BYTES = 64 << 10
_MOMENT_S = 1.0
_GOODBYE_S = 5  # for errors to clients whose requests were cut off


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the size of headers and on the time they may take to arrive."""

    head_s = 20.0
    _deadline: asyncio.TimerHandle | None = None
    _size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._size = 0
        self._expect()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._arrived()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        if cycle is not None and cycle is self.cycle and cycle.response_complete and cycle.more_body:
            self._unset_keepalive_if_required()
            self.flow.pause_reading()
            self.loop.call_later(_MOMENT_S, self.transport.close)

    def _expect(self) -> None:
        self._arrived()
        self._deadline = self.loop.call_later(self.head_s, self.transport.close)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")


class Server(uvicorn.Server):
    """uvicorn's server; sets `draining` when it begins to stop, and stops when the engine cannot be started again."""

    def __init__(self, app: FastAPI) -> None:
        self.serving: Serving = app.state.serving
        settings = self.serving.settings
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=type("Protocol", (Protocol,), {"head_s": settings.head_timeout_s}),
                log_config=None,
                access_log=False,
                ws="none",
                timeout_graceful_shutdown=math.ceil(settings.drain_s) + _GOODBYE_S,
                server_header=False,
            )
        )
        self.serving.on_failure = self._end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.serving.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.serving.draining = True
        late = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        late.cancel()
        self._captured_signals.clear()  # uvicorn would raise them once more, and the process end as if killed

    async def _cut_off(self) -> None:
        """End the requests that still run after the drain time with an error, instead of a broken connection."""
        await asyncio.sleep(self.serving.settings.drain_s)
        await self.serving.cut_off()

    def _end(self) -> None:
        self.should_exit = True

    @property
    def address(self) -> str:
        """The address it listens on, once it does."""
        bound: tuple = self.servers[0].sockets[0].getsockname()
        host = f"[{bound[0]}]" if self.servers[0].sockets[0].family == socket.AF_INET6 else bound[0]
        return f"http://{host}:{bound[1]}"


def serve_app(app: FastAPI) -> None:
    """Block until the server ends; raise the error that ended it, if any."""
    _raise_file_limit()
    server = Server(app)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if server.serving.failure is not None:
        raise server.serving.failure


def _raise_file_limit() -> None:
    """Allow as many open files as the system permits: each connection is one, and the default is often 1,024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
