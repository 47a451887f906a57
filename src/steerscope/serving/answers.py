"""Answers of the OpenAI routes as JSON: chunks of a stream and whole answers, with their log probabilities.

The text that all chunks of a request share is made once: a token without more costs one escaped string and one join.
"""

import random
import time
from collections.abc import Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted

from pydantic_core import to_json

from steerscope.engines.api import Engine
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.results import Choice, FinishReason, Generation, TokenLogprobs

Json = dict[str, object]
_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "stop_string": "stop", "rule": "stop"}


class Writer:
    """Writes the answer to one request of either route."""

    def __init__(self, chat: bool, model: str, include_usage: bool, name: str | None = None) -> None:
        self.chat = chat
        self.id = name or f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}"
        kind = "chat.completion" if chat else "text_completion"
        self._about = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        head = _text({**self._about, "object": kind + ".chunk" * chat})[:-1]
        self._chunk = f'data: {head},"choices":['
        self._usage = ',"usage":null' if include_usage else ""

    # --- chunks

    def opening(self, index: int) -> str:
        """Return a chat's first chunk, which names the role."""
        delta = {"role": "assistant", "content": ""}
        return self._of(_text({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}), None)

    def token(self, index: int, text: str, logprobs: Json | None = None, extra: object = None) -> str:
        what = f'"delta":{{"content":{quoted(text)}}}' if self.chat else f'"text":{quoted(text)}'
        more = "null" if logprobs is None else _text(logprobs)
        return self._of(f'{{"index":{index},{what},"logprobs":{more},"finish_reason":null}}', extra)

    def last(self, index: int, choice: Choice, extra: object = None) -> str:
        what = {"delta": {}} if self.chat else {"text": ""}
        reason = _REASONS[choice.finish_reason]
        return self._of(_text({"index": index, **what, "logprobs": None, "finish_reason": reason}), extra)

    def usage_chunk(self, done: Sequence[Generation]) -> str:
        return f'{self._chunk}],"usage":{_text(_usage(done))}}}\n\n'

    def _of(self, choice: str, extra: object) -> str:
        more = "" if extra is None else f',"steerscope":{_text(extra)}'
        return f"{self._chunk}{choice}]{self._usage}{more}}}\n\n"

    # --- whole

    def choice(self, index: int, choice: Choice, text: str, logprobs: Json | None, extra: object = None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        found: Json = {"index": index, **({"message": message} if self.chat else {"text": text})}
        found |= {"logprobs": logprobs, "finish_reason": _REASONS[choice.finish_reason]}
        return found if extra is None else {**found, "steerscope": extra}

    def whole(self, choices: Sequence[Json], done: Sequence[Generation]) -> bytes:
        return to_json({**self._about, "choices": choices, "usage": _usage(done)})


def _text(data: object) -> str:
    return to_json(data).decode()


def _usage(done: Sequence[Generation]) -> Json:
    prompt = sum(len(one.prompt_token_ids) for one in done)
    generated = sum(len(choice.token_ids) for one in done for choice in one.choices)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class TokenTexts:
    """Log probabilities in the formats of both routes, with the text and the bytes of single tokens. A part of a
    character has bytes, but no text."""

    def __init__(self, engine: Engine) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # byte-level tokenizers' character per byte

        self._tokenizer = engine.tokenizer
        self.decoder = Decoder(engine.tokenizer)  # type: ignore[arg-type]
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        name = self._tokenizer.convert_ids_to_tokens(token) or ""  # a model may have more ids than its tokenizer
        assert isinstance(name, str)
        if token in self.decoder.byte_ids:
            byte = int(name[1:-1], 16)
            return (chr(byte) if byte < 128 else "\ufffd"), [byte]
        text = self.decoder.single(token)
        if not text:  # a special token
            return name, None
        if "\ufffd" not in text:
            return text, list(text.encode())
        known = all(character in self._bytes for character in name)
        return text, [self._bytes[character] for character in name] if known else None

    def chat(self, found: Sequence[TokenLogprobs]) -> Json:
        content = [
            {**self._shown(one.token_id, one.logprob), "top_logprobs": [self._shown(*top) for top in one.top]}
            for one in found
        ]
        return {"content": content, "refusal": None}

    def _shown(self, token: int, value: float) -> Json:
        text, data = self.of(token)
        return {"token": text, "logprob": _finite(value), "bytes": data}

    def completion(self, found: Sequence[TokenLogprobs], offset: int) -> Json:
        """`offset` is where the first token's text begins."""
        tokens = [self.of(one.token_id)[0] for one in found]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        values = [_finite(one.logprob) for one in found]
        tops = [
            {self.of(token)[0]: _finite(value) for token, value in (*one.top, (one.token_id, one.logprob))}
            if one.top
            else None
            for one in found
        ]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _finite(value: float) -> float:
    """Limit to −9999, as OpenAI does: JSON has no infinity."""
    return max(value, -9999.0)
