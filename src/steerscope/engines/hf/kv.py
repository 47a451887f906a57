"""A KV cache whose rows come and go. All rows end at the same column, so the batch is left-padded and the model's own
masks and positions apply; a row that joins is copied to end there too, a row that leaves is replaced by the last one.
Buffers are written in place, never concatenated per token."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

_FIRST_COLUMNS = 256


class _Window:
    """What all layers share: rows in use and the columns [start, end) they occupy."""

    def __init__(self) -> None:
        self.rows = self.start = self.end = 0


class _Layer(CacheLayerMixin):
    """Keys and values [rows, heads, columns, size] of one layer."""

    is_sliding = False  # the whole past is kept; sliding-window layers mask it themselves

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (torch.zeros_like(x[:0]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        w = self.window
        stop = w.end + key_states.shape[-2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[: w.rows, :, w.end : stop] = key_states
        self.values[: w.rows, :, w.end : stop] = value_states
        return self.keys[: w.rows, :, w.start : stop], self.values[: w.rows, :, w.start : stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        return -1


class BatchCache(Cache):
    """The cache of the running batch."""

    def __init__(self, layers: int) -> None:
        self.window = _Window()
        self.lengths: list[int] = []  # tokens of each row
        self.own = [_Layer(self.window) for _ in range(layers)]
        super().__init__(layers=list(self.own))

    def join(self, prefilled: DynamicCache, lengths: Sequence[int]) -> None:
        """Add rows from a left-padded prefill."""
        w = self.window
        new = prefilled.get_seq_length()
        end = max(w.end, new)
        rows = w.rows + len(lengths)
        made: list[tuple[_Layer, str, Tensor]] = []
        try:
            for mine, theirs in zip(self.own, prefilled.layers, strict=True):
                for name in ("keys", "values"):
                    fresh: Tensor = getattr(theirs, name)
                    made.append((mine, name, self._with_room(getattr(mine, name), fresh, rows, end, w)))
                    made[-1][2][w.rows : rows, :, end - new : end] = fresh
        except Exception:  # all layers or none: an allocation may fail half-way
            for layer in self.own:
                for buffer in (layer.keys, layer.values):
                    if buffer is not None:
                        buffer[w.rows :] = 0  # as `leave` does
            raise
        self._commit(made)
        w.rows, w.end = rows, end
        self.lengths += lengths
        self._narrow()

    def leave(self, row: int) -> None:
        """Free a row; the last row takes its place (the caller must move its own list alike).

        The free row is cleared: a masked column still has the weight 0, and 0 · NaN of a failed request is NaN.
        """
        w = self.window
        last = w.rows - 1
        for layer in self.own:
            for buffer in (layer.keys, layer.values):
                assert buffer is not None
                if row != last:
                    buffer[row] = buffer[last]
                buffer[last] = 0
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        w.rows = last
        self._narrow()

    def make_room(self) -> None:
        """Before a step: one more column, by sliding to the front or growing."""
        w = self.window
        sample = self.own[0].keys
        assert sample is not None
        if w.end < sample.shape[-2]:
            return
        width = w.end - w.start
        made: list[tuple[_Layer, str, Tensor]] = []
        for layer in self.own:
            for name in ("keys", "values"):
                old: Tensor = getattr(layer, name)
                columns = old.shape[-2] if 2 * width < old.shape[-2] else 2 * old.shape[-2]
                buffer = old.new_zeros(*old.shape[:2], columns, old.shape[-1])
                buffer[: w.rows, :, :width] = old[: w.rows, :, w.start : w.end]
                made.append((layer, name, buffer))
        self._commit(made)
        w.start, w.end = 0, width

    def advance(self) -> None:
        """After a step: every row is one token longer."""
        self.window.end += 1
        self.lengths = [length + 1 for length in self.lengths]
        self._narrow()

    def mask(self, device: torch.device) -> Tensor | None:
        """[rows, columns + 1] for the next step: which columns hold tokens of the row; None when all do."""
        width = self.window.end - self.window.start
        if all(length == width for length in self.lengths):
            return None
        lengths = torch.tensor(self.lengths, device=device).unsqueeze(1)
        return torch.arange(width + 1, device=device).unsqueeze(0) >= width - lengths

    def _narrow(self) -> None:
        w = self.window
        w.start = w.end - max(self.lengths, default=0)
        if not self.lengths:
            w.start = w.end = 0

    @staticmethod
    def _with_room(buffer: Tensor | None, like: Tensor, rows: int, end: int, w: _Window) -> Tensor:
        """A buffer of at least `rows` × `end`, with the present rows shifted to end at `end`."""
        columns = _FIRST_COLUMNS
        while columns <= end:
            columns *= 2
        if buffer is not None and rows <= buffer.shape[0] and end <= buffer.shape[-2]:
            stays = end == w.end if w.rows else buffer.shape[-2] <= 4 * columns  # one long text must not bloat the rest
            if stays:
                return buffer
        have = buffer.shape[0] if buffer is not None and w.rows else 0
        grown = like.new_zeros(max(rows, have), like.shape[1], columns, like.shape[-1])
        if buffer is not None and w.rows:
            width = w.end - w.start
            grown[: w.rows, :, end - width : end] = buffer[: w.rows, :, w.start : w.end]
        return grown

    @staticmethod
    def _commit(made: Sequence[tuple[_Layer, str, Tensor]]) -> None:
        for layer, name, buffer in made:
            setattr(layer, name, buffer)
            layer.is_initialized = True
