"""How a route reaches what all requests share."""

from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:  # it knows the routes' stores
    from steerscope.serving.state import Serving


def serving_of(request: Request) -> "Serving":
    return request.app.state.serving
