"""What `steerscope chat` gets its answers from: an engine in this process, or a server.

Both check the steering and the capture of the next answers at once against the model.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import typer

import steerscope as ss
from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.client import Answer, Client
    from steerscope.engines.sync import SyncEngine

Messages = list[dict[str, str]]
_TRIAL: Messages = [{"role": "user", "content": "."}]
_ONE_TOKEN = ss.Sampling(max_tokens=1)


@dataclass(frozen=True)
class ShownAnswer:
    """An answer that has been shown."""

    text: str
    note: str
    rows: "ss.Rows | None"


class Partner(Protocol):
    @property
    def vectors(self) -> Sequence[str]:
        """Names of vectors that need no file."""
        ...

    def steer(self, steering: "ss.Steering") -> None: ...

    def capture(self, wanted: "ss.Capture | None") -> None: ...

    def answer(self, messages: Messages) -> ShownAnswer: ...


class EnginePartner:
    """An engine in this process."""

    vectors: Sequence[str] = ()

    def __init__(self, engine: "SyncEngine", sampling: "ss.Sampling") -> None:
        self._engine, self._sampling = engine, sampling
        self._wanted: ss.Capture | None = None

    def steer(self, steering: "ss.Steering") -> None:
        self._engine.default_steering = steering  # refuses what does not fit the model

    def capture(self, wanted: "ss.Capture | None") -> None:
        from steerscope.engines.plan import Planner, Prompt

        Planner(self._engine.facts, {}).plan("check", Prompt([0]), _ONE_TOKEN, ss.Steering(), wanted)
        self._wanted = wanted

    def answer(self, messages: Messages) -> ShownAnswer:
        events = self._engine.stream_chat(messages, self._sampling, capture=self._wanted, request_id=o.REQUEST)
        done = o.print_text(self._engine, events)
        return ShownAnswer(done.text, o.speed(done), done.rows if done.capture else None)


class ServerPartner:
    """A server. Steering and captures are tried with a request of one token before they are kept."""

    def __init__(self, client: "Client", sampling: "ss.Sampling", vectors: Sequence[str]) -> None:
        self._client, self._sampling, self.vectors = client, sampling, vectors
        self._steering = ss.Steering()
        self._wanted: ss.Capture | None = None

    def steer(self, steering: "ss.Steering") -> None:
        if steering.ops:
            self._client.chat(_TRIAL, _ONE_TOKEN, steer=steering)
        self._steering = steering

    def capture(self, wanted: "ss.Capture | None") -> None:
        if wanted is not None:
            tried = self._client.chat(_TRIAL, _ONE_TOKEN, capture=wanted)
            if tried.capture is not None:
                self._client.forget(tried.capture)
        self._wanted = wanted

    def answer(self, messages: Messages) -> ShownAnswer:
        from steerscope.client import Answer

        began = time.perf_counter()
        text = ""
        count = 0
        answer: Answer | None = None
        pieces = self._client.stream_chat(messages, self._sampling, steer=self._steering, capture=self._wanted)
        try:
            for piece in pieces:
                if isinstance(piece, Answer):
                    answer = piece
                    break
                typer.echo(piece.text, nl=False)
                text += piece.text
                count += len(piece.tokens)
        except KeyboardInterrupt:  # closing the stream ends the request; the text so far is the answer
            pass
        finally:
            pieces.close()
        typer.echo()
        seconds = time.perf_counter() - began
        reason = answer.finish_reason if answer else "cancelled"
        return ShownAnswer(text, o.speed_of(count, seconds, reason), self._rows(answer))

    def _rows(self, answer: "Answer | None") -> "ss.Rows | None":
        if answer is None or answer.capture is None:
            return None
        rows = self._client.rows(answer.capture)
        self._client.forget(answer.capture)
        return rows
