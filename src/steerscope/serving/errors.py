"""Every error as OpenAI's clients know it: `{"error": {"message", "type", "param", "code"}}` and a status.

An InvalidRequest keeps all its problems, each with its remedy, and its fields are named as the body names them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
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
)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


@dataclass
class ApiError(SteerscopeError):
    """An answer other than the one asked for."""

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
    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, dict[str, object]]:
        code = self.code or _CODES.get(self.status)
        found: dict[str, object] = {"message": self.message, "type": self.kind, "param": self.param, "code": code}
        if self.problems:
            found["problems"] = [{"param": p.field, "message": p.what, "remedy": p.remedy} for p in self.problems]
        return {"error": found}

    def json(self, with_status: bool = False) -> str:
        """The body as text; an event of a stream also has the status, which its headers cannot carry."""
        body = self.body()
        if with_status:
            body["error"]["status"] = self.status
        return json.dumps(body)

    def response(self) -> Response:
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return Response(self.json(), self.status, headers, "application/json")


def api_error(error: Exception) -> ApiError:
    """What a client is told about an error; of one that nobody foresaw, nothing."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            problems = tuple(in_body(problem) for problem in error.problems)
            message = str(InvalidRequest(problems))
            status, code = (409, "name_in_use") if isinstance(error, NameInUse) else (400, "invalid_request")
            return ApiError(status, message, code, problems[0].field or None, problems=problems)
        case BadFile() | Unsteerable():
            return ApiError(400, str(error), "bad_file" if isinstance(error, BadFile) else "unsteerable")
        case CaptureClosed():
            return ApiError(404, str(error), "capture_gone")
        case CapacityExceeded():
            return ApiError(429, str(error), "capacity_exceeded", retry_after=5)
        case EngineClosed() | PackNotLoaded() | RequestFailed() | TimedOut():
            return ApiError(503, str(error), "engine_failed", retry_after=5)
        case SteerscopeError():
            return ApiError(400, str(error))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case _:
            return ApiError(500, "the server failed; its log says more under this request's id", "internal_error")


_SPECS = ("steer", "capture", "watch")


def in_body(problem: Problem) -> Problem:
    """The problem's field as the body names it: an engine knows no `steerscope` object."""
    field_name = problem.field
    first = field_name.partition(".")[0].partition("[")[0]
    if first in _SPECS:
        field_name = f"steerscope.{field_name}".replace("steerscope.steer.ops", "steerscope.steer")
    elif first == "template_options":
        field_name = field_name.replace(first, "chat_template_kwargs")
    elif first == "sampling":
        field_name = field_name.removeprefix("sampling.")
    return Problem(field_name, problem.what, problem.remedy)
