"""Bodies of requests as plain data, and work in a thread that would hold up other requests."""

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from steerscope.serving.errors import ApiError
from steerscope.specs.errors import not_json

T = TypeVar("T")
_LONG = 20_000  # characters that take longer than a step of the engine


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _json(data: bytes) -> object:
    try:
        return json.loads(data, parse_constant=_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep; make it flatter", "invalid_json") from None
    except ValueError as error:  # of the decoder, of UTF-8, and of numbers with thousands of digits
        raise ApiError(400, f"the body {not_json(error)}; correct it", "invalid_json") from None


async def in_thread_if_long(work: Callable[[], T], n_characters: int) -> T:
    return await asyncio.to_thread(work) if n_characters > _LONG else work()


async def any_json(request: Request, read: Callable[[object], T]) -> T:
    """Return what `read` makes of the body's JSON."""
    data = await request.body()
    return await in_thread_if_long(lambda: read(_json(data)), len(data))


async def json_body(request: Request, read: Callable[[dict[str, object]], T]) -> T:
    """Return what `read` makes of the body's JSON object."""

    def checked(found: object) -> T:
        if not isinstance(found, dict):
            raise ApiError(400, f"the body is {type(found).__name__}, not an object; send {{…}}", "invalid_json")
        return read(found)

    return await any_json(request, checked)
