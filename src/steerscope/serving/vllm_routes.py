"""Our routes on vLLM's own OpenAI server, as a `vllm.endpoint_plugins` entry point.

vLLM mounts them where `VLLM_PLUGINS` names steerscope and the engine has taps (STEERSCOPE=1, or JSON). They work on the
two folders of the settings: `vectors`, whose files requests name in `vllm_xargs`, and `captures`, which holds the rows
of requests with `save_as`. vLLM's `--api-key` guards them like everything under /v1.
"""

import asyncio
import re
from argparse import Namespace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.datastructures import State
from starlette.responses import FileResponse, Response

from steerscope.engines.plan import Facts
from steerscope.engines.vllm.guards import facts_of
from steerscope.engines.vllm.settings import VLLMSettings, asked_for
from steerscope.files import locked
from steerscope.serving.errors import ApiError, answer_error
from steerscope.serving.routes import deleted
from steerscope.serving.vectors import check_count, not_kept, vector_files
from steerscope.serving.vllm_saves import SaveReports
from steerscope.specs.errors import BadFile, SteerscopeError
from steerscope.vectors.files import load, load_upload, save
from steerscope.vectors.vector import SteeringVector

MOST_BYTES = 256 << 20  # of an uploaded vector
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
router = APIRouter(tags=["steerscope"])


class Plugin:
    """The interface of an endpoint plugin of vLLM's front end."""

    name = "steerscope"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.add_exception_handler(SteerscopeError, answer_error)
        app.include_router(router)
        app.add_middleware(SaveReports)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        del args
        config = engine_client.vllm_config if engine_client is not None else None
        settings = None if config is None else asked_for(config)
        state.steerscope = None if settings is None else (settings, facts_of(config, settings))


async def _taps(request: Request) -> tuple[VLLMSettings, Facts]:
    found = getattr(request.app.state, "steerscope", None)
    if found is None:
        raise ApiError(404, "this engine was started without taps: set STEERSCOPE=1 in its environment", "no_taps")
    return found


Taps = Annotated[tuple[VLLMSettings, Facts], Depends(_taps)]


def _folder(taps: Taps, kind: str) -> Path:
    given = getattr(taps[0], kind)
    if given is None:
        what = f'the server has no folder for {kind}: start it with STEERSCOPE=\'{{"{kind}": "DIR"}}\''
        raise ApiError(404, what, f"no_{kind}")
    return Path(given)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        what = f"{name!r:.150} is not a name; use up to 128 letters, digits, dots, dashes and underscores"
        raise ApiError(400, what, "invalid_name", "name")


@router.get("/v1/capabilities")
async def capabilities(taps: Taps) -> dict:
    settings, facts = taps
    tapped = sorted(facts.tapped or ())
    return {
        "model": facts.name,
        "engine": "vllm",
        "layers": facts.layers,
        "hidden": facts.hidden,
        "context": facts.context,
        "sites": sorted({site for _, site in tapped}),
        "tapped_layers": sorted({layer for layer, _ in tapped}),
        "ops": ["add", "cap", "ablate"] if facts.steers else [],
        "capture": facts.captures,
        "watch": False,
        "limits": {
            "ops_per_token": facts.max_columns,
            "vectors_in_use": settings.slots - 1,
            "max_vectors": settings.max_vectors,
        },
        "requests": 'vllm_xargs={"steerscope": "<JSON of steer, capture, save_as>"}',
    }


# --- vectors


@router.get("/v1/vectors")
async def vectors(taps: Taps) -> dict:
    names = _names(_folder(taps, "vectors"))
    return {"object": "list", "data": [{"id": name, "object": "vector"} for name in names]}


@router.post("/v1/vectors", status_code=201)
async def upload(request: Request, taps: Taps, name: str = "") -> dict:
    """A safetensors or GGUF file as the raw body. It replaces a vector of the same name for later requests."""
    folder = _folder(taps, "vectors")
    data = bytearray()
    _check_name(name)
    async for block in request.stream():
        data += block
        if len(data) > MOST_BYTES:
            raise ApiError(413, f"the body is larger than {MOST_BYTES} bytes", "body_too_large")
    return _about(name, await asyncio.to_thread(_keep, bytes(data), folder, name, *taps))


@router.get("/v1/vectors/{name}")
async def vector(taps: Taps, name: str) -> dict:
    return _about(name, await asyncio.to_thread(load, _vector_file(taps, name)))


@router.delete("/v1/vectors/{name}")
async def delete_vector(taps: Taps, name: str) -> dict:
    _vector_file(taps, name).unlink()
    return deleted("vector", name)


def _about(name: str, vector: SteeringVector) -> dict[str, object]:
    layers = "all" if vector.layers is None else list(vector.layers)
    return {"id": name, "object": "vector", "layers": layers, "site": vector.site, "model": vector.model}


def _names(folder: Path) -> list[str]:
    return sorted({path.stem for path in vector_files(folder)}) if folder.is_dir() else []


def _vector_file(taps: Taps, name: str) -> Path:
    folder = _folder(taps, "vectors")
    _check_name(name)
    found = vector_files(folder, name) if folder.is_dir() else []
    if not found:
        raise ApiError(404, f"there is no vector {name!r}", "not_found", "name")
    return found[0]


def _keep(data: bytes, folder: Path, name: str, settings: VLLMSettings, facts: Facts) -> SteeringVector:
    vector = load_upload(data, name, facts.layers, facts.hidden)
    hidden = vector.to_spec().hidden
    if hidden != facts.hidden:
        raise ApiError(400, f"the vector has {hidden} numbers, the model's hidden size is {facts.hidden}", "bad_file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".uploads.lock"):  # the server may have several processes
            check_count(name, _names(folder), settings.max_vectors)
            save(vector, folder / f"{name}.safetensors")
    except (OSError, BadFile) as error:
        raise not_kept(error) from None
    return vector


# --- captures


@router.get("/v1/captures/{name}")
async def capture(taps: Taps, name: str) -> Response:
    """The rows that a request saved under this name; ranges are served."""
    path = _capture_file(taps, name)
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


@router.delete("/v1/captures/{name}")
async def delete_capture(taps: Taps, name: str) -> dict:
    _capture_file(taps, name).unlink()
    return deleted("capture", name)


def _capture_file(taps: Taps, name: str) -> Path:
    folder = _folder(taps, "captures")
    _check_name(name)  # it has no separator, so it stays in the folder
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise ApiError(404, f"there is no capture {name!r}", "not_found", "name")
    return path
