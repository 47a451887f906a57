"""A real HTTP server in place of a model behind an OpenAI-compatible endpoint."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = Callable[[int, dict], tuple[int, object]]


@contextmanager
def endpoint(reply: Reply) -> Iterator[tuple[str, list[dict]]]:
    """`reply` is given the number of the request and its body."""
    seen: list[dict] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
                number = len(seen)
            status, content = reply(number, body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client may have timed out
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def says(text: str, **more: object) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], **more}
