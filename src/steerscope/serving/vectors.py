"""Steering vectors by name: those of a folder to begin with, and those that clients upload.

An upload under a name that exists takes its place for later requests; requests that run keep what they began with.
Where the server has a folder, uploads are written into it and deletions take their file away, so that a server that is
started again knows the same vectors; without one they live as long as the server.
"""

import asyncio
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

from steerscope.engines.api import Engine
from steerscope.serving.access import serving_of
from steerscope.serving.errors import ApiError
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, SteerscopeError
from steerscope.vectors.files import SUFFIXES, load, load_upload, save
from steerscope.vectors.vector import SteeringVector

if TYPE_CHECKING:
    from steerscope.serving.state import Serving

log = logging.getLogger("steerscope.serving")
router = APIRouter()
_NAME = re.compile(r"\w[\w .+-]{0,99}")
_NAME_BYTES = 200  # as a file's name, with what is added to it
_STALE_S = 3600.0


class Vectors(Mapping[str, SteeringVector]):
    """What the server knows, and what its engine is told."""

    def __init__(self, most: int, folder: Path | None = None) -> None:
        self.most, self.folder = most, folder
        self.changing = asyncio.Lock()
        self._known: dict[str, SteeringVector] = {}

    def __getitem__(self, name: str) -> SteeringVector:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def put(self, engine: Engine, name: str, vector: SteeringVector) -> None:
        check_count(name, self._known, self.most)
        layers, most = vector.layers or (), engine.facts.layers
        if beyond := [layer for layer in layers if layer >= most]:
            what = f"the vector has layer {max(beyond)}"
            raise InvalidRequest([Problem(name, what, f"{engine.facts.name} has layers 0–{most - 1}")])
        engine.register(name, vector)
        self._known[name] = vector

    def keep(self, engine: Engine, name: str, vector: SteeringVector) -> None:
        """For good: known, and in the folder, or neither."""
        before = self._known.get(name)
        self.put(engine, name, vector)
        if self.folder is None:
            return
        try:
            save(vector, kept := self.folder / f"{name}.safetensors")
        except BadFile as error:
            self._forget(engine, name) if before is None else self.put(engine, name, before)
            raise unkept(error) from None
        for path in self._files(name):  # a name has one file; until this one is gone, the new one is read after it
            if not path.samefile(kept):
                path.unlink(missing_ok=True)

    def remove(self, engine: Engine, name: str) -> None:
        try:
            for path in self._files(name):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise unkept(error) from None
        self._forget(engine, name)

    def read_folder(self, engine: Engine) -> None:
        """Files that do not fit this model are passed over, and said so."""
        if self.folder is None:
            return
        if not self.folder.is_dir():
            what = f"{self.folder} is not a folder"
            raise InvalidRequest([Problem("vectors", what, "name one that holds vector files")])
        for left in self.folder.glob(".steerscope-*"):  # by a server that was killed while it wrote
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink(missing_ok=True)
        for path in self._files():
            try:
                self.put(engine, path.stem, load(path))
            except SteerscopeError as error:
                log.warning("the vector %s is left out: %s", path.name, error)

    def _forget(self, engine: Engine, name: str) -> None:
        del self._known[name]
        engine.unregister(name)

    def _files(self, name: str | None = None) -> list[Path]:
        found = sorted(self.folder.iterdir()) if self.folder is not None else []
        known = [path for path in found if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
        return known if name is None else [path for path in known if path.stem == name and path.is_file()]

    def tell_all(self, engine: Engine) -> None:
        """To an engine that was started again."""
        for name, vector in self._known.items():
            engine.register(name, vector)


def check_count(name: str, known: Collection[str], most: int) -> None:
    """Refuse a new vector where there are as many as there may be."""
    if name not in known and len(known) >= most:
        what = f"the server holds {most} vectors, which is its limit"
        raise InvalidRequest([Problem("name", what, "delete one first, or start it with more max_vectors")])


def unkept(error: Exception) -> ApiError:
    log.error("the folder of vectors cannot be written: %s", error)
    return ApiError(507, "the server's folder of vectors cannot be written; its log says why", "not_kept")


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
    if not name or not _NAME.fullmatch(name) or len(name.encode()) > _NAME_BYTES:
        what = "is missing" if not name else f"{name!r:.100} is not a name"
        remedy = "give ?name= with letters, digits, spaces and _.+-, at most 100"
        raise InvalidRequest([Problem("name", what, remedy)])
    async with serving.vectors.changing:
        replaced = name in serving.vectors
        facts = engine.facts
        vector = await asyncio.to_thread(load_upload, data, name, facts.layers, facts.hidden)
        await asyncio.to_thread(serving.vectors.keep, engine, name, vector)
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
