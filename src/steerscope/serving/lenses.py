"""The packs that requests can be watched with, and their concepts."""

import json
import weakref

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from steerscope.lenses.pack import Pack
from steerscope.serving.access import serving_of
from steerscope.serving.errors import ApiError

router = APIRouter()
_trees: "weakref.WeakKeyDictionary[Pack, str]" = weakref.WeakKeyDictionary()


def about(name: str, pack: Pack) -> dict[str, object]:
    info = pack.info
    found = {"id": name, "object": "lens", "name": name, "title": info.name, "model": info.model, "layer": info.layer}
    levels = [pack.level(n).stop - pack.level(n).start for n in range(pack.levels)]
    return {**found, "site": info.site, "hidden": info.hidden, "count": len(pack), "levels": levels}


@router.get("/v1/lenses")
async def names(request: Request) -> Response:
    packs = serving_of(request).engine.packs
    return JSONResponse({"object": "list", "data": [about(name, packs[name]) for name in sorted(packs)]})


@router.get("/v1/lenses/{name}")
async def tree(request: Request, name: str) -> Response:
    """All concepts, parents before children; `parents` are ids."""
    packs = serving_of(request).engine.packs
    if name not in packs:
        known = ", ".join(sorted(packs)) or "none"
        raise ApiError(404, f"there is no pack {name!r:.100}: known are {known}", "lens_not_found", "name")
    pack = packs[name]
    if pack not in _trees:
        _trees[pack] = json.dumps([_concept(pack, i) for i in range(len(pack))])
    head = json.dumps(about(name, pack))
    return Response(f'{head[:-1]},"concepts":{_trees[pack]}}}', media_type="application/json")


def _concept(pack: Pack, i: int) -> dict[str, object]:
    concept = pack.concepts[i]
    plain = {"id": concept.id, "name": concept.name, "definition": concept.definition, "level": concept.level}
    return {**plain, "parents": list(concept.parents), "path": pack.path(i), "metrics": concept.metrics}
