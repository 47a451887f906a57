"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`, as OpenAI's clients use them."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from steerscope.engines.api import Engine
from steerscope.engines.plan import Prompt
from steerscope.engines.results import TokenPrompt
from steerscope.serving.answers import Writer
from steerscope.serving.bodies import ChatBody, CompletionBody
from steerscope.serving.json_body import in_thread_if_long, json_body
from steerscope.serving.request import GenerationRequest
from steerscope.serving.schema import body_of
from steerscope.serving.sse import EventStream, WholeResponse
from steerscope.serving.state import Serving, serving_of

router = APIRouter()
_MESSAGE = 1000  # cost of a message beside its text, in characters


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(serving_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    serving = serving_of(request)
    serving.check_model(name)
    return JSONResponse(_model(serving))


def _model(serving: Serving) -> dict[str, object]:
    return {"id": serving.model_name, "object": "model", "created": int(serving.began), "owned_by": "steerscope"}


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
async def chat(request: Request) -> Response:
    return await _answer(request, await json_body(request, ChatBody.read))


@router.post("/v1/completions", openapi_extra=body_of(CompletionBody))
async def completions(request: Request) -> Response:
    return await _answer(request, await json_body(request, CompletionBody.read))


async def _answer(request: Request, body: ChatBody | CompletionBody) -> Response:
    prepared = await prepare(request, body)
    stall_s = serving_of(request).settings.stall_s
    return EventStream(prepared.chunks, stall_s) if body.stream else WholeResponse(prepared.whole, stall_s)


async def prepare(request: Request, body: ChatBody | CompletionBody, name: str | None = None) -> GenerationRequest:
    """Return a request that is planned and can run; `name` replaces its id of OpenAI's kind."""
    serving = serving_of(request)
    serving.check_model(body.model)
    prompts, echoes = await (_chat(serving, body) if isinstance(body, ChatBody) else _completion(serving, body))
    writer = Writer(isinstance(body, ChatBody), serving.model_name, body.include_usage, name)
    return GenerationRequest(serving, body, prompts, echoes, writer, request.scope["state"])


async def _chat(serving: Serving, body: ChatBody) -> tuple[list[Prompt], list[str]]:
    engine = serving.engine
    messages = [message.plain() for message in body.messages]

    def render() -> Prompt:
        return engine.render(
            messages,
            continue_final_message=bool(body.continue_final_message),
            template_options=body.chat_template_kwargs,
        )

    size = sum(_MESSAGE + len(message["content"]) for message in messages)
    return [await in_thread_if_long(render, size)], [""]


async def _completion(serving: Serving, body: CompletionBody) -> tuple[list[Prompt], list[str]]:
    engine = serving.engine
    given = body.prompts

    def tokenise() -> list[Prompt]:
        return [engine.tokenize(one if isinstance(one, str) else TokenPrompt(one)) for one in given]

    prompts = await in_thread_if_long(tokenise, sum(map(len, given)))
    if not body.echo:
        return prompts, [""] * len(given)
    return prompts, [one if isinstance(one, str) else _decoded(engine, one) for one in given]


def _decoded(engine: Engine, ids: Sequence[int]) -> str:
    """Decode a prompt. Ids that the model does not have are refused later, with every other problem."""
    fits = all(0 <= one < engine.facts.vocab for one in ids)
    return str(engine.tokenizer.decode(list(ids))) if fits else ""
