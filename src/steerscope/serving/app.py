"""The app: routes, errors and the guard before them, around one engine."""

import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import steerscope
from steerscope.engines.api import Engine
from steerscope.serving import capabilities, captures, health, jobs, lenses, metrics, openai, page, steering, vectors
from steerscope.serving.describing import ERRORS, describe
from steerscope.serving.errors import api_error
from steerscope.serving.guard import Guard
from steerscope.serving.settings import Settings
from steerscope.serving.state import Serving
from steerscope.specs.errors import InvalidRequest, SteerscopeError, problems_in


def create_app(start: Callable[[], Engine] | Engine, settings: Settings | None = None) -> FastAPI:
    """`start` makes the engine, in a thread of its own when the app starts; an engine that runs is taken too. The app
    closes it at the end."""
    serving = Serving(start, settings or Settings())

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await serving.open()
        try:
            yield
        finally:
            await app.state.jobs.close()
            await serving.close()

    app = FastAPI(
        title="steerscope",
        version=steerscope.__version__,
        lifespan=life,
        redirect_slashes=False,
        responses=ERRORS,
        docs_url=None,  # FastAPI's own would run a program of another site in this one's pages
        redoc_url=None,
    )
    app.openapi = lambda: describe(app)
    app.state.serving = serving
    app.state.jobs = jobs.Jobs(serving)
    for module in (openai, jobs, captures, vectors, lenses, steering, capabilities, health, metrics, page):
        app.include_router(module.router)
    app.mount("/ui", page.files(), name="ui")
    app.add_exception_handler(SteerscopeError, _told)
    app.add_exception_handler(HTTPException, _told)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_middleware(Guard, serving=serving)
    if serving.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(serving.settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _told(request: Request, error: Exception) -> Response:
    found = api_error(error)
    request.scope.setdefault("state", {})["error"] = found.code or str(found.status)
    return found.response()


async def _misread(_: Request, error: Exception) -> Response:
    """A path or query that does not have the type it should."""
    assert isinstance(error, RequestValidationError)
    details = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # without "path" or "query"
    return api_error(InvalidRequest(problems_in(details))).response()
