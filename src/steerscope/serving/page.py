"""The page: static files of this package at `/` and `/ui/`, and plotly.js from the plotly wheel."""

import importlib.util
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from steerscope.serving.errors import ApiError

FOLDER = Path(__file__).parent / "ui"
router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    if not (FOLDER / "index.html").is_file():
        return RedirectResponse("/docs")
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
    """Modules of two versions must not meet in one page: browsers ask each time whether a file has changed."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        found = super().file_response(*args, **options)
        found.headers["Cache-Control"] = "no-cache"
        return found


def files() -> StaticFiles:
    return _Fresh(directory=FOLDER, check_dir=False)
