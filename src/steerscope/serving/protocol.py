"""uvicorn's HTTP protocol with limits on the size of headers and on the time they may take to arrive.

uvicorn itself waits forever for a client that opens a connection and sends nothing, or half a request. It also reads
and drops the whole body of a request that was answered before its end. Answers that pass the guard say whether the
connection stays open; after any other one the connection of a client that still sends is closed, after a moment for
reading the answer.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_S, HEADER_BYTES = 20.0, 64 << 10
_MOMENT_S = 1.0


class Protocol(HttpToolsProtocol):
    head_s = HEADER_S
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


def with_timeout(head_s: float) -> type[Protocol]:
    """Return a protocol whose headers may take `head_s` seconds to arrive."""
    return type("Protocol", (Protocol,), {"head_s": head_s})
