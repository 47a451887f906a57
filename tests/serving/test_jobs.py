"""Jobs run with or without listeners; every event is sent once, and again from any event on."""

import json
from collections.abc import Iterator

import httpx
import pytest

from serving.live import Live, eventually, live
from steerscope.client import Client, JobEvent, ServerError
from steerscope.specs import Add, InvalidRequest, Sampling

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

CHAT = [{"role": "user", "content": "The quick brown fox"}]
LONG = Sampling(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_running=4, max_waiting=2) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def names(events: list[JobEvent]) -> list[str]:
    return [event.name for event in events]


def text(events: list[JobEvent]) -> str:
    return "".join(event.data["t"] for event in events if event.name == "token")


def test_a_job_starts_tells_its_tokens_and_ends(client: Client) -> None:
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    job = client.start_job(CHAT, sampling)
    events = list(client.job_events(job))
    told = names(events)
    assert told[0] == "started"
    assert told[-2:] == ["metrics", "end"]
    assert told.count("token") == 12
    assert [event.id for event in events] == [str(i) for i in range(len(events))]
    assert [event.data["i"] for event in events if event.name == "token"] == list(range(12))
    end = events[-1].data
    assert (end["tokens_out"], end["stop_reason"], end["stop_sequence_matched"]) == (12, "length", None)
    assert end["decode_time_ms"] >= 0
    assert text(events) == client.chat(CHAT, sampling).text
    assert events[0].data["job_id"] == job.id
    assert events[0].data["prompt_tokens"] > 0


def test_a_stop_string_is_named_and_not_told(client: Client) -> None:
    whole = client.chat(CHAT, Sampling(max_tokens=40, ignore_eos=True)).text
    stop = whole[10:14]
    events = list(client.job_events(client.start_job(CHAT, Sampling(max_tokens=40, ignore_eos=True, stop=stop))))
    assert text(events) == whole[: whole.index(stop)]
    assert events[-1].data["stop_reason"] == "stop_sequence"
    assert events[-1].data["stop_sequence_matched"] == stop


def test_a_listener_that_comes_back_is_told_the_rest_and_nothing_twice(client: Client) -> None:
    job = client.start_job(CHAT, Sampling(max_tokens=60, ignore_eos=True))
    first: list[JobEvent] = []
    for event in client.job_events(job):
        first.append(event)
        if len(first) == 9:
            break
    rest = list(client.job_events(job, after=first[-1]))
    again = list(client.job_events(job))
    assert first + rest == again
    assert names(again).count("token") == 60
    assert list(client.job_events(job, after=again[-1])) == []


def test_two_listeners_hear_the_same(client: Client) -> None:
    job = client.start_job(CHAT, Sampling(max_tokens=60, ignore_eos=True))
    one, other = client.job_events(job), client.job_events(job)
    pairs = list(zip(one, other, strict=True))
    assert all(left == right for left, right in pairs)


def test_nobody_needs_to_listen(client: Client, server: Live) -> None:
    job = client.start_job(CHAT, Sampling(max_tokens=10, ignore_eos=True))
    assert eventually(lambda: client._send("GET", f"/v1/jobs/{job.id}")["ended"])
    assert server.idle()
    assert names(list(client.job_events(job))).count("token") == 10


def test_deleting_cancels_a_running_job_and_forgets_an_ended_one(client: Client, server: Live) -> None:
    job = client.start_job(CHAT, LONG)
    events = client.job_events(job)
    while next(events).name != "token":
        pass
    client.cancel_job(job)
    rest = list(events)
    assert rest[-1].name == "end"
    assert rest[-1].data["stop_reason"] == "cancelled"
    assert rest[-1].data["tokens_out"] < 200
    assert server.idle()
    client.cancel_job(job)
    with pytest.raises(ServerError, match="there is no job"):
        next(iter(client.job_events(job)))


def test_a_job_that_waits_is_cancelled_before_it_begins_and_one_too_many_is_refused(
    client: Client, server: Live
) -> None:
    running = [client.start_job(CHAT, LONG) for _ in range(4)]
    waiting = [client.start_job(CHAT, LONG) for _ in range(2)]
    with pytest.raises(ServerError) as refused:
        client.start_job(CHAT, LONG)
    assert refused.value.status == 429
    assert refused.value.retry_after
    client.cancel_job(waiting[1])
    events = list(client.job_events(waiting[1]))
    assert names(events) == ["end"]
    assert (events[0].data["tokens_out"], events[0].data["stop_reason"]) == (0, "cancelled")
    for job in [*running, waiting[0]]:
        client.cancel_job(job)
    assert server.idle()


def test_what_a_job_cannot_do_is_refused_with_every_problem(client: Client, server: Live) -> None:
    with pytest.raises(InvalidRequest, match="a job has one answer"):
        client.start_job(CHAT, Sampling(n=2))
    body = {"prompt": ["a", "b"], "n": 2, "echo": True}
    problems = httpx.post(f"{server.url}/v1/jobs", json=body).json()["error"]["problems"]
    assert {problem["param"] for problem in problems} == {"n", "prompt", "echo"}
    empty = httpx.post(f"{server.url}/v1/jobs", json={"prompt": [], "max_tokens": 3, "n": 2}).json()["error"]
    assert {problem["param"] for problem in empty["problems"]} == {"n", "prompt"}
    with pytest.raises(InvalidRequest, match="layer 99"):
        client.start_job(CHAT, steer=Add(vector=[1.0] * 64, layers=99))


@pytest.mark.parametrize("last", ["-1", "x", "1e3", "²", "9" * 40])
def test_a_wrong_last_event_id_is_refused(client: Client, server: Live, last: str) -> None:
    job = client.start_job(CHAT, Sampling(max_tokens=2))
    headers = {"Last-Event-ID": last.encode()}
    answer = httpx.get(f"{server.url}/v1/jobs/{job.id}/stream", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["problems"][0]["param"] == "Last-Event-ID"


def test_the_stream_is_server_sent_events_with_done_at_the_end(client: Client, server: Live) -> None:
    job = client.start_job(CHAT, Sampling(max_tokens=3, ignore_eos=True))
    answer = httpx.get(f"{server.url}{job.sse_url}")
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    lines = blocks[1].split("\n")
    assert lines[:2] == ["id: 0", "event: started"]
    assert json.loads(lines[2].removeprefix("data: "))["job_id"] == job.id


def test_jobs_that_are_not_done_when_the_server_ends_say_so() -> None:
    with live(max_running=1) as server, Client(server.url) as client:
        jobs = [client.start_job(CHAT, LONG) for _ in range(40)]
        last = server.app.state.jobs.get(jobs[-1].id)
        server.serving.draining = True
    assert last.ended
    assert b"event: error" in last.events[-1]
    assert b'"code": "stopping"' in last.events[-1]
