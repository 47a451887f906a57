"""Log probabilities as OpenAI's two routes write them, and the texts of single tokens."""

import json
from collections.abc import Sequence
from functools import lru_cache

from steerscope.engines.api import Engine
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.results import TokenLogprobs


def _byte_of_sign() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one sign: printable ones as themselves, others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_of_sign()


class TokenTexts:
    """The text and the bytes of a token by itself; a part of a character has bytes, but no text."""

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
        if not text:  # a special token: its name is all there is to show
            return name, None
        if "\ufffd" not in text:
            return text, list(text.encode())
        known = all(sign in _BYTES for sign in name)
        return text, [_BYTES[sign] for sign in name] if known else None

    def chat(self, found: Sequence[TokenLogprobs]) -> str:
        return json.dumps({"content": [self._chat(one) for one in found], "refusal": None})

    def _chat(self, one: TokenLogprobs) -> dict[str, object]:
        return {
            **self._shown(one.token_id, one.logprob),
            "top_logprobs": [self._shown(token, value) for token, value in one.top],
        }

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
    """JSON has no infinity; OpenAI writes −9999 for what is next to impossible."""
    return max(value, -9999.0)
