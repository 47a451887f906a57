"""Server-sent events, read line by line."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

DONE = "[DONE]"
BROKEN = "the stream ended before its end was told: the server went away"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    data: str
    event: str | None = None
    id: str | None = None


class EventReader:
    """Turn lines into events. Comments and events without data are skipped."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> ServerEvent | None:
        """Return the event that this line ends."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name:
                self._fields[name] = value
            return None
        data, fields = self._data, self._fields
        self._data, self._fields = [], {}
        return ServerEvent("\n".join(data), fields.get("event"), fields.get("id")) if data else None


def events_of(lines: Iterable[str]) -> Iterator[ServerEvent]:
    reader = EventReader()
    for line in lines:
        if (event := reader.feed(line)) is not None:
            yield event
