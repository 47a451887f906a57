"""The limits of docs/security.md that no other test holds: how many of what a client may ask for or leave behind."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
import safetensors.torch
import torch

from lenses import packs
from serving.live import Live, live
from steerscope import SteeringVector, flag, when
from steerscope.client import Client
from steerscope.serving import jobs
from steerscope.specs import Watch
from support.waiting import HUNG_S

ASK = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        yield found


@pytest.mark.parametrize(
    ("more", "path", "field"),
    [
        ({"n": 129}, "/v1/completions", "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "/v1/completions", "stop"),
        ({"prompt": ["a"] * 129}, "/v1/completions", "prompt"),
        ({"logprobs": 21}, "/v1/completions", "logprobs"),
        ({"steerscope": {"project": ["v"] * 65}}, "/v1/completions", "steerscope.project"),
        ({"steerscope": {"watch": {"pack": "x", "top_k": 257}}}, "/v1/completions", "steerscope.watch.top_k"),
        ({"max_tokens": 10**12}, "/v1/completions", "max_tokens"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": "a"}], "top_logprobs": 21},
            "/v1/chat",
            "top_logprobs",
        ),
    ],
)
def test_what_a_request_may_ask_for_is_bounded(server: Live, more: dict[str, object], path: str, field: str) -> None:
    body = {name: value for name, value in {**ASK, **more}.items() if value is not None}
    if path == "/v1/chat":
        path, body["logprobs"] = "/v1/chat/completions", True
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 400
    assert field in {problem["param"] for problem in answer.json()["error"]["problems"]}


def test_no_more_vectors_than_may_be_are_kept() -> None:
    data = safetensors.torch.save({"shared": torch.ones(64)})
    with live(max_vectors=2) as server:
        found = [httpx.post(f"{server.url}/v1/vectors?name={name}", content=data).status_code for name in "abcb"]
        assert found == [201, 201, 400, 200]
        assert [one["id"] for one in httpx.get(f"{server.url}/v1/vectors").json()["data"]] == ["a", "b"]


def test_a_job_that_tells_too_much_is_ended(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_BYTES", 300)
    job = httpx.post(f"{server.url}/v1/jobs", json={**ASK, "max_tokens": 50, "ignore_eos": True}).json()["job_id"]
    told = httpx.get(f"{server.url}/v1/jobs/{job}/stream").text
    assert "job_too_large" in told
    assert told.count("event: token") < 10
    assert server.idle()


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a lens pack and a vector, so that a job can have events of every kind."""
    folder = tmp_path_factory.mktemp("packs") / "moods"
    packs.make([3, 6], hidden=64).save(folder)
    with live(lenses=(str(folder),), any_model=True) as found, Client(found.url) as client:
        client.upload_vector("v", SteeringVector({i: torch.ones(64) for i in range(4)}))
        yield found


def tells_much(server: Live) -> dict[str, object]:
    """A request whose `started` and `end` are long, with a rule that fires."""
    concept = httpx.get(f"{server.url}/v1/lenses/moods").json()["concepts"][0]["id"]
    watch = Watch(pack="moods", rules=[when(concept, above=0.01).then(flag("seen"))])
    asked = {"project": "v", "prompt": "prompt", "watch": watch.model_dump(mode="json", exclude_none=True)}
    return {"prompt": "one two three " * 8, "max_tokens": 60, "ignore_eos": True, "steerscope": asked}


def followed(server: Live, body: dict[str, object]) -> tuple[str, int, str]:
    """A job's id, the size of its request, and all that its stream told."""
    data = json.dumps(body).encode()
    job = httpx.post(f"{server.url}/v1/jobs", content=data).json()["job_id"]
    with httpx.stream("GET", f"{server.url}/v1/jobs/{job}/stream", timeout=HUNG_S) as answer:
        told = answer.read().decode()
    return job, len(data), told.removeprefix(": listening\n\n").removesuffix("data: [DONE]\n\n")


def test_a_job_is_counted_with_every_event_it_keeps(telling: Live) -> None:
    kept = telling.app.state.jobs
    before = kept.held
    job, asked, told = followed(telling, tells_much(telling))
    events = {line.removeprefix("event: ") for line in told.split("\n") if line.startswith("event: ")}
    assert events >= {"started", "token", "reading", "rule", "metrics", "end"}
    assert kept.get(job).size == asked + len(told.encode())
    assert kept.held - before == kept.get(job).size
    kept.forget(job)
    assert kept.held == before


@pytest.mark.parametrize("name", ["started", "end"])
def test_a_long_event_at_either_end_of_a_job_is_counted_before_it_is_kept(
    telling: Live, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, asked, told = followed(telling, tells_much(telling))
    monkeypatch.setattr(jobs, "MOST_BYTES", asked + len(told.partition(f"event: {name}\n")[0].encode()) + 100)
    _, _, short = followed(telling, tells_much(telling))
    assert f"event: {name}\n" not in short
    assert "job_too_large" in short
    assert telling.idle()


def test_who_listens_late_is_sent_a_job_in_pieces(telling: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of all events for each listener would be memory that nothing bounds."""
    name, _, told = followed(telling, tells_much(telling))
    job = telling.app.state.jobs.get(name)
    monkeypatch.setattr(jobs, "PIECE_BYTES", 1000)

    async def listen() -> list[bytes]:
        return [piece async for piece in job.listen(0)][1:]

    pieces = asyncio.run(listen())
    assert b"".join(pieces).decode() == told
    assert max(map(len, pieces)) < 1000 + max(map(len, job.events))


def test_a_job_that_fails_where_there_is_no_room_left_says_so(telling: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, told = followed(telling, tells_much(telling))
    telling.app.state.jobs.held, held = 0, telling.app.state.jobs.held
    telling.app.state.jobs._jobs.clear()
    monkeypatch.setattr(jobs, "MOST_HELD", asked + len(told) // 2)
    _, _, short = followed(telling, tells_much(telling))
    assert held > 0
    assert '"code": "queue_full"' in short.split("event: ")[-1]


def test_no_more_jobs_than_may_be_are_unfinished(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_JOBS", 0)
    server.app.state.jobs._jobs.clear()
    refused = httpx.post(f"{server.url}/v1/jobs", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "10"
