"""The OpenAPI description: bodies that the routes read themselves, and errors in the shape they really have."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REFERENCE = "#/components/schemas/{model}"
_components: dict[str, Any] = {}  # of all bodies


class ErrorProblem(BaseModel):
    param: str
    message: str
    remedy: str


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    problems: list[ErrorProblem] = []


class Error(BaseModel):
    error: ErrorDetails


def _schema(kind: type[BaseModel]) -> dict[str, str]:
    """Add a model to the components, and return the reference to it."""
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    _components.update(schema.pop("$defs", {}))
    _components[kind.__name__] = schema
    return {"$ref": _REFERENCE.format(model=kind.__name__)}


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "an error, as OpenAI's clients know them",
        "content": {"application/json": {"schema": _schema(Error)}},
    }
}
_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "required": ["file"], "properties": {"file": _FILE, "name": {"type": "string"}}}
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": _FILE}, "multipart/form-data": {"schema": _FORM}},
    }
}


def body_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a JSON body that is one of these models."""
    found = [_schema(kind) for kind in kinds]
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description, made at the first call."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(_components)
        app.openapi_schema = made
    return app.openapi_schema
