"""The requests that decode together: each has a row of the cache, at the same index."""

from collections.abc import Sequence

import torch
from transformers.cache_utils import DynamicCache

from steerscope.engines.hf.kv import BatchCache
from steerscope.engines.hf.sequence import Row, TokenSpan


class DecodeBatch:
    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.rows: list[Row] = []
        self.cache = BatchCache(layers)

    def join(self, rows: Sequence[Row], prefilled: DynamicCache) -> None:
        """Add requests whose prompts were computed together. If this raises, none has joined."""
        self.cache.join(prefilled, [row.prompt_length for row in rows])
        self.rows += rows

    def leave(self, row: Row) -> None:
        """Remove a request; the last one takes its place."""
        at = self.rows.index(row)
        self.cache.leave(at)
        self.rows[at] = self.rows[-1]
        self.rows.pop()

    def clear(self) -> list[Row]:
        """Remove all requests and return them."""
        rows, self.rows = self.rows, []
        self.cache = BatchCache(self._layers)
        return rows

    def spans(self) -> list[TokenSpan]:
        """Return what the next step feeds."""
        return [TokenSpan.rest(row) for row in self.rows]

    def inputs(self, device: torch.device) -> dict[str, object]:
        """Return the inputs of the next step."""
        self.cache.make_room()
        return {
            "input_ids": torch.tensor([[row.history[-1]] for row in self.rows], device=device),
            "attention_mask": self.cache.mask(device),
            "position_ids": torch.tensor([[row.fed] for row in self.rows], device=device),
            "past_key_values": self.cache,
        }
