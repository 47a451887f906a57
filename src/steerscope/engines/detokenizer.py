"""From token ids to text, piece by piece, and stop strings in that text.

The pieces concatenate to exactly the decode of all ids. What could still change is held back: an unfinished UTF-8
character, and a run of byte-fallback tokens, which a decoder judges as a whole. Stop strings are looked for in the
text, not in the tokens, so they are found across token boundaries; text that may be the beginning of one is held back.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "�"
_UNDECIDED_TOKENS = 3  # of a window that ends in an unfinished character, these may still change it
_LONGEST_WINDOW = 8  # tokens; above it the others are dropped


class Decoder:
    """What all requests share: the decode function, byte-fallback ids, and the texts of single tokens."""

    def __init__(self, tokenizer: Any) -> None:  # like one of transformers
        self._tokenizer = tokenizer
        self.byte_ids = frozenset(i for text, i in tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(text))
        self.single = functools.cache(self._single)
        self.silent = functools.cache(self._silent)

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens, and without the clean-up of spaces that would change text already shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _single(self, token_id: int) -> str:
        return self.decode([token_id])

    def _silent(self, token_id: int) -> bool:
        """Whether a token has no text anywhere: a special token, or an id that the tokenizer does not have. A space
        that is dropped only at the start of a text is not silent."""
        return not self.single(token_id) and not self.decode([token_id, token_id])


class Detokenizer:
    """The text of one request, decoded from a few tokens at a time.

    A decode starts at an anchor: an earlier token whose text is already out, so that a decoder that treats the first
    token differently (a stripped leading space) treats only the anchor so. The last character is held back while it
    is U+FFFD: it may be the beginning of a longer one. Such a beginning has at most three bytes, and every token in
    the window at least one. So the last three tokens decide how it goes on, and earlier ones are dropped.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # from the anchor on, without silent tokens
        self._n_shown = 0  # characters of the window's decode that were already returned

    def push(self, token_id: int) -> str:
        """Return the text that has become certain with this token."""
        if self._decoder.silent(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._decoder.byte_ids:
            return ""
        text = self._decoder.decode(self._window)
        if not text.endswith(_UNFINISHED):
            piece = text[self._n_shown :]
            self._window = [token_id]
            self._n_shown = len(self._decoder.single(token_id))
            return piece
        piece = text[self._n_shown : -1]
        self._n_shown = len(text) - 1
        if len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-_UNDECIDED_TOKENS:]
            self._n_shown = len(self._decoder.decode(self._window)) - 1
        return piece

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        text = self._decoder.decode(self._window)
        piece = text[self._n_shown :]
        self._n_shown = len(text)
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
        held = self._held
        self._held = ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text that begins the stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
