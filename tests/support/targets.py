"""Whom the requests go to: an engine in this process, or a server on this machine."""

import asyncio
import contextlib
import ipaddress
import json
import time
from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import urlsplit

import httpx

from steerscope.capture.handle import CaptureHandle
from steerscope.client import AsyncClient, ServerError
from steerscope.client.answers import answer_of
from steerscope.client.calls import Options, completion_body
from steerscope.engines.api import Engine
from steerscope.engines.results import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.specs.errors import InvalidRequest, Problem
from support.ledger import Outcome
from support.workload import Request

_REST_S = 30.0


class Target(ABC):
    """`run` gives the choices, or None when the client left; what is refused raises InvalidRequest."""

    delivered = 0  # bytes of rows that clients have had in hand
    held = 0  # and those of handles that are still open
    piped = False  # each stage of a pipeline has a block of its own, and a handle keeps the room of the longest text

    @abstractmethod
    async def run(self, request: Request, name: str) -> list[Outcome] | None: ...

    @abstractmethod
    async def let_go(self) -> None:
        """Close the handles that are open."""

    @abstractmethod
    async def stats(self) -> dict[str, float]:
        """running, waiting, capture_bytes, capture_reserved, capture_released and more."""

    def balanced(self, stats: dict[str, float]) -> bool:
        """Open handles hold memory, and nothing else does."""
        return stats["capture_bytes"] == self.held or (self.piped and 0 < self.held < stats["capture_bytes"])

    async def rest(self) -> dict[str, float]:
        """The stats once nothing runs and only open handles hold memory; whatever they are when that does not come."""
        deadline = time.monotonic() + _REST_S
        while True:
            found = await self.stats()
            if not (found["running"] or found["waiting"]) and self.balanced(found):
                return found
            if time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.05)

    def _received(self, rows: Any, open_: bool) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in rows.tensors.values())
        self.delivered += size
        self.held += size if open_ else 0


class EngineTarget(Target):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.piped = not engine.facts.switches  # rules cannot switch across the stages of a pipeline
        self._open: list[CaptureHandle] = []

    async def run(self, request: Request, name: str) -> list[Outcome] | None:
        asked: Any = {"steer": request.steer, "capture": request.capture, "watch": request.watch}
        prompt = TokenPrompt(request.prompt)
        if not request.streamed:
            return self._taken(request, await self.engine.generate(prompt, request.sampling, **asked))
        seen: dict[int, list[int]] = {}
        events = self.engine.stream(prompt, request.sampling, request_id=name, **asked)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, EndEvent):
                    found = self._taken(request, event.generation)
                    for i, one in enumerate(found):
                        one.streamed = seen.get(i, [])
                    return found
                if isinstance(event, TokenEvent):
                    seen.setdefault(event.choice, []).append(event.token_id)
                    if request.end and request.end[1] == sum(map(len, seen.values())):
                        if request.end[0] == "leave":
                            return None
                        self.engine.cancel(name)
        raise AssertionError("a stream ended without its end")

    def _taken(self, request: Request, done: Generation) -> list[Outcome]:
        found = Outcome.of(done, fetch=request.keep != "unread")
        for one, choice in zip(found, done.choices, strict=True):
            if choice.capture is None:
                continue
            if one.rows is not None:
                self._received(one.rows, request.keep == "open")
            if request.keep == "open":
                self._open.append(choice.capture)
            else:
                choice.capture.close()
        return found

    async def let_go(self) -> None:
        for handle in self._open:
            handle.close()
        self._open, self.held = [], 0

    async def stats(self) -> dict[str, float]:
        return await asyncio.to_thread(self.engine.stats)


class ServerTarget(Target):
    """Whole answers carry log probabilities and how exactly they ended; streams are for clients that leave early
    and for greedy texts."""

    def __init__(self, url: str) -> None:
        check_loopback(url)
        self.client = AsyncClient(url)
        self._http = httpx.AsyncClient(base_url=url)

    async def run(self, request: Request, name: str) -> list[Outcome] | None:
        del name
        options: Options = {"steer": request.steer, "capture": request.capture, "watch": request.watch}
        if request.end is None or request.end[0] == "kill":
            return await self._whole(request, completion_body(request.prompt, request.sampling, options))
        seen = 0
        stream = self.client.stream(request.prompt, request.sampling, **options)
        async with contextlib.aclosing(stream):
            async for piece in stream:
                seen += len(getattr(piece, "tokens", ()))
                if seen >= request.end[1]:
                    return None
        return None  # it was over before anybody wanted to leave

    async def _whole(self, request: Request, body: dict[str, Any]) -> list[Outcome]:
        answer = await self.client.post("/v1/completions", body)
        found = []
        for choice, read in zip(answer["choices"], answer_of(answer).choices, strict=True):
            ours, told = choice["steerscope"], choice.get("logprobs") or {}
            ids = [token["id"] for token in ours["tokens"]]
            found.append(
                Outcome(
                    token_ids=ids,
                    reason=ours["finish"]["reason"],
                    stop_string=ours["finish"]["stop_string"],
                    rule=ours["finish"]["rule"],
                    logprobs=list(zip(ids, told.get("token_logprobs", ()), strict=False)),
                    readings=[
                        (r["position"], [(c["id"], c["score"]) for c in r["top"]]) for r in ours.get("readings", ())
                    ],
                    firings=[(f["name"], f["action"], f["position"]) for f in ours.get("rules", ())],
                )
            )
            if read.capture is not None:
                await self._fetch(request, read.capture.id, found[-1])
        return found

    async def _fetch(self, request: Request, name: str, found: Outcome) -> None:
        if request.keep != "unread":
            found.rows = await self.client.rows(name)
            self._received(found.rows, False)
        await self.client.forget(name)

    async def let_go(self) -> None:
        """None is left open: a client that is killed while its answer is on the way leaves rows without a name,
        and only their time to live ends them. `rest` waits for that."""

    async def stats(self) -> dict[str, float]:
        text = (await self._http.get("/metrics")).text
        lines = [line.split() for line in text.splitlines() if line.startswith("steerscope_") and "{" not in line]
        found = {name.removeprefix("steerscope_").removesuffix("_total"): float(value) for name, value in lines}
        words = {"running": "engine_running", "waiting": "engine_waiting", "capture_bytes": "capture_bytes"}
        words |= {"capture_reserved": "capture_reserved_bytes", "capture_released": "capture_released_bytes"}
        return {ours: found[theirs] for ours, theirs in words.items()}


def refused(error: BaseException) -> bool:
    """The request itself was wrong, and was refused before anything ran."""
    return isinstance(error, InvalidRequest) or (isinstance(error, ServerError) and error.status == 400)


def check_loopback(url: str) -> None:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost":
        what = f"{json.dumps(host)} is not this machine"
        raise InvalidRequest([Problem("url", what, "stress only servers at 127.0.0.1, ::1 or localhost")])
