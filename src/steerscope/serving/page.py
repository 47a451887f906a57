"""The page: static files of this package at `/` and `/ui/`, and plotly.js from the plotly wheel."""

import importlib.util
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from steerscope.serving.errors import ApiError

FOLDER = Path(__file__).parent / "ui"
router = APIRouter(include_in_schema=False)


@router.get("/docs")
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


@router.get("/")
async def index() -> Response:
    return FileResponse(FOLDER / "index.html", headers={"Cache-Control": "no-cache"})


@router.get("/ui/plotly.min.js")
async def plotly(request: Request) -> Response:
    del request
    found = importlib.util.find_spec("plotly")
    file = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if file is None or not file.is_file():
        raise ApiError(404, "plotly is not installed: pip install plotly", "not_found")
    return FileResponse(file, headers={"Cache-Control": "max-age=86400"})


class _Fresh(StaticFiles):
    """Make browsers ask each time whether a file has changed: a page must not load modules of two versions."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        found = super().file_response(*args, **options)
        found.headers["Cache-Control"] = "no-cache"
        return found


def files() -> StaticFiles:
    return _Fresh(directory=FOLDER, check_dir=False)
