"""Bodies of requests as plain data."""

import json

from starlette.requests import Request

from steerscope.serving.errors import ApiError


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


async def any_json(request: Request) -> object:
    """JSON, or one clear error."""
    data = await request.body()
    try:
        return json.loads(data, parse_constant=_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", "invalid_json") from None
    except ValueError as error:  # of the decoder, of UTF-8, and of numbers with thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None


async def json_body(request: Request) -> dict[str, object]:
    """A JSON object, or one clear error."""
    found = await any_json(request)
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {type(found).__name__}, not an object; send {{…}}", "invalid_json")
    return found
