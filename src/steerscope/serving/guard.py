"""Before every route: a request id, authentication, limits on bodies, and one line in the log.

It is plain ASGI, and chunks of a stream bypass it. A connection is only used again when the whole body was read. A
route may answer without having read it: then a small rest is read and dropped, and for a large one the answer says
`Connection: close`.
"""

import asyncio
import contextlib
import hmac
import logging
import random
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steerscope.serving.errors import ApiError, api_error
from steerscope.serving.settings import is_loopback
from steerscope.serving.state import Serving
from steerscope.specs.errors import SteerscopeError

log = logging.getLogger("steerscope.serving")
_OPEN = ("/health", "/ready", "/")  # need no key: they show nothing of requests or vectors
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(?::[0-9]*)?")
_BODIES = 4  # limit on all bodies of unanswered requests, in bodies of the largest allowed size
# a rest up to this is dropped, if it arrives in this time
_SMALL_BYTES = 64 << 10
_SMALL_S = 1.0
# dropped of a larger one while the client reads the answer
_LINGER_BYTES = 16 << 20
_LINGER_S = 1.0
_UPLOAD_TIMES = 10  # an upload may take this many times as long as another body
# The page needs no more than this; plotly writes style elements of its own. No other page may frame it.
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
_HEADERS = [
    (b"content-security-policy", (_POLICY + "form-action 'self'; frame-ancestors 'none'").encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
]


class Exchange:
    """One request and its answer: its body is limited in size and time, and every answer gets the same headers."""

    def __init__(
        self, receive: Receive, send: Send, headers: Mapping[bytes, str], max_bytes: int, seconds: float
    ) -> None:
        self.request_id = headers.get(b"x-request-id", "")
        if not _ID.fullmatch(self.request_id):
            self.request_id = f"{random.getrandbits(64):016x}"  # a name, not a secret
        self._read_bytes = 0  # of the body
        self.status = 0
        self.ended: float | None = None  # when all of the answer was sent
        self._receive = receive
        self._send = send
        length = headers.get(b"content-length", "0")
        self._length = int(length) if length.isdecimal() else 0
        self._waits_for_continue = headers.get(b"expect", "").lower() == "100-continue"
        self._complete = not self._length and b"transfer-encoding" not in headers
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._closes = False

    def check(self, size: int | None = None) -> None:
        """Refuse a body of this size, or of the size that its head tells."""
        if (self._length if size is None else size) > self._max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_bytes} bytes", "body_too_large")

    async def receive(self) -> Message:
        """Return the next message for the app. Raises ApiError beyond a limit."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._next()
        except TimeoutError:
            what = f"the body did not arrive within {self._seconds:g} s"
            raise ApiError(408, what, "body_timeout", headers={"Connection": "close"}) from None
        self.check(self._read_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, whose headers say whether the connection can be used again."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode()), *_HEADERS]
            self._closes = any(name.lower() == b"connection" and value == b"close" for name, value in headers)
            if not self._closes and not await self._drop_small_rest():
                self._closes = True
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        elif not message.get("more_body", False):
            self.ended = time.perf_counter()
            if self._closes:
                await self._send({**message, "more_body": True})
                # A client may read its answer only when it has sent everything, and one whose connection is closed on
                # unread bytes may lose the answer.
                await self._drop(_LINGER_BYTES, _LINGER_S)
                message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _drop_small_rest(self) -> bool:
        """Read and drop the rest of the body if it is small. Returns whether nothing is left."""
        large = self._length - self._read_bytes > _SMALL_BYTES
        if not large and (self._read_bytes or not self._waits_for_continue):
            await self._drop(_SMALL_BYTES, _SMALL_S)
        return self._complete

    async def _drop(self, max_bytes: int, seconds: float) -> None:
        until = self._read_bytes + max_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._complete and self._read_bytes <= until:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._read_bytes += len(message.get("body", b""))
        return message


class Guard:
    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app = app
        self.serving = serving
        settings = serving.settings
        self._key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._max_held = _BODIES * max(settings.max_body_bytes, settings.max_upload_bytes)
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        exchange = self._exchange(scope, receive, send, headers)
        state = scope.setdefault("state", {})
        state["request_id"] = exchange.request_id
        state["body_bytes"] = 0
        state["send"] = send  # for chunks of a stream, which need no middleware
        began = time.perf_counter()

        async def receive_held() -> Message:
            message = await exchange.receive()
            self._hold(state, len(message.get("body", b"")))
            return message

        try:
            self._authenticate(scope, headers)
            exchange.check()
            await self.app(scope, receive_held, exchange.send)
        except Exception as error:
            if not isinstance(error, SteerscopeError):
                log.error("unexpected", exc_info=error, extra={"request_id": exchange.request_id})
            if exchange.status:
                raise
            found = api_error(error)
            state["error"] = found.name
            await found.response()(scope, receive, exchange.send)
        finally:
            self._held -= state["body_bytes"]
            self._record(scope, exchange.status, (exchange.ended or time.perf_counter()) - began)

    def _exchange(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, str]) -> Exchange:
        settings = self.serving.settings
        if scope["path"] == "/v1/vectors":
            seconds = settings.body_timeout_s * _UPLOAD_TIMES
            return Exchange(receive, send, headers, settings.max_upload_bytes, seconds)
        return Exchange(receive, send, headers, settings.max_body_bytes, settings.body_timeout_s)

    def _authenticate(self, scope: Scope, headers: dict[bytes, str]) -> None:
        path = scope["path"]
        if self._key is None:
            self._check_local(headers)
        elif path not in _OPEN and not path.startswith("/ui/") and scope["method"] != "OPTIONS":
            kind, _, given = headers.get(b"authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                what = "the API key is missing or wrong: send it as Authorization: Bearer …"
                raise ApiError(401, what, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_local(self, headers: dict[bytes, str]) -> None:
        """Without a key, refuse requests of other web pages in this machine's browser: those that use another name for
        the address, and those from another origin."""
        host = headers.get(b"host", "")
        if host and not is_loopback(_hostname(host)):
            raise ApiError(403, f"without an API key this server answers on loopback only, not as {host!r:.100}")
        origin = headers.get(b"origin")
        if origin and origin not in self.serving.settings.cors_origins and urlsplit(origin).netloc != host:
            raise ApiError(403, "this origin may not use the server: start it with --cors-origin or an API key")

    def _hold(self, state: dict[str, Any], size: int) -> None:
        """Count bytes of a body until its request is answered."""
        state["body_bytes"] += size
        self._held += size
        if self._held > self._max_held:
            what = f"requests of {self._max_held} bytes are being answered: try again later"
            raise ApiError(429, what, "bodies_full", retry_after=5)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        """Count and log the request."""
        state = scope["state"]
        path = scope["path"]
        metrics = self.serving.metrics
        route = getattr(scope.get("route"), "path", "other")  # clients can make up any number of paths
        metrics.requests.labels(route, str(status)).inc()
        if status >= 400 or "error" in state:  # the error of a stream comes after its headers
            metrics.rejected.labels(str(state.get("error", status))).inc()
        if "left" in state:
            metrics.cancelled.inc()
        about = {key: state[key] for key in ("request_id", "error", "left", "tokens") if key in state}
        about |= {"method": scope["method"], "path": path, "status": status, "ms": round(seconds * 1e3, 1)}
        quiet = path in ("/health", "/ready", "/metrics") or path.startswith("/ui/")
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra=about)


def _hostname(host: str) -> str:
    """Return the host without its port, or "" for anything that is not a host."""
    found = _HOST.fullmatch(host)
    return found[1] if found else ""
