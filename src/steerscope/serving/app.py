"""The app: routes, errors and the guard before them, around one engine.

The page is static files of this package at `/` and `/ui/`, and plotly.js from the plotly wheel.
"""

import contextlib
import importlib.resources
from collections.abc import AsyncIterator, Callable
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

import steerscope
from steerscope.engines.api import Engine
from steerscope.serving import jobs, openai, routes
from steerscope.serving.bodies import ChatBody, CompletionBody, describe
from steerscope.serving.errors import ErrorBody, answer_error
from steerscope.serving.guard import Guard
from steerscope.serving.settings import ServerSettings
from steerscope.serving.state import Serving
from steerscope.specs.errors import SteerscopeError
from steerscope.specs.steering import Steering

FOLDER = Path(__file__).parent / "ui"
page = APIRouter(include_in_schema=False)


@page.get("/docs")
async def docs(request: Request) -> Response:
    """A table of all routes; /openapi.json has the details."""
    lines = [
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(about.get('description', ''))}"
        for path, methods in request.app.openapi()["paths"].items()
        for method, about in methods.items()
    ]
    style = "body{font:15px system-ui;max-width:60rem;margin:2rem auto}td{padding:.3rem 1rem;vertical-align:top}"
    head = f'<!doctype html><meta charset="utf-8"><title>steerscope</title><style>{style}</style><h1>Routes</h1>'
    more = '<p>Bodies and answers: <a href="openapi.json">openapi.json</a></p>'
    return HTMLResponse(f"{head}{more}<table>{''.join(lines)}</table>")


@page.get("/")
async def index() -> Response:
    return FileResponse(FOLDER / "index.html", headers={"Cache-Control": "no-cache"})


@page.get("/ui/plotly.min.js")
def plotly() -> Response:
    """Not a coroutine: plotly is imported in a thread."""
    file = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    return FileResponse(str(file), headers={"Cache-Control": "max-age=86400"})


class PageFiles(StaticFiles):
    """Make browsers ask each time whether a file has changed: a page must not load modules of two versions."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        found = super().file_response(*args, **options)
        found.headers["Cache-Control"] = "no-cache"
        return found


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
        exception_handlers=dict.fromkeys((SteerscopeError, HTTPException, RequestValidationError), answer_error),
        docs_url=None,  # FastAPI's own page runs a program of another site
        redoc_url=None,
    )
    app.openapi = lambda: describe(app, ChatBody, CompletionBody, Steering)
    app.state.serving = serving
    app.state.jobs = jobs.Jobs(serving)
    for router in (openai.router, jobs.router, routes.router, page):
        app.include_router(router)
    app.mount("/ui", PageFiles(directory=FOLDER, check_dir=False), name="ui")
    app.add_middleware(Guard, serving=serving)
    if serving.settings.cors_origins:
        origins = list(serving.settings.cors_origins)
        exposed = ["x-request-id", "retry-after"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    return app
