"""Clients that ask for everything at once, all different; `soak` sends them to a server."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from steerscope.capture.rows import Rows
from steerscope.client import Answer, AsyncClient, Piece
from steerscope.client.calls import Options
from steerscope.extraction.personas.definitions import load_personas
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering, Watch
from steerscope.specs.watch import flag, steer, stop, when
from steerscope.vectors.vector import SteeringVector
from support.targets import refused

LAYER, HIDDEN, PACK = 15, 576, "soak"  # SmolLM2-135M's width, and a layer in its middle
KINDS = ("plain", "steered", "captured", "reduced", "unread", "watched", "ruled", "left", "job", "vector", "mistaken")
CANARY_S, _PAUSE_S = 60.0, 2.0
_NEAR = 1e-3  # rows (relative L2) and scores of the same question, in other company


@dataclass
class Record:
    """What was seen, in seconds since the load began."""

    began: float = field(default_factory=time.monotonic)
    requests: "Counter[str]" = field(default_factory=Counter)
    tokens: int = 0
    firsts: list[tuple[float, float]] = field(default_factory=list)  # when, and how long the first token took
    gaps: list[tuple[float, float]] = field(default_factory=list)  # and the others of that stream, on average
    canaries: int = 0
    wrong: list[str] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.began


def vector(seed: int) -> SteeringVector:
    return SteeringVector({LAYER: torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))})


def _asks(kind: str, scale: float) -> Options:
    """Of the vectors `held` and `other`, which the server must know, and the pack."""
    ops = Steering(ops=(Add(vector="held", scale=scale), Cap(vector="held", max=4.0), Ablate(vector="other")))
    rules = (
        when("0.0", above=0.6).then(flag("seen")),
        when("1.1", above=0.7).then(steer(Add(vector="held", scale=1.0), name="more", off_below=0.2, off_for=2)),
        when("1.2", above=0.9, for_tokens=3).then(stop("enough")),
    )
    found: dict[str, Options] = {
        "steered": {"steer": ops},
        "captured": {"capture": Capture(layers=(4, LAYER)), "steer": ops},
        "reduced": {"capture": Capture(reduce="mean")},
        "unread": {"capture": Capture(tokens="generated")},
        "left": {"capture": Capture(), "watch": Watch(pack=PACK)},
        "watched": {"watch": Watch(pack=PACK, top_k=5)},
        "ruled": {"watch": Watch(pack=PACK, top_k=3, rules=rules), "steer": ops},
    }
    return found.get(kind, {})


@dataclass
class Found:
    """The answer to a question that is asked again and again."""

    text: str
    rows: Rows | None
    scores: list[dict[str, float]]

    def differs(self, first: "Found") -> str | None:
        if self.text != first.text:
            return f"{self.text!r} instead of {first.text!r}"
        if first.rows is not None:
            assert self.rows is not None
            for key, rows in first.rows.items():
                if not (error := float((self.rows[key] - rows).norm() / rows.norm())) < _NEAR:
                    return f"rows of {key} are {error:.1e} away"
        for now, was in zip(self.scores, first.scores, strict=True):
            if any(abs(now.get(concept, score) - score) > _NEAR for concept, score in was.items()):
                return f"scores {now} instead of {was}"
        return None


class Clients:
    def __init__(self, url: str, record: Record) -> None:
        self.client, self.record = AsyncClient(url), record
        self.questions = [question for one in load_personas("traits", ["all"]) for question in one.questions]
        self._first: dict[str, Found] = {}

    async def run(self, number: int, until: float) -> None:
        rng = np.random.default_rng(number)
        while time.monotonic() < until:
            kind = str(rng.choice(KINDS))
            with self._telling(kind):
                await self._one(kind, rng)
            self.record.requests[kind] += 1
            await asyncio.sleep(float(rng.uniform(0, _PAUSE_S)))

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Faults are reported at the end; the other tasks go on."""
        try:
            yield
        except Exception as error:
            self.record.wrong.append(f"{self.record.now():.0f} s, {what}: {type(error).__name__}: {error}")

    async def _one(self, kind: str, rng: np.random.Generator) -> None:
        question, seed = self.questions[int(rng.integers(len(self.questions)))], int(rng.integers(1 << 30))
        sampling = Sampling(max_tokens=int(rng.integers(4, 33)), temperature=float(rng.integers(2)), seed=seed)
        if kind == "mistaken":
            await self._mistaken(question, sampling)
        elif kind == "vector":
            name = f"passing-{seed}"
            await self.client.upload_vector(name, vector(seed))
            await self._streamed(question, sampling, {"steer": Add(vector=name, scale=2)})
            await self.client.delete_vector(name)
        elif kind == "job":
            job = await self.client.start_job([{"role": "user", "content": question}], sampling)
            names = [event.name async for event in self.client.job_events(job)]
            assert names[-1] == "end", names
        else:
            answer = await self._streamed(question, sampling, _asks(kind, float(rng.uniform(-3, 3))), kind == "left")
            if answer is not None and answer.capture is not None and kind != "unread":
                rows = await self.client.rows(answer.capture)
                assert rows.n == answer.capture.rows
                await self.client.forget(answer.capture)

    async def _mistaken(self, question: str, sampling: Sampling) -> None:
        try:
            await self.client.generate(question, sampling, steer=Add(vector="nobody has this", scale=1))
        except Exception as error:
            if not refused(error):
                raise
        else:
            raise AssertionError("was not refused")

    async def _streamed(
        self, question: str, sampling: Sampling, options: Options, leave: bool = False
    ) -> Answer | None:
        began, times, answer = time.monotonic(), [], None
        async with contextlib.aclosing(self.client.stream(question, sampling, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Piece):
                    times += [time.monotonic() - began] * len(piece.tokens)
                    self.record.tokens += len(piece.tokens)
                    if leave and len(times) > 1:
                        return None
                else:
                    answer = piece
        if times:
            self.record.firsts.append((self.record.now(), times[0]))
        if len(times) > 1:
            self.record.gaps.append((self.record.now(), (times[-1] - times[0]) / (len(times) - 1)))
        return answer

    async def canaries(self, until: float) -> None:
        """The same four questions again and again, amid the load; each answer must be the first one."""
        while time.monotonic() < until:
            for name in ("plain", "steered", "captured", "watched"):
                with self._telling(f"the {name} question"):
                    found = await self._found(name)
                    self.record.canaries += 1
                    if problem := found.differs(self._first.setdefault(name, found)):
                        raise AssertionError(problem)
            await asyncio.sleep(min(CANARY_S, max(0.0, until - time.monotonic())))

    async def _found(self, name: str) -> Found:
        asked = _asks(name, 2.0)
        answer = await self.client.generate("The weather today is", Sampling(max_tokens=12, temperature=0), **asked)
        rows = None if answer.capture is None else await self.client.rows(answer.capture)
        return Found(answer.text, rows, [{c.id: c.score for c in one.concepts} for one in answer.readings])
