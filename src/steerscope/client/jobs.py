"""Jobs: requests that run to their end at the server. A client can read their events again from any of them."""

import json
from dataclasses import dataclass

from steerscope.client.answers import Json, understood
from steerscope.client.events import DONE, ServerEvent


@dataclass(frozen=True, slots=True)
class JobRef:
    id: str
    sse_url: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`started`, `token`, `reading`, `rule`, `metrics`; the last is `end` or `error`. A stream resumes after `id`."""

    name: str
    data: Json
    id: str | None


def job_event(event: ServerEvent) -> list[JobEvent]:
    """Return the event of a job, or nothing at the end of the stream."""
    if event.data == DONE:
        return []
    with understood():
        return [JobEvent(event.event or "message", json.loads(event.data), event.id)]


def resume(after: JobEvent | str | None) -> dict[str, str]:
    """Return the header that resumes a stream after an event."""
    last = after.id if isinstance(after, JobEvent) else after
    return {} if last is None else {"Last-Event-ID": last}
