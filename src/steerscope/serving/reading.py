"""Bodies of requests as plain data, and work that must not hold up others."""

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from steerscope.serving.errors import ApiError
from steerscope.specs.errors import not_json

T = TypeVar("T")
_LONG = 20_000  # characters: what takes longer than a step does not hold up the others


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _json(data: bytes) -> object:
    try:
        return json.loads(data, parse_constant=_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep; make it flatter", "invalid_json") from None
    except ValueError as error:  # of the decoder, of UTF-8, and of numbers with thousands of digits
        raise ApiError(400, f"the body {not_json(error)}; correct it", "invalid_json") from None


async def aside(work: Callable[[], T], size: int) -> T:
    """In a thread if it is much, `size` being about characters."""
    return await asyncio.to_thread(work) if size > _LONG else work()


async def any_json(request: Request, read: Callable[[object], T]) -> T:
    """What `read` makes of the body's JSON, or one clear error."""
    data = await request.body()
    return await aside(lambda: read(_json(data)), len(data))


async def json_body(request: Request, read: Callable[[dict[str, object]], T]) -> T:
    """The same of a JSON object."""

    def checked(found: object) -> T:
        if not isinstance(found, dict):
            raise ApiError(400, f"the body is {type(found).__name__}, not an object; send {{…}}", "invalid_json")
        return read(found)

    return await any_json(request, checked)
