"""The steering that every request gets before its own."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from steerscope.serving.access import serving_of
from steerscope.serving.bodies import Asked
from steerscope.serving.describing import body_of
from steerscope.serving.errors import ApiError
from steerscope.serving.reading import any_json
from steerscope.serving.state import Serving
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Steering

router = APIRouter()


@router.get("/v1/steering")
async def get(request: Request) -> Response:
    return _shown(serving_of(request))


@router.put("/v1/steering", openapi_extra=body_of(Steering))
async def put(request: Request) -> Response:
    """`{"ops": […]}`, a list of ops, or the name of a vector; it acts on requests that come from now on."""
    serving = serving_of(request)
    engine = serving.engine
    try:
        engine.default_steering = await any_json(request, _read)
    except InvalidRequest as error:
        raise InvalidRequest([Problem(_own(p.field), p.what, p.remedy) for p in error.problems]) from None
    serving.default = engine.default_steering
    return _shown(serving)


def _read(given: object) -> Steering:
    found = Asked.parse({"steer": given}).steer
    if found is None:
        raise ApiError(400, "there is no steering: send ops, or DELETE to clear it", "invalid_request")
    return found


@router.delete("/v1/steering")
async def delete(request: Request) -> Response:
    serving = serving_of(request)
    serving.engine.default_steering = serving.default = Steering()
    return _shown(serving)


def _own(field: str) -> str:
    """`steer.ops[0]` → `ops[0]`: here the steering is the whole body."""
    return field.removeprefix("steer").removeprefix(".") or "steering"


def _shown(serving: Serving) -> Response:
    return Response(serving.engine.default_steering.to_json(), media_type="application/json")
