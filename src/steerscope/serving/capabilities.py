"""What this server's model, engine and limits allow, so that a client need not find out by being refused."""

import contextlib

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import steerscope
from steerscope.engines.api import Engine
from steerscope.serving.access import serving_of
from steerscope.serving.bodies import MOST_CHOICES, MOST_LOGPROBS, MOST_PROMPTS
from steerscope.serving.fields import MOST_MESSAGES
from steerscope.specs.errors import SteerscopeError
from steerscope.specs.steering import MOST_OPS, SITES

router = APIRouter()


def _spans(engine: Engine) -> bool:
    with contextlib.suppress(SteerscopeError):
        return engine.render([{"role": "user", "content": "Hello"}]).messages is not None
    return False


@router.get("/v1/capabilities")
async def capabilities(request: Request) -> Response:
    serving = serving_of(request)
    engine, settings = serving.engine, serving.settings
    facts = engine.facts
    tapped = None if facts.tapped is None else sorted(facts.tapped)
    return JSONResponse(
        {
            "model": serving.model_name,
            "version": steerscope.__version__,
            "engine": "vllm" if type(engine).__name__ == "VLLMEngine" else "hf",
            "layers": facts.layers,
            "hidden": facts.hidden,
            "vocab": facts.vocab,
            "context": facts.context,
            "chat": bool(getattr(engine.tokenizer, "chat_template", None)),
            "messages": _spans(engine),  # tokens can be chosen by message and role
            "sites": [site for site in SITES if site not in facts.refused_sites],
            "refused_sites": dict(facts.refused_sites),
            "tapped": None if tapped is None else [list(key) for key in tapped],
            "ops": ["add", "cap", "ablate"],
            "steer": facts.steers,
            "capture": facts.captures,
            "watch": facts.watches,
            "rules": ["flag", "stop", *(["steer"] if facts.steers and facts.switches else [])],
            "vectors": list(serving.vectors),
            "lenses": sorted(engine.packs),
            "limits": {
                "max_columns": facts.max_columns,
                "max_running": settings.max_running,
                "max_waiting": settings.max_waiting,
                "max_body_bytes": settings.max_body_bytes,
                "max_upload_bytes": settings.max_upload_bytes,
                "max_vectors": settings.max_vectors,
                "captures_bytes": engine.budget.total,
                "capture_ttl_s": settings.capture_ttl_s,
                "max_logprobs": MOST_LOGPROBS,
                "max_prompts": MOST_PROMPTS,
                "max_choices": MOST_CHOICES,
                "max_messages": MOST_MESSAGES,
                "max_ops": MOST_OPS,
                "max_n": 128,
                "max_stop": 4,
            },
        }
    )
