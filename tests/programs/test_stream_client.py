"""The client that measures streams."""

import socket
import threading
import time

from bench.stream_client import play

PAUSE_S = 0.3
HEADERS = b"HTTP/1.1 200 OK\r\ncontent-security-policy: img-src data: blob:\r\nconnection: close\r\n\r\n"
EVENTS = b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n'


def serve_one(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(HEADERS)
        time.sleep(PAUSE_S)
        connection.sendall(EVENTS[0])
        connection.sendall(EVENTS[1])


def test_the_first_token_is_the_first_event_and_not_the_headers_before_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve_one, args=(listening,))
        server.start()
        found = play("127.0.0.1", listening.getsockname()[1], ["{}"])
        server.join()
    assert found["tokens"] == [1]
    assert found["first_token_s"] >= PAUSE_S
