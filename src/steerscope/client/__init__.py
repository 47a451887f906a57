"""A small typed client of `steerscope serve`, with and without await.

    import steerscope as ss

    with ss.Client("http://127.0.0.1:8000") as client:
        client.upload_vector("happy", "happy.safetensors")
        answer = client.chat(
            [{"role": "user", "content": "How was your week?"}],
            ss.Sampling(max_tokens=40),
            steer=ss.Add(vector="happy", scale=6, layers="10-14"),
            capture=ss.Capture(layers=12),
        )
        print(answer.text, client.rows(answer.capture))

The requests are those of the engines, and so are the names of the methods. Nothing here imports torch until rows or
vectors are in hand.
"""

from steerscope.client.answers import (
    Answer,
    CaptureRef,
    Choice,
    Concept,
    Firing,
    Piece,
    Reading,
    ServerError,
    Token,
    Usage,
)
from steerscope.client.asynchronous import AsyncClient
from steerscope.client.jobs import JobEvent, JobRef
from steerscope.client.synchronous import Client

__all__ = [
    "Answer",
    "AsyncClient",
    "CaptureRef",
    "Choice",
    "Client",
    "Concept",
    "Firing",
    "JobEvent",
    "JobRef",
    "Piece",
    "Reading",
    "ServerError",
    "Token",
    "Usage",
]
