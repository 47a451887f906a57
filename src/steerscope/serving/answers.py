"""Answers of the OpenAI routes as JSON text: chunks of a stream, and whole ones.

The text that all chunks of a request share is made once; a token then costs one escaped string and one join. Nothing
here is validated again, and no object is built per token.
"""

import json
import random
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

from steerscope.engines.results import Choice, FinishReason, Generation

_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "stop_string": "stop", "rule": "stop"}


def finish(choice: Choice) -> str:
    """OpenAI's word for it; what exactly it was is in the `steerscope` object."""
    return f'"{_REASONS[choice.finish_reason]}"'


class Writer:
    """Writes the answer to one request of either route."""

    def __init__(self, chat: bool, model: str, include_usage: bool, name: str | None = None) -> None:
        self.chat = chat
        self.id = name or f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}"
        kind = "chat.completion" if chat else "text_completion"
        about = f'"created":{int(time.time())},"model":{quoted(model)}'
        self._whole = f'{{"id":"{self.id}","object":"{kind}",{about},"choices":['
        self._chunk = f'data: {{"id":"{self.id}","object":"{kind}{".chunk" if chat else ""}",{about},"choices":['
        self._usage = ',"usage":null' if include_usage else ""
        self._before = ',"delta":{"content":' if chat else ',"text":'
        self._between = '},"logprobs":' if chat else ',"logprobs":'

    # --- chunks

    def opening(self, index: int) -> str:
        """A chat's first chunk says who speaks."""
        start = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return f'{self._chunk}{{"index":{index},{start}}}]{self._usage}}}\n\n'

    def token(self, index: int, text: str, logprobs: str = "null", extra: str = "") -> str:
        tail = f',"steerscope":{extra}}}\n\n' if extra else "}\n\n"
        return (
            f'{self._chunk}{{"index":{index}{self._before}{quoted(text)}{self._between}{logprobs}'
            f',"finish_reason":null}}]{self._usage}{tail}'
        )

    def last(self, index: int, choice: Choice, extra: str = "") -> str:
        tail = f',"steerscope":{extra}}}\n\n' if extra else "}\n\n"
        what = '"delta":{}' if self.chat else '"text":""'
        return (
            f'{self._chunk}{{"index":{index},{what},"logprobs":null,"finish_reason":{finish(choice)}}}]'
            f"{self._usage}{tail}"
        )

    def usage_chunk(self, done: Sequence[Generation]) -> str:
        return f'{self._chunk}],"usage":{usage(done)}}}\n\n'

    # --- whole

    def choice(self, index: int, choice: Choice, text: str, logprobs: str = "null", extra: str = "") -> str:
        said = f'"message":{{"role":"assistant","content":{quoted(text)},"refusal":null}}'
        what = said if self.chat else f'"text":{quoted(text)}'
        tail = f',"steerscope":{extra}' if extra else ""
        return f'{{"index":{index},{what},"logprobs":{logprobs},"finish_reason":{finish(choice)}{tail}}}'

    def whole(self, choices: Sequence[str], done: Sequence[Generation]) -> str:
        return f'{self._whole}{",".join(choices)}],"usage":{usage(done)}}}'


def usage(done: Sequence[Generation]) -> str:
    prompt = sum(len(one.prompt_token_ids) for one in done)
    made = sum(len(choice.token_ids) for one in done for choice in one.choices)
    return json.dumps({"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made})
