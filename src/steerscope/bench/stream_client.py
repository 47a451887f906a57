"""Many streams to one server, in a process of their own and with as little work as can be, so that what is measured is
the server. A line of JSON on stdin starts a round; its times come back as a line on stdout.

    {"host": "127.0.0.1", "port": 8000, "bodies": ["…", "…"]}
"""

import asyncio
import json
import sys
import time
from typing import Any

PATH = "/v1/completions"


async def stream(host: str, port: int, body: str) -> tuple[float, int]:
    """When its first token came, and how many tokens the server says there were."""
    reader, writer = await asyncio.open_connection(host, port)
    data = body.encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    first, received = 0.0, []
    while block := await reader.read(1 << 16):
        if not first and b"data: " in block:
            first = time.perf_counter()
        received.append(block)
    writer.close()
    whole = b"".join(received)
    if b"data: [DONE]" not in whole:
        raise RuntimeError(whole[:2000].decode(errors="replace"))
    used = whole[whole.rindex(b'"completion_tokens"') :].split(b":", 1)[1].lstrip()
    return first, int(used.split(b",")[0].split(b"}")[0])


async def play(host: str, port: int, bodies: list[str]) -> dict[str, Any]:
    start = time.perf_counter()
    found = await asyncio.gather(*(stream(host, port, body) for body in bodies))
    total = time.perf_counter() - start
    firsts = sorted(first - start for first, _ in found)
    return {
        "first_token_s": firsts[len(firsts) // 2],
        "last_first_token_s": firsts[-1],
        "total_s": total,
        "tokens": [count for _, count in found],
    }


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.write(json.dumps(asyncio.run(play(**asked))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
