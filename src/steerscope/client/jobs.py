"""Jobs: requests that go on at the server whoever listens, and can be listened to again from any event."""

import json
from dataclasses import dataclass

from steerscope.client.answers import Json, understood
from steerscope.client.calls import DONE, ServerEvent


@dataclass(frozen=True, slots=True)
class JobRef:
    id: str
    sse_url: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`started`, `token`, `reading`, `rule`, `metrics`, then `end` or `error`. `id` is where to go on after it."""

    name: str
    data: Json
    id: str | None


def job_event(event: ServerEvent) -> JobEvent | None:
    """None: the stream is over."""
    if event.data == DONE:
        return None
    with understood():
        return JobEvent(event.event or "message", json.loads(event.data), event.id)


def resume(after: JobEvent | str | None) -> dict[str, str]:
    given = after.id if isinstance(after, JobEvent) else after
    return {"Last-Event-ID": given} if given is not None else {}
