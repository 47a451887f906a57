"""64 streaming clients at once on a real model, each with another steering, capture or watch: every one gets exactly
what it gets alone. Then half of them are killed in mid-stream, and the other half notice nothing."""

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from lenses import packs
from serving.live import Live, live
from steerscope import load_engine
from steerscope.client import Answer, AsyncClient, Piece
from steerscope.client.calls import Options
from steerscope.engines.results import Generation
from steerscope.specs import Ablate, Add, Capture, Sampling, Steering, Watch
from steerscope.specs.watch import flag, when
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow

COUNT = 64
TOKENS = 6
TOPICS = ("rain", "bread", "a long war", "the sea", "my sister", "mathematics", "a red door", "winter")


@dataclass(frozen=True)
class Request:
    prompt: str
    sampling: Sampling
    options: Options


def requests() -> list[Request]:
    """Another prompt, direction, strength, capture and watch for each."""
    rng, found = np.random.default_rng(7), []
    for i in range(COUNT):
        direction = rng.standard_normal(576).astype(np.float32)
        direction /= np.linalg.norm(direction)
        layer = int(rng.integers(4, 26))
        ops = (
            Add(vector=direction, scale=float(rng.uniform(5, 30)), layers=layer),
            Ablate(vector=direction, layers=f"{layer - 2}-{layer}"),
        )
        options = Options()
        if i % 4 != 0:
            options["steer"] = Steering.of(*(ops if i % 3 == 0 else ops[i % 2 : i % 2 + 1]))
        if i % 2:
            options["capture"] = Capture(
                layers=[layer, int(rng.integers(0, 30))], tokens=("all", "generated")[i % 4 // 2]
            )
        if i % 5 < 2:
            rules = [when("c1.3", above=0.3).then(flag("three"))] if i % 5 else []
            options["watch"] = Watch(pack="moods", top_k=1 + i % 4, rules=rules)
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=i)
        found.append(Request(f"{i}. Some words about {TOPICS[i % len(TOPICS)]}:" + " and" * (i % 7), sampling, options))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("packs") / "moods"
    packs.make([3, 6], hidden=576).save(folder)

    def start():  # type: ignore[no-untyped-def]
        return load_engine("smollm2-135m", max_batch=COUNT, dtype="float32")

    with live(start, lenses=(str(folder),), any_model=True) as found:
        yield found


@pytest.fixture(scope="module")
def alone(server: Live) -> list[Generation]:
    """Each request by itself, through the engine."""

    async def run() -> list[Generation]:
        return [await server.engine.generate(one.prompt, one.sampling, **one.options) for one in requests()]  # type: ignore[misc]

    return asyncio.run(run())


def same(answer: Answer, truth: Generation) -> bool:
    found = (answer.text, answer.token_ids, [r.position for r in answer.readings], [f.position for f in answer.firings])
    true = (truth.text, truth.token_ids, [r.position for r in truth.readings], [f.position for f in truth.firings])
    scores = all(
        [c.id for c in mine.concepts] == [c.id for c in theirs.concepts]
        and np.allclose([c.score for c in mine.concepts], [c.probability for c in theirs.concepts], atol=1e-3)
        for mine, theirs in zip(answer.readings, truth.readings, strict=True)
    )
    return found == true and scores


async def stream(client: AsyncClient, one: Request, kill_after: int | None = None) -> Answer | None:
    """The answer, or None where the client was killed on the way."""
    pieces = client.stream(one.prompt, one.sampling, **one.options)
    count = 0
    async for piece in pieces:
        if isinstance(piece, Answer):
            return piece
        assert isinstance(piece, Piece)
        count += len(piece.tokens)
        if kill_after is not None and count >= kill_after:
            await pieces.aclose()
            return None
    raise AssertionError("it ended without an answer")


async def check_rows(client: AsyncClient, answer: Answer, truth: Generation) -> None:
    assert answer.capture is not None
    rows = await client.rows(answer.capture)
    await client.forget(answer.capture)
    assert set(rows) == set(truth.rows)
    for key in truth.rows:
        difference = torch.linalg.vector_norm(rows[key] - truth.rows[key], dim=-1)
        size = torch.linalg.vector_norm(truth.rows[key], dim=-1)
        assert float((difference / size).max()) < 1e-3  # rows of different requests differ by far more
    assert rows.labels.position.tolist() == truth.rows.labels.position.tolist()


def at_rest(server: Live, alone: list[Generation]) -> bool:
    held = sum(one.capture._held.size for one in alone if one.capture is not None)  # what this test itself keeps
    deadline = time.monotonic() + HUNG_S
    while server.engine.budget.used != held and time.monotonic() < deadline:
        time.sleep(0.05)
    return server.idle(HUNG_S) and server.engine.budget.used == held and not len(server.serving.captures)


@pytest.mark.long
@pytest.mark.smollm
def test_every_client_gets_what_it_gets_alone(server: Live, alone: list[Generation]) -> None:
    async def run() -> None:
        async with AsyncClient(server.url) as client:
            answers = await asyncio.gather(*(stream(client, one) for one in requests()))
            for one, answer, truth in zip(requests(), answers, alone, strict=True):
                assert answer is not None
                assert same(answer, truth), one.prompt
                if "capture" in one.options:
                    await check_rows(client, answer, truth)

    asyncio.run(run())
    assert len({one.text for one in alone}) > COUNT * 3 // 4, "the requests do not differ enough to tell cross-talk"
    assert at_rest(server, alone)


@pytest.mark.long
@pytest.mark.smollm
def test_half_are_killed_and_the_rest_are_untouched(server: Live, alone: list[Generation]) -> None:
    before = server.engine.stats()

    async def run() -> list[Answer | None]:
        async with AsyncClient(server.url) as client:
            deaths = itertools.cycle((1, None, 2, None))
            answers = await asyncio.gather(*(stream(client, one, next(deaths)) for one in requests()))
            for one, answer, truth in zip(requests(), answers, alone, strict=True):
                assert answer is None or same(answer, truth), one.prompt
                if answer is not None and "capture" in one.options:
                    await check_rows(client, answer, truth)
            return list(answers)

    answers = asyncio.run(run())
    assert answers.count(None) == COUNT // 2
    assert at_rest(server, alone)
    made = server.engine.stats()["tokens"] - before["tokens"]
    assert made < COUNT * TOKENS, f"{made} tokens: the work of closed streams went on"
    assert Path("/proc/self/fd").is_dir()
    assert len(os.listdir("/proc/self/fd")) < 200, "connections were not closed"
