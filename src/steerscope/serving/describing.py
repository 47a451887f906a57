"""The OpenAPI description: bodies that the routes read themselves, and errors in the shape they really have."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REFERENCE = "#/components/schemas/{model}"
_components: dict[str, Any] = {}  # of all bodies
_PROBLEM = {"type": "object", "properties": {name: {"type": "string"} for name in ("param", "message", "remedy")}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "problems": {"type": "array", "items": _PROBLEM},
            },
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "an error, as OpenAI's clients know them",
        "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}},
    }
}


def body_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """What a route says of a JSON body that is one of these."""
    found: list[dict[str, Any]] = []
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=_REFERENCE)
        _components.update(schema.pop("$defs", {}))
        _components[kind.__name__] = schema
        found.append({"$ref": _REFERENCE.format(model=kind.__name__)})
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """Made once, when somebody asks."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own shape, which no route has
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update({**_components, "Error": _ERROR})
        app.openapi_schema = made
    return app.openapi_schema
