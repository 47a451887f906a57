"""Steering vectors by name: those of a folder to begin with, and those that clients upload.

An upload under a name that exists takes its place for later requests; requests that run keep what they began with.
Uploads live as long as the server: what is to stay is put into the folder.
"""

import asyncio
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

from steerscope.engines.base import Engine
from steerscope.serving.access import serving_of
from steerscope.serving.errors import ApiError
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, SteerscopeError
from steerscope.vectors.files import SUFFIXES, load
from steerscope.vectors.vector import SteeringVector

if TYPE_CHECKING:
    from steerscope.serving.state import Serving

log = logging.getLogger("steerscope.serving")
router = APIRouter()
_NAME = re.compile(r"\w[\w .+-]{0,99}")


class Vectors(Mapping[str, SteeringVector]):
    """What the server knows, and what its engine is told."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.changing = asyncio.Lock()
        self._known: dict[str, SteeringVector] = {}

    def __getitem__(self, name: str) -> SteeringVector:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def put(self, engine: Engine, name: str, vector: SteeringVector) -> None:
        if name not in self._known and len(self._known) >= self.most:
            what = f"the server holds {self.most} vectors"
            raise InvalidRequest([Problem("name", what, "delete one first, or start it with more max_vectors")])
        layers, most = vector.layers or (), engine.facts.layers
        if beyond := [layer for layer in layers if layer >= most]:
            what = f"the vector has layer {max(beyond)}"
            raise InvalidRequest([Problem(name, what, f"{engine.facts.name} has layers 0–{most - 1}")])
        engine.register(name, vector)
        self._known[name] = vector

    def remove(self, engine: Engine, name: str) -> None:
        del self._known[name]
        engine.unregister(name)

    def read_folder(self, engine: Engine, folder: Path) -> None:
        """Files that do not fit this model are passed over, and said so."""
        if not folder.is_dir():
            raise InvalidRequest([Problem("vectors", f"{folder} is not a folder", "name one that holds vector files")])
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
                continue
            try:
                self.put(engine, path.stem, load(path))
            except SteerscopeError as error:
                log.warning("the vector %s is left out: %s", path.name, error)

    def tell_all(self, engine: Engine) -> None:
        """To an engine that was started again."""
        for name, vector in self._known.items():
            engine.register(name, vector)


def about(name: str, vector: SteeringVector) -> dict[str, object]:
    norms = {"shared" if layer is None else str(layer): norm for layer, norm in vector.norms().items()}
    layers = None if vector.layers is None else list(vector.layers)
    known = {"id": name, "object": "vector", "name": name, "layers": layers, "hidden": vector.hidden}
    return {**known, "site": vector.site, "norms": norms, "model": vector.model, "method": vector.method}


def known(serving: "Serving", name: str) -> SteeringVector:
    if name not in serving.vectors:
        names = ", ".join(list(serving.vectors)[:20]) or "none"
        raise ApiError(404, f"there is no vector {name!r:.100}: known are {names}", "vector_not_found", "name")
    return serving.vectors[name]


@router.get("/v1/vectors")
async def names(request: Request) -> Response:
    data = [about(name, vector) for name, vector in serving_of(request).vectors.items()]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/vectors/{name}")
async def one(request: Request, name: str) -> Response:
    vector = known(serving_of(request), name)
    return JSONResponse({**about(name, vector), "provenance": vector.provenance})


@router.post(
    "/v1/vectors",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file"],
                        "properties": {"file": {"type": "string", "format": "binary"}, "name": {"type": "string"}},
                    }
                },
            },
        }
    },
)
async def upload(request: Request, name: str | None = None) -> Response:
    """A safetensors or GGUF file, as the body itself with `?name=`, or as a form's `file`."""
    serving = serving_of(request)
    engine = serving.engine
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_files=1, max_fields=4) as form:
            file, field = form.get("file"), form.get("name")
            if not isinstance(file, UploadFile):
                raise InvalidRequest([Problem("file", "is missing", "send the vector file in this field")])
            data = await file.read()
            name = name or (field if isinstance(field, str) and field else Path(file.filename or "").stem)
    else:
        data = await request.body()
    if not name or not _NAME.fullmatch(name):
        what = "is missing" if not name else f"{name!r:.100} is not a name"
        remedy = "give ?name= with letters, digits, spaces and _.+-, at most 100"
        raise InvalidRequest([Problem("name", what, remedy)])
    async with serving.vectors.changing:
        replaced = name in serving.vectors
        vector = await asyncio.to_thread(_read, data, name)
        serving.vectors.put(engine, name, vector)
    return JSONResponse({**about(name, vector), "replaced": replaced}, 200 if replaced else 201)


@router.delete("/v1/vectors/{name}")
async def delete(request: Request, name: str) -> Response:
    serving = serving_of(request)
    engine = serving.engine
    async with serving.vectors.changing:
        known(serving, name)
        if any(op.source == name for op in engine.default_steering.ops):
            what = f"the default steering uses {name!r}: clear it first with DELETE /v1/steering"
            raise ApiError(409, what, "vector_in_use", "name")
        serving.vectors.remove(engine, name)
    return JSONResponse({"id": name, "object": "vector", "deleted": True})


def _read(data: bytes, name: str) -> SteeringVector:
    """No pickles: a file that could want to run code is not even opened."""
    gguf = data.startswith(b"GGUF")
    if not gguf and data[8:9] != b"{":
        raise BadFile(f"{name} is neither safetensors nor GGUF: convert it first, e.g. with steerscope vectors convert")
    with tempfile.TemporaryDirectory(prefix="steerscope-upload-") as folder:
        path = Path(folder) / ("vector.gguf" if gguf else "vector.safetensors")
        path.write_bytes(data)
        try:
            return load(path)
        except BadFile as error:
            raise BadFile(str(error).replace(str(path), name)) from None
