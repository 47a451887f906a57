"""A typed client of `steerscope serve`, synchronous and asynchronous.

Requests and method names are those of the engines. torch is imported only for rows and vectors.
"""

from steerscope.client.answers import CaptureRef, JobEvent, JobRef, ServerError, Token, Usage
from steerscope.client.answers import ServerAnswer as Answer
from steerscope.client.answers import ServerChoice as Choice
from steerscope.client.answers import ServerConcept as Concept
from steerscope.client.answers import ServerFiring as Firing
from steerscope.client.answers import ServerReading as Reading
from steerscope.client.answers import StreamPiece as Piece
from steerscope.client.clients import AsyncClient, Client

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
