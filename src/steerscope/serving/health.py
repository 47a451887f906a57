"""`/health`: the process answers. `/ready`: requests are taken, or how far loading is."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from steerscope.serving.access import serving_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    serving = serving_of(request)
    failed = serving.failure is not None
    return JSONResponse({"status": "failed" if failed else "ok", "stage": serving.told_stage}, 503 if failed else 200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    serving = serving_of(request)
    takes = serving.ready and not serving.draining
    stage = "stopping" if serving.draining else serving.told_stage
    about = {"ready": takes, "stage": stage, "model": serving.model_name}
    return JSONResponse(about, 200 if takes else 503, None if takes else {"Retry-After": "2"})
