"""The app: routes, errors and the guard before them, around one engine."""

import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import steerscope
from steerscope.engines.api import Engine
from steerscope.serving import jobs, openai, page, routes
from steerscope.serving.bodies import ChatBody, CompletionBody
from steerscope.serving.errors import ErrorBody, answer_error
from steerscope.serving.guard import Guard
from steerscope.serving.json_body import describe
from steerscope.serving.settings import ServerSettings
from steerscope.serving.state import Serving
from steerscope.specs.errors import SteerscopeError
from steerscope.specs.steering import Steering


def create_app(start: Callable[[], Engine] | Engine, settings: ServerSettings | None = None) -> FastAPI:
    """Return the app of a running engine, or of one that `start` starts with the app. The app closes it at the end."""
    serving = Serving(start, settings or ServerSettings())

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
        responses={"default": {"model": ErrorBody, "description": "an error, as OpenAI's clients know them"}},
        docs_url=None,  # FastAPI's own page runs a program of another site
        redoc_url=None,
    )
    app.openapi = lambda: describe(app, ChatBody, CompletionBody, Steering)
    app.state.serving = serving
    app.state.jobs = jobs.Jobs(serving)
    for module in (openai, jobs, routes, page):
        app.include_router(module.router)
    app.mount("/ui", page.files(), name="ui")
    for error in (SteerscopeError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, answer_error)
    app.add_middleware(Guard, serving=serving)
    if serving.settings.cors_origins:
        origins = list(serving.settings.cors_origins)
        exposed = ["x-request-id", "retry-after"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    return app
