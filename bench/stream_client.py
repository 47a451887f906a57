"""Clients of many streams to one server, in a process of their own, with as little work per event as possible.

A line of JSON on stdin starts a round; its times are written as a line to stdout.

    {"host": "127.0.0.1", "port": 8000, "bodies": ["…", "…"]}
"""

import json
import selectors
import socket
import sys
import time
from typing import Any

PATH = "/v1/completions"
EVENT = b'data: {"'  # headers name the scheme data:, too
NAP = 0.004  # seconds between reads, so that this process does not wake for every write


def play(host: str, port: int, bodies: list[str]) -> dict[str, Any]:
    """Receive all streams in one loop over readable sockets; asyncio would cost more than the server."""
    received: dict[socket.socket, list[bytes]] = {}
    firsts: dict[socket.socket, float] = {}
    ends: list[float] = []
    start = time.perf_counter()
    with selectors.DefaultSelector() as waiting:
        for body in bodies:
            one = socket.create_connection((host, port))
            one.sendall(_request(host, port, body.encode()))
            waiting.register(one, selectors.EVENT_READ)
            received[one] = []
        while waiting.get_map():
            ready = waiting.select()
            now = time.perf_counter() - start  # of all that came meanwhile
            for key, _ in ready:
                one: Any = key.fileobj
                block = one.recv(1 << 16)
                received[one].append(block)
                if one not in firsts and EVENT in block:
                    firsts[one] = now
                if not block:
                    ends.append(now)
                    waiting.unregister(one)
                    one.close()
            time.sleep(NAP)
    total = time.perf_counter() - start
    tokens = [_tokens(b"".join(blocks)) for blocks in received.values()]
    times = sorted(firsts.values())
    return {
        "first_token_s": times[len(times) // 2],
        "last_first_token_s": times[-1],
        "first_tokens_s": times,
        "first_end_s": min(ends),
        "total_s": total,
        "tokens": tokens,
    }


def _request(host: str, port: int, data: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


def _tokens(whole: bytes) -> int:
    """Return the number of tokens that the server reports."""
    if b"data: [DONE]" not in whole:
        raise RuntimeError(whole[:2000].decode(errors="replace"))
    used = whole[whole.rindex(b'"completion_tokens"') :].split(b":", 1)[1].lstrip()
    return int(used.split(b",")[0].split(b"}")[0])


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.write(json.dumps(play(**asked)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
