"""Prompts on their way into the batch.

A step runs one forward of prompt tokens: several short prompts together, or the next piece of a long one. A long prompt
keeps its own cache (`Row.prefilled`) until its last piece, and then joins the batch. Short and long prompts take turns,
so that neither waits for all of the other.
"""

from collections.abc import Sequence

import torch

from steerscope.engines.hf.sequence import Row, TokenSpan

_MAX_TOKENS = 8192  # padded tokens of one forward
_SHARED_CHUNKS = 4  # of a forward of several short prompts beside streams: many that come at once should not wait long


class PrefillQueue:
    """Rows that were admitted and are not in the batch yet, oldest first."""

    def __init__(self, chunk_tokens: int, in_pieces: bool) -> None:
        self.chunk_tokens = chunk_tokens
        self.in_pieces = in_pieces
        self.rows: list[Row] = []
        self._long_is_next = True

    def next_spans(self, streaming: bool) -> list[TokenSpan]:
        """Return what the next forward feeds: short prompts together, or a piece of a longer one (all of it where
        pieces are not exact). Beside streams a piece is a chunk."""
        max_tokens = self.chunk_tokens if streaming else _MAX_TOKENS
        short = [row for row in self.rows if not row.fed and row.prompt_length <= max_tokens]
        long = next((row for row in self.rows if row not in short), None)
        take_long = long is not None and (self._long_is_next or not short)
        self._long_is_next = not take_long
        if long is not None and take_long:
            stop = min(long.fed + max_tokens, long.prompt_length) if self.in_pieces else long.prompt_length
            return [TokenSpan(long, long.fed, stop)]
        return [TokenSpan.rest(row) for row in _group(short, min(_SHARED_CHUNKS * max_tokens, _MAX_TOKENS))]


def _group(rows: list[Row], max_tokens: int) -> list[Row]:
    """The first rows that fit one forward when they are padded to the same length."""
    longest = 0
    for count, row in enumerate(rows, 1):
        longest = max(longest, row.prompt_length)
        if count > 1 and (count * longest > max_tokens or row.alone or rows[0].alone):
            return rows[: count - 1]
    return rows


def prefill_inputs(texts: Sequence[Sequence[int]], start: int, device: torch.device) -> dict[str, object]:
    """Return the inputs of a forward that feeds these tokens, left-padded to one length. `start` is the position of the
    first one; only a piece that is alone begins later than at 0."""
    width = max(map(len, texts))
    pads = torch.tensor([[width - len(text)] for text in texts], device=device)
    columns = torch.arange(width, device=device).unsqueeze(0)
    return {
        "input_ids": torch.tensor([[*[0] * (width - len(text)), *text] for text in texts], device=device),
        "attention_mask": columns >= pads if any(len(text) < width for text in texts) else None,
        "position_ids": (columns - pads).clamp(min=0) + start,
    }
