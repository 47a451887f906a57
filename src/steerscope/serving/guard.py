"""Before every route: a request id, who may come in, how much they may send, and one line in the log.

It is plain ASGI, and chunks of a stream pass by it.
"""

import functools
import hmac
import logging
import random
import re
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steerscope.serving.errors import ApiError, api_error
from steerscope.serving.request_body import RequestBody
from steerscope.serving.settings import is_loopback
from steerscope.serving.state import Serving
from steerscope.specs.errors import SteerscopeError

log = logging.getLogger("steerscope.serving")
_OPEN = ("/health", "/ready", "/")  # without a key: nothing about requests or vectors is told there
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(?::[0-9]*)?")
_BODIES = 4  # all bodies of requests that are not answered yet are so many times the largest one at most
# The page needs no more than this; plotly writes style elements of its own. Nobody may show it inside another page.
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
_HEADERS = [
    (b"content-security-policy", (_POLICY + "form-action 'self'; frame-ancestors 'none'").encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
]
_UPLOAD_SECONDS = 10  # an upload may take so many times as long as another body


class _Answer:
    """The answer on its way out, with headers of every answer; it says whether the connection can be used again."""

    def __init__(self, send: Send, body: RequestBody, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._body, self._headers = send, body, headers
        self.status = 0
        self.ended = 0.0  # on the clock, when all of it was sent
        self._closes = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self._headers]
            self._closes = any(name.lower() == b"connection" and value == b"close" for name, value in headers)
            if not self._closes and not await self._body.dropped():
                self._closes = True
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        elif not message.get("more_body", False):
            self.ended = time.perf_counter()
            if self._closes:
                await self._send({**message, "more_body": True})
                await self._body.linger()
                message = {"type": "http.response.body", "body": b""}
        await self._send(message)


class Guard:
    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app, self.serving = app, serving
        key = serving.settings.api_key
        self._key = key.get_secret_value().encode() if key else None
        settings = serving.settings
        self._most_held = _BODIES * max(settings.max_body_bytes, settings.max_upload_bytes)
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        request_id = (
            given if _ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        )  # a name, not a secret: no system call
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["body_bytes"] = 0
        state["send"] = send  # for chunks of a stream, which need nothing of what lies between here and there
        body = RequestBody(receive, headers, functools.partial(self._hold, state))
        answer = _Answer(send, body, [(b"x-request-id", request_id.encode()), *_HEADERS])
        began = time.perf_counter()
        try:
            self._let_in(scope, headers)
            self._limit(scope, body)
            await self.app(scope, body.receive, answer.send)
        except Exception as error:
            if not isinstance(error, SteerscopeError):
                log.error("unexpected", exc_info=error, extra={"request_id": request_id})
            if answer.status:
                raise
            found = api_error(error)
            state["error"] = found.code or str(found.status)
            await found.response()(scope, receive, answer.send)
        finally:
            self._held -= state["body_bytes"]
            self._tell(scope, answer.status, (answer.ended or time.perf_counter()) - began)

    def _let_in(self, scope: Scope, headers: dict[bytes, str]) -> None:
        path = scope["path"]
        if self._key is None:
            self._check_local(headers)
        elif path not in _OPEN and not path.startswith("/ui/") and scope["method"] != "OPTIONS":
            kind, _, given = headers.get(b"authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                what = "the API key is missing or wrong: send it as Authorization: Bearer …"
                raise ApiError(401, what, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_local(self, headers: dict[bytes, str]) -> None:
        """Without a key, a web page that somebody looks at on this machine must not reach the server through it: not
        under another name for the address, and not from another origin."""
        host = headers.get(b"host", "")
        if host and not is_loopback(_hostname(host)):
            raise ApiError(403, f"without an API key this server answers on loopback only, not as {host!r:.100}")
        origin = headers.get(b"origin")
        if origin and origin not in self.serving.settings.cors_origins and urlsplit(origin).netloc != host:
            raise ApiError(403, "this origin may not use the server: start it with --cors-origin or an API key")

    def _limit(self, scope: Scope, body: RequestBody) -> None:
        """No body is longer, or takes longer to arrive, than it may."""
        settings = self.serving.settings
        upload = scope["path"] == "/v1/vectors"
        most = settings.max_upload_bytes if upload else settings.max_body_bytes
        body.limit(most, settings.body_timeout_s * (_UPLOAD_SECONDS if upload else 1))

    def _hold(self, state: dict[str, Any], size: int) -> None:
        """Count bytes of a body until its request is answered."""
        state["body_bytes"] += size
        self._held += size
        if self._held > self._most_held:
            what = f"requests of {self._most_held} bytes are being answered: try again later"
            raise ApiError(429, what, "bodies_full", retry_after=5)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        state, metrics = scope["state"], self.serving.metrics
        route = getattr(scope.get("route"), "path", "other")  # not the path itself: a client can think up any number
        metrics.requests.labels(route, str(status)).inc()
        if status >= 400 or "error" in state:  # of a stream, the error came after its headers
            metrics.rejected.labels(str(state.get("error", status))).inc()
        if "left" in state:
            metrics.cancelled.inc()
        about = {key: state[key] for key in ("error", "left", "tokens") if key in state}
        about |= {"method": scope["method"], "path": scope["path"], "status": status, "ms": round(seconds * 1e3, 1)}
        quiet = scope["path"] in ("/health", "/ready", "/metrics") or scope["path"].startswith("/ui/")
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"request_id": state["request_id"], **about})


def _hostname(host: str) -> str:
    """Without the port; what has anything else behind a colon is the name of nothing."""
    found = _HOST.fullmatch(host)
    return found[1] if found else ""
