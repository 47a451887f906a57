"""The limits of docs/security.md that no other test holds: how many of what a client may ask for or leave behind."""

from collections.abc import Iterator

import httpx
import pytest
import safetensors.torch
import torch

from serving.live import Live, live
from steerscope.serving import jobs

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


def test_no_more_jobs_than_may_be_are_unfinished(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_JOBS", 0)
    server.app.state.jobs._jobs.clear()
    refused = httpx.post(f"{server.url}/v1/jobs", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "10"
