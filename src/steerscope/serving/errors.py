"""Every error as OpenAI's clients know it: `{"error": {"message", "type", "param", "code"}}` and a status.

An InvalidRequest keeps all its problems, each with its remedy, and its fields are named as the body names them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from steerscope.specs.errors import (
    BadFile,
    CapacityExceeded,
    CaptureClosed,
    EngineClosed,
    InvalidRequest,
    NameInUse,
    PackNotLoaded,
    Problem,
    RequestFailed,
    SteerscopeError,
    TimedOut,
    Unsteerable,
    problems_in,
)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
# Error class → status, code, seconds after which a client may try again. The first class that matches counts.
_ANSWERS: dict[type[Exception], tuple[int, str | None, float | None]] = {
    NameInUse: (409, "name_in_use", None),
    InvalidRequest: (400, "invalid_request", None),
    BadFile: (400, "bad_file", None),
    Unsteerable: (400, "unsteerable", None),
    CaptureClosed: (404, "capture_gone", None),
    CapacityExceeded: (429, "capacity_exceeded", 5),
    EngineClosed: (503, "engine_failed", 5),
    PackNotLoaded: (503, "engine_failed", 5),
    RequestFailed: (503, "engine_failed", 5),
    TimedOut: (503, "engine_failed", 5),
    SteerscopeError: (400, None, None),
}
_SPECS = ("steer", "capture", "watch")


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
    status: int | None = None  # in an event of a stream, whose headers cannot carry it


class ErrorBody(BaseModel):
    error: ErrorDetails


@dataclass
class ApiError(SteerscopeError):
    """An error with the status and the fields of its answer."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    problems: tuple[Problem, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def name(self) -> str:
        """The code, or the status where there is none; used in metrics and logs."""
        return self.code or str(self.status)

    def json(self, with_status: bool = False) -> str:
        """Return the body; an event of a stream also has the status."""
        details = ErrorDetails(
            message=self.message,
            type=_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            param=self.param,
            code=self.code or _CODES.get(self.status),
            problems=[ErrorProblem(param=p.field, message=p.what, remedy=p.remedy) for p in self.problems],
            status=self.status if with_status else None,
        )
        return json.dumps({"error": details.model_dump(exclude_defaults=True)})

    def response(self) -> Response:
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return Response(self.json(), self.status, headers, "application/json")


def api_error(error: Exception) -> ApiError:
    """Return what a client is shown of an error; an unexpected one is not described."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, RequestValidationError):
        details = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # without "path" or "query"
        error = InvalidRequest(problems_in(details))
    known = next((kind for kind in _ANSWERS if isinstance(error, kind)), None)
    if known is None:
        return ApiError(500, "the server failed; its log has details under this request's id", "internal_error")
    status, code, retry_after = _ANSWERS[known]
    if not isinstance(error, InvalidRequest):
        return ApiError(status, str(error), code, retry_after=retry_after)
    problems = tuple(_in_body(problem) for problem in error.problems)
    return ApiError(status, str(InvalidRequest(problems)), code, problems[0].field or None, problems=problems)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer with an error that a route raised; FastAPI's handler of exceptions."""
    found = api_error(error)
    request.scope.setdefault("state", {})["error"] = found.name
    return found.response()


def _in_body(problem: Problem) -> Problem:
    """Return the problem with its field as the body names it: an engine knows no `steerscope` object."""
    name = problem.field
    first = name.partition(".")[0].partition("[")[0]
    if first in _SPECS:
        name = f"steerscope.{name}".replace("steerscope.steer.ops", "steerscope.steer")
    elif first == "template_options":
        name = name.replace(first, "chat_template_kwargs")
    elif first == "sampling":
        name = name.removeprefix("sampling.")
    return Problem(name, problem.what, problem.remedy)
