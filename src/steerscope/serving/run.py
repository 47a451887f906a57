"""Serve an app with uvicorn: SIGTERM and Ctrl-C drain and stop it, a second Ctrl-C ends it at once."""

import asyncio
import contextlib
import importlib.util
import math
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from steerscope.serving.state import Serving

_GOODBYE_S = 5  # for errors to clients whose requests were cut off


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
                http=_protocol(settings.head_timeout_s),  # type: ignore[arg-type]
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


def _protocol(head_s: float) -> object:
    """Return ours, or where httptools is missing uvicorn's own, which has no limit on headers."""
    if importlib.util.find_spec("httptools") is None:
        return "auto"
    from steerscope.serving.protocol import with_timeout

    return with_timeout(head_s)


def _raise_file_limit() -> None:
    """Allow as many open files as the system permits: each connection is one, and the default is often 1,024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
