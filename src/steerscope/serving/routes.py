"""Routes beside generation: health, capabilities, metrics, lenses, the default steering, vectors and captures."""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

import steerscope
from steerscope.engines.api import Engine
from steerscope.lenses.pack import Pack
from steerscope.serving.bodies import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    SteerscopeOptions,
    body_of,
    json_body,
)
from steerscope.serving.captures import RowsResponse
from steerscope.serving.errors import ApiError
from steerscope.serving.state import Serving, Shared
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.steering import MOST_OPS, SITES, Steering
from steerscope.vectors.files import load_upload
from steerscope.vectors.vector import SteeringVector

router = APIRouter()
T = TypeVar("T")
_STATS_S = 2.0
_NAME = re.compile(r"\w[\w .+-]{0,99}")
_NAME_BYTES = 200  # of a file's name, which also has a suffix
_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "required": ["file"], "properties": {"file": _FILE, "name": {"type": "string"}}}
_UPLOADS = {"application/octet-stream": {"schema": _FILE}, "multipart/form-data": {"schema": _FORM}}


# --- the server


@router.get("/health")
async def health(serving: Shared) -> Response:
    """Whether the process works."""
    failed = serving.failure is not None
    return JSONResponse({"status": "failed" if failed else "ok", "stage": serving.public_stage}, 503 if failed else 200)


@router.get("/ready")
async def ready(serving: Shared) -> Response:
    """Whether requests are taken, or how far loading is."""
    stage = "stopping" if serving.draining else serving.public_stage
    about = {"ready": serving.ready and not serving.draining, "stage": stage, "model": serving.model_name}
    return JSONResponse(about) if about["ready"] else JSONResponse(about, 503, {"Retry-After": "2"})


@router.get("/metrics")
async def metrics(serving: Shared) -> Response:
    """Metrics for Prometheus. An engine that does not answer in time keeps its last statistics."""
    with contextlib.suppress(Exception):  # loading, stopping, dead, or in a long step
        async with asyncio.timeout(_STATS_S):
            serving.metrics.engine = await asyncio.to_thread(serving.engine.stats)
    return Response(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/capabilities")
async def capabilities(serving: Shared) -> dict:
    """What the server's model, engine and limits allow."""
    engine = serving.engine
    facts = engine.facts
    return {
        "model": serving.model_name,
        "version": steerscope.__version__,
        "engine": "vllm" if type(engine).__name__ == "VLLMEngine" else "hf",
        "layers": facts.layers,
        "hidden": facts.hidden,
        "vocab": facts.vocab,
        "context": facts.context,
        "chat": bool(getattr(engine.tokenizer, "chat_template", None)),
        "messages": _knows_messages(engine),
        "sites": [site for site in SITES if site not in facts.refused_sites],
        "refused_sites": dict(facts.refused_sites),
        "tapped": None if facts.tapped is None else [list(key) for key in sorted(facts.tapped)],
        "ops": ["add", "cap", "ablate"],
        "steer": facts.steers,
        "capture": facts.captures,
        "watch": True,
        "rules": ["flag", "stop", *(["steer"] if facts.steers and facts.switches else [])],
        "vectors": list(serving.vectors),
        "lenses": sorted(engine.packs),
        "limits": _limits(serving),
    }


def _limits(serving: Serving) -> dict[str, object]:
    shown = {"max_running", "max_waiting", "max_body_bytes", "max_upload_bytes", "max_vectors", "capture_ttl_s"}
    return {
        **serving.settings.model_dump(include=shown),
        "max_columns": serving.engine.facts.max_columns,
        "captures_bytes": serving.engine.budget.total,
        "max_logprobs": MAX_LOGPROBS,
        "max_prompts": MAX_PROMPTS,
        "max_choices": MAX_CHOICES,
        "max_messages": MAX_MESSAGES,
        "max_ops": MOST_OPS,
        "max_n": 128,
        "max_stop": 4,
    }


def _knows_messages(engine: Engine) -> bool:
    """Whether tokens can be selected by message and role."""
    with contextlib.suppress(SteerscopeError):
        return engine.render([{"role": "user", "content": "Hello"}]).messages is not None
    return False


# --- lenses


@router.get("/v1/lenses")
async def lenses(serving: Shared) -> dict:
    packs = serving.engine.packs
    return {"object": "list", "data": [_about_pack(name, packs[name]) for name in sorted(packs)]}


@router.get("/v1/lenses/{name}")
async def lens(serving: Shared, name: str) -> Response:
    """All concepts, parents before children; `parents` are ids."""
    pack = _known("pack", name, serving.engine.packs, "lens_not_found")

    def tree() -> bytes:
        concepts = [{**one.model_dump(), "path": pack.path(i)} for i, one in enumerate(pack.concepts)]
        return to_json({**_about_pack(name, pack), "concepts": concepts})

    return Response(await asyncio.to_thread(tree), media_type="application/json")


def _about_pack(name: str, pack: Pack) -> dict[str, object]:
    info = pack.info
    return {
        "id": name,
        "object": "lens",
        "name": name,
        "title": info.name,
        "model": info.model,
        "layer": info.layer,
        "site": info.site,
        "hidden": info.hidden,
        "count": len(pack),
        "levels": [pack.level(n).stop - pack.level(n).start for n in range(pack.levels)],
    }


def _known(kind: str, name: str, among: Mapping[str, T], code: str) -> T:
    """Return the vector or pack of this name."""
    if name not in among:
        names = ", ".join(sorted(among)[:20]) or "none"
        raise ApiError(404, f"there is no {kind} {name!r:.100}: known are {names}", code, "name")
    return among[name]


# --- the steering that every request gets before its own


@router.get("/v1/steering")
async def steering(serving: Shared) -> Response:
    return _set_steering(serving, serving.engine.default_steering)


@router.put("/v1/steering", openapi_extra=body_of(Steering))
async def put_steering(request: Request, serving: Shared) -> Response:
    """`{"ops": […]}`, a list of ops, or the name of a vector; it acts on later requests."""
    try:
        return _set_steering(serving, await json_body(request, _read_steering))
    except InvalidRequest as error:  # `steer.ops[0]` → `ops[0]`: here the steering is the whole body
        own = [(p.field.removeprefix("steer").removeprefix(".") or "steering", p) for p in error.problems]
        raise InvalidRequest([Problem(field, p.what, p.remedy) for field, p in own]) from None


@router.delete("/v1/steering")
async def delete_steering(serving: Shared) -> Response:
    return _set_steering(serving, Steering())


def _read_steering(given: object) -> Steering:
    found = SteerscopeOptions.parse({"steer": given}).steer
    if found is None:
        raise ApiError(400, "there is no steering: send ops, or DELETE to clear it", "invalid_request")
    return found


def _set_steering(serving: Serving, steering: Steering) -> Response:
    serving.engine.default_steering = steering
    serving.default_steering = serving.engine.default_steering
    return Response(serving.default_steering.to_json(), media_type="application/json")


# --- vectors


@router.get("/v1/vectors")
async def vectors(serving: Shared) -> dict:
    return {"object": "list", "data": [_about_vector(name, vector) for name, vector in serving.vectors.items()]}


@router.get("/v1/vectors/{name}")
async def vector(serving: Shared, name: str) -> dict:
    found = _known("vector", name, serving.vectors, "vector_not_found")
    return {**_about_vector(name, found), "provenance": found.provenance}


@router.post("/v1/vectors", openapi_extra={"requestBody": {"required": True, "content": _UPLOADS}})
async def upload_vector(request: Request, serving: Shared, name: str | None = None) -> Response:
    """A safetensors or GGUF file, as the body itself with `?name=`, or as a form's `file`."""
    engine = serving.engine
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_files=1, max_fields=4) as form:
            file = form.get("file")
            field = form.get("name")
            if not isinstance(file, UploadFile):
                raise InvalidRequest([Problem("file", "is missing", "send the vector file in this field")])
            data = await file.read()
            name = name or (field if isinstance(field, str) and field else Path(file.filename or "").stem)
    else:
        data = await request.body()
    if not name or not _NAME.fullmatch(name) or len(name.encode()) > _NAME_BYTES:
        what = f"{name!r:.100} is not a name" if name else "is missing"
        remedy = "give ?name= with letters, digits, spaces and _.+-, at most 100"
        raise InvalidRequest([Problem("name", what, remedy)])
    async with serving.vectors.changing:
        replaced = name in serving.vectors
        found = await asyncio.to_thread(load_upload, data, name, engine.facts.layers, engine.facts.hidden)
        await asyncio.to_thread(serving.vectors.keep, engine, name, found)
    return JSONResponse({**_about_vector(name, found), "replaced": replaced}, 200 if replaced else 201)


@router.delete("/v1/vectors/{name}")
async def delete_vector(serving: Shared, name: str) -> dict:
    engine = serving.engine
    async with serving.vectors.changing:
        _known("vector", name, serving.vectors, "vector_not_found")
        if any(op.source == name for op in engine.default_steering.ops):
            what = f"the default steering uses {name!r}: clear it first with DELETE /v1/steering"
            raise ApiError(409, what, "vector_in_use", "name")
        serving.vectors.remove(engine, name)
    return deleted("vector", name)


def _about_vector(name: str, vector: SteeringVector) -> dict[str, object]:
    return {
        "id": name,
        "object": "vector",
        "name": name,
        "layers": None if vector.layers is None else list(vector.layers),
        "hidden": vector.hidden,
        "site": vector.site,
        "norms": {"shared" if layer is None else str(layer): norm for layer, norm in vector.norms().items()},
        "model": vector.model,
        "method": vector.method,
    }


# --- captures


@router.head("/v1/captures/{capture_id}", include_in_schema=False)
@router.get("/v1/captures/{capture_id}")
async def capture(request: Request, serving: Shared, capture_id: str) -> Response:
    """The rows as a safetensors file: `layer.{i}.{site}` and `label.*`. One range of bytes is served."""
    found = serving.captures.get(capture_id)
    return RowsResponse(found, request.headers.get("range"), serving.settings.stall_s)


@router.get("/v1/captures/{capture_id}/labels")
async def capture_labels(serving: Shared, capture_id: str) -> dict:
    """What each row is, as columns."""
    found = serving.captures.get(capture_id)
    labels = await asyncio.to_thread(found.rows.labels.table)
    del labels["request"]  # the same for all rows
    return {**found.about(), "model": found.rows.model, "request": found.rows.labels.request, "labels": labels}


@router.delete("/v1/captures/{capture_id}")
async def delete_capture(serving: Shared, capture_id: str) -> dict:
    serving.captures.delete(capture_id)
    return deleted("capture", capture_id)


def deleted(kind: str, name: str) -> dict[str, object]:
    return {"id": name, "object": kind, "deleted": True}
