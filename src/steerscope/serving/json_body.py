"""JSON bodies of requests: routes read them themselves, and the OpenAPI description names their models.

A body is JSON whatever its content type says, and a long one is read in a thread, where it holds up no other request.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from steerscope.serving.errors import ApiError
from steerscope.specs.errors import not_json

T = TypeVar("T")
_LONG = 20_000  # characters that take longer than a step of the engine
_REFERENCE = "#/components/schemas/{model}"


def _json(data: bytes) -> object:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        what = "is nested too deep" if "recursion" in str(error) else not_json(error)
        raise ApiError(400, f"the body {what}; correct it", "invalid_json") from None


async def in_thread_if_long(work: Callable[[], T], n_characters: int) -> T:
    return await asyncio.to_thread(work) if n_characters > _LONG else work()


async def json_body(request: Request, read: Callable[[object], T]) -> T:
    """Return what `read` makes of the body's JSON."""
    data = await request.body()
    return await in_thread_if_long(lambda: read(_json(data)), len(data))


# --- the OpenAPI description


def body_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a JSON body that is one of these models, which `describe` defines."""
    schema = {"anyOf": [{"$ref": _REFERENCE.format(model=kind.__name__)} for kind in kinds]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *bodies: type[BaseModel]) -> dict[str, Any]:
    """Return the description of an app and the models of its bodies, made at the first call."""
    if app.openapi_schema is None:
        found = FastAPI.openapi(app)
        _, models = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_REFERENCE)
        found["components"]["schemas"] |= models["$defs"]
    assert app.openapi_schema is not None
    return app.openapi_schema
