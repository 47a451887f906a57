"""Log probabilities in the formats of OpenAI's two routes, and the texts of single tokens."""

import json
from collections.abc import Sequence
from functools import lru_cache

from steerscope.engines.api import Engine
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.results import TokenLogprobs


class TokenTexts:
    """The text and the bytes of single tokens; a part of a character has bytes, but no text."""

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

    def chat(self, found: Sequence[TokenLogprobs]) -> str:
        return json.dumps({"content": [self._chat(one) for one in found], "refusal": None})

    def _chat(self, one: TokenLogprobs) -> dict[str, object]:
        top = [self._shown(token, value) for token, value in one.top]
        return {**self._shown(one.token_id, one.logprob), "top_logprobs": top}

    def _shown(self, token: int, value: float) -> dict[str, object]:
        text, data = self.of(token)
        return {"token": text, "logprob": _finite(value), "bytes": data}

    def completion(self, found: Sequence[TokenLogprobs], offset: int) -> str:
        """`offset` is where the first token's text begins."""
        tokens = [self.of(one.token_id)[0] for one in found]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        tops = []
        for one in found:
            values = {self.of(token)[0]: _finite(value) for token, value in one.top}
            tops.append({**values, self.of(one.token_id)[0]: _finite(one.logprob)} if one.top else None)
        about = {"tokens": tokens, "token_logprobs": [_finite(one.logprob) for one in found]}
        return json.dumps({**about, "top_logprobs": tops, "text_offset": offsets})


def _finite(value: float) -> float:
    """Limit to −9999, as OpenAI does: JSON has no infinity."""
    return max(value, -9999.0)
