"""Log probabilities in the formats of OpenAI's two routes, and the texts of single tokens."""

import json
from collections.abc import Sequence
from functools import lru_cache

from steerscope.engines.api import Engine
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.results import TokenLogprobs


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character of byte-level tokenizers: printable bytes are themselves, others 256 and up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_of_character()


class TokenTexts:
    """The text and the bytes of single tokens; a part of a character has bytes, but no text."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer
        self.decoder = Decoder(engine.tokenizer)  # type: ignore[arg-type]
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
        known = all(character in _BYTES for character in name)
        return text, [_BYTES[character] for character in name] if known else None

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
