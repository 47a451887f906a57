"""A model provider for Inspect AI: `inspect eval task.py --model steerscope/NAME --model-base-url http://…`.

Model arguments are options of every request, as JSON or as Python values:

    -M steer='[{"op": "add", "vector": "happy", "scale": 6, "layers": "10-14"}]'  -M watch='{"pack": "moods"}'

Readings, firings of rules and the id of a capture are under `steerscope` in the output's metadata.
"""

import json
from dataclasses import asdict
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelCall,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.model._model import RetryDecision
from inspect_ai.tool import ToolChoice, ToolInfo

from steerscope.client import calls
from steerscope.client.answers import ServerChoice, ServerError, answer_of
from steerscope.client.clients import AsyncClient
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering
from steerscope.specs.watch import Watch

_SAMPLING = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
_SAMPLING |= {"stop_seqs": "stop", "num_choices": "n"}
_REFUSED = [
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "best_of",
    "response_schema",
    "logprobs",
    "extra_body",
]
_ARGUMENTS = {"steer": Steering.parse, "capture": Capture.parse, "watch": Watch.parse}
_STOPS: dict[str, StopReason] = {"stop": "stop", "length": "max_tokens"}
MOST_TOKENS = 1024  # when a task sets no limit


@modelapi(name="steerscope")
class SteerscopeAPI(ModelAPI):
    """A model behind `steerscope serve`."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 (Inspect's own signature)
        **arguments: object,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [calls.API_KEY], config)
        if unknown := arguments.keys() - _ARGUMENTS:
            remedy = "give steer, capture or watch"
            raise InvalidRequest([Problem(name, "is no model argument", remedy) for name in sorted(unknown)])
        given = {name: _plain(value) for name, value in arguments.items() if value is not None}
        self._options: Any = {
            name: value if name == "steer" and isinstance(value, str) else _ARGUMENTS[name](value)
            for name, value in given.items()
        }
        self._client = AsyncClient(base_url or calls.DEFAULT_URL, api_key=self.api_key, model=model_name)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        del tool_choice
        messages = _messages(input, tools)
        body = {"model": self.model_name, **calls.chat_body(messages, _sampling(config), self._options)}
        answered = await self._client.post("/v1/chat/completions", body)
        answer = answer_of(answered)
        used = answered.get("usage") or {}
        output = ModelOutput(
            model=answer.model,
            choices=[self._choice(choice) for choice in answer.choices],
            usage=ModelUsage(
                input_tokens=used.get("prompt_tokens", 0),
                output_tokens=used.get("completion_tokens", 0),
                total_tokens=used.get("total_tokens", 0),
            ),
            metadata={"steerscope": _found(answer.choices[0])},
        )
        return output, ModelCall.create(body, answered)

    def _choice(self, choice: ServerChoice) -> ChatCompletionChoice:
        message = ChatMessageAssistant(content=choice.text, model=self.model_name, source="generate")
        return ChatCompletionChoice(message=message, stop_reason=_STOPS.get(choice.finish_reason or "", "unknown"))

    def max_tokens(self) -> int | None:
        return MOST_TOKENS

    def should_retry(self, ex: Exception) -> bool | RetryDecision:
        if not isinstance(ex, ServerError):
            return False
        if ex.status == 429:
            return RetryDecision.rate_limit(ex.retry_after)
        return ex.status in (0, 503)

    def is_auth_failure(self, ex: Exception) -> bool:
        return isinstance(ex, ServerError) and ex.status == 401

    async def aclose(self) -> None:
        await self._client.close()


def _plain(given: object) -> object:
    """Parse JSON lists and objects, which `-M` passes as text."""
    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):
        return json.loads(given)
    return given


def _messages(given: list[ChatMessage], tools: list[ToolInfo]) -> list[dict[str, str]]:
    problems = [Problem("tools", "the server supports none", "use a solver without tools")] if tools else []
    for i, message in enumerate(given):
        only_text = isinstance(message.content, str) or all(part.type == "text" for part in message.content)
        if message.role == "tool" or not only_text:
            problems.append(Problem(f"messages[{i}]", "is not text", "send only text"))
    if problems:
        raise InvalidRequest(problems)
    return [{"role": message.role, "content": message.text} for message in given]


def _sampling(config: GenerateConfig) -> Sampling:
    refused = [name for name in _REFUSED if getattr(config, name)]
    if refused:
        raise InvalidRequest([Problem(name, "is not supported", "leave it out") for name in refused])
    given = {ours: value for name, ours in _SAMPLING.items() if (value := getattr(config, name)) is not None}
    return Sampling.parse({"temperature": 1.0, "max_tokens": MOST_TOKENS, **given})


def _found(choice: ServerChoice) -> dict[str, Any]:
    found = asdict(choice)
    return {name: found[name] for name in ("readings", "firings", "capture")}
