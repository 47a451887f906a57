"""From token ids to text, piece by piece, and stop strings in that text.

The pieces concatenate to exactly the decode of all ids. What could still change is held back: an unfinished UTF-8
character, and a run of byte-fallback tokens, which a decoder judges as a whole. Stop strings are looked for in the
text, not in the tokens, so they are found across token boundaries; text that may be the beginning of one is held back.
"""

import re
from collections.abc import Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "�"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], **options: bool) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


class Decoder:
    """What all requests share: the decode function, byte-fallback ids, and the texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.byte_ids = frozenset(i for text, i in tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(text))
        self._single: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens, and without the clean-up of spaces that would change text already shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def single(self, token_id: int) -> str:
        text = self._single.get(token_id)
        if text is None:
            text = self._single[token_id] = self.decode([token_id])
        return text


class Detokenizer:
    """One request's text. A decode starts at an anchor: the last token at a safe boundary that has text of its own, so
    that a decoder that treats the first token differently (a stripped leading space) treats only the anchor so."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._anchor = 0
        self._shown = ""  # the part of the decode from the anchor on that was already returned
        self._in_bytes = False

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        self._ids.append(token_id)
        single = self._decoder.single(token_id)
        if token_id in self._decoder.byte_ids:
            self._in_bytes = True
        elif single:  # a token without text, such as a skipped special one, does not end a run of bytes
            self._in_bytes = False
        if self._in_bytes:
            return ""
        text = self._decoder.decode(self._ids[self._anchor :])
        if text.endswith(_UNFINISHED):
            return ""
        piece = text[len(self._shown) :]
        if single:
            self._anchor, self._shown = len(self._ids) - 1, single
        else:
            self._shown = text
        return piece

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        text = self._decoder.decode(self._ids[self._anchor :])
        piece, self._shown = text[len(self._shown) :], text
        return piece


class StopStrings:
    """Finds the first stop string in a growing text and holds back what may be the beginning of one.

    The first is the one that is complete first, so that the text does not depend on how tokens cut it into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is certain to come before any stop string."""
        if not self._stops:
            return piece
        text = self._held + piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that begins the stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
