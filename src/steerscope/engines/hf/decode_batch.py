"""What the requests that decode together remember: each has a row of the cache.

Keys and values of all rows end at the same column, so the batch is left-padded and the model's own masks and positions
apply; a row that joins is copied to end there too, a row that leaves is replaced by the last one. Buffers are written
in place, never concatenated per token. States of linear attention, Mamba and convolutions have no columns: a row that
joins is appended to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

_FIRST_COLUMNS = 256
_SHORT = 8, 16  # tokens of prompts that are measured
_STATES = "conv_states", "recurrent_states"  # attributes of a layer: tensors [rows, …] by number
_FACTS = "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size"


def prompt_cache(config: PreTrainedConfig) -> Cache:
    """Return an empty cache for prompts. It keeps the whole past of sliding-window layers, which mask it themselves."""
    layers: list[CacheLayerMixin | LinearAttentionLayer] = []
    for layer in DynamicCache(config=config).layers:
        if not isinstance(layer, LinearAttentionLayer):
            layers.append(DynamicLayer())
        elif isinstance(layer, DynamicLayer):
            layers.append(LinearAttentionAndFullAttentionLayer(layer.number_of_states))
        else:
            layers.append(layer)
    return Cache(layers=layers)  # type: ignore[arg-type]


@dataclass(slots=True)
class Window:
    """The part of every layer's buffers that is in use: the first rows, and of them the columns [start, end)."""

    rows: int = 0
    start: int = 0
    end: int = 0


class _Layer(DynamicLayer):
    """Keys and values [rows, heads, columns, size] of one layer: the whole past, also of sliding-window layers, which
    mask it themselves."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        w = self.window
        stop = w.end + key_states.shape[-2]
        keys, values = _buffers(self)
        keys[: w.rows, :, w.end : stop] = key_states
        values[: w.rows, :, w.end : stop] = value_states
        return keys[: w.rows, :, w.start : stop], values[: w.rows, :, w.start : stop]

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start


class _MixedLayer(_Layer, LinearAttentionLayer):  # type: ignore[override] # as transformers' own mixed layers
    """A layer with attention and with states."""

    def __init__(self, window: Window, number_of_states: int) -> None:
        _Layer.__init__(self, window)
        LinearAttentionLayer.__init__(self, number_of_states)


def _buffers(layer: object) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, CacheLayerMixin)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


class BatchCache(Cache):
    """The cache of the running batch, whose rows have the same order as the engine's list of requests."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.window = Window()
        self.lengths: list[int] = []  # tokens of each row
        every = [self._layer_like(layer) for layer in prompt_cache(config).layers]
        self.own = [layer for layer in every if isinstance(layer, _Layer)]
        self.stateful = [layer for layer in every if isinstance(layer, LinearAttentionLayer)]
        super().__init__(layers=every)  # type: ignore[arg-type]

    def _layer_like(self, layer: object) -> _Layer | LinearAttentionLayer:
        if not isinstance(layer, LinearAttentionLayer):
            return _Layer(self.window)
        return _MixedLayer(self.window, layer.number_of_states) if isinstance(layer, DynamicLayer) else layer

    def join(self, prefilled: Cache, lengths: Sequence[int]) -> None:
        """Add rows from a left-padded prefill. If this raises, none has joined."""
        w = self.window
        new = prefilled.get_seq_length()
        rows = w.rows + len(lengths)
        end = max(w.end, new)
        fresh_states = [layer for layer in prefilled.layers if isinstance(layer, LinearAttentionLayer)]
        states = [_appended(*pair, w.rows) for pair in zip(self.stateful, fresh_states, strict=True)]
        with_columns = [layer for layer in prefilled.layers if isinstance(layer, DynamicLayer)]
        if not self._fits(rows, end):
            capacity = _buffers(self.own[0])[0].shape[0] if w.rows else 0
            self._move(with_columns, max(rows, capacity), _columns(end), end)
        for layer, theirs, tensors in zip(self.stateful, fresh_states, states, strict=True):
            _take_states(layer, theirs, tensors)
        for mine, theirs in zip(self.own, with_columns, strict=True):
            for buffer, fresh in zip(_buffers(mine), _buffers(theirs), strict=True):
                clear(buffer[w.rows : rows, :, : end - new])
                buffer[w.rows : rows, :, end - new : end] = fresh
        w.rows = rows
        w.end = end
        self.lengths += lengths
        self._narrow()

    def leave(self, row: int) -> None:
        """Free a row; the last row takes its place (the caller must move its own list alike)."""
        last = self.window.rows - 1
        if row != last:
            for layer in self.own:
                for buffer in _buffers(layer):
                    buffer[row] = buffer[last]
        for layer in self.stateful:
            for states in (getattr(layer, name) for name in _STATES):
                for number, tensor in states.items():
                    if tensor is not None:
                        tensor[row] = tensor[last]
                        states[number] = tensor[:last]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self.window.rows = last
        self._narrow()

    def inputs(self, tokens: Sequence[int], device: torch.device) -> dict[str, object]:
        """Return the inputs of the next step, which feeds each row a token."""
        self.make_room()
        return {
            "input_ids": torch.tensor([[token] for token in tokens], device=device),
            "attention_mask": self.mask(device),
            "position_ids": torch.tensor([[length] for length in self.lengths], device=device),
            "past_key_values": self,
        }

    def make_room(self) -> None:
        """Before a step: one more column, by sliding to the front or growing."""
        rows, columns = _buffers(self.own[0])[0].shape[0::2]
        width = self.window.end - self.window.start
        if self.window.end == columns:
            self._move(self.own, rows, columns if 2 * width < columns else 2 * columns, width)

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

    def _fits(self, rows: int, end: int) -> bool:
        """Return whether the buffers can hold this number of rows, ending at this column."""
        keys = self.own[0].keys
        if keys is None or rows > keys.shape[0] or end > keys.shape[-2]:
            return False
        if self.window.rows:
            return end == self.window.end
        return keys.shape[-2] <= 4 * _columns(end)  # one long text must not bloat the rest

    def _move(self, like: Sequence[object], rows: int, columns: int, end: int) -> None:
        """Copy what is in use to new buffers, where it ends at `end`: all layers or, without memory, none."""
        w = self.window
        start = end - (w.end - w.start)
        made: list[list[Tensor]] = []
        for mine, theirs in zip(self.own, like, strict=True):
            made.append([one.new_zeros(rows, one.shape[1], columns, one.shape[-1]) for one in _buffers(theirs)])
            for buffer, old in zip(made[-1], _buffers(mine) if w.rows else (), strict=False):
                buffer[: w.rows, :, start:end] = old[: w.rows, :, w.start : w.end]
        for layer, (keys, values) in zip(self.own, made, strict=True):
            layer.keys = keys
            layer.values = values
            layer.is_initialized = True
        w.start = start
        w.end = end


def _appended(
    mine: LinearAttentionLayer, fresh: LinearAttentionLayer, rows: int
) -> dict[str, dict[int, Tensor | None]]:
    """Return the states of a layer with the rows of a prefill behind the first `rows` of its own."""
    return {
        name: {
            number: torch.cat([getattr(mine, name)[number][:rows], tensor]) if rows and tensor is not None else tensor
            for number, tensor in getattr(fresh, name).items()
        }
        for name in _STATES
    }


def _take_states(
    mine: LinearAttentionLayer, fresh: LinearAttentionLayer, tensors: dict[str, dict[int, Tensor | None]]
) -> None:
    for name, states in tensors.items():
        setattr(mine, name, states)
    for name in _FACTS:
        setattr(mine, name, dict(getattr(fresh, name)))
    mine.device, mine.dtype = fresh.device, fresh.dtype


def clear(padding: Tensor) -> None:
    """Clear a row's columns before its first token: a masked column still has the weight 0, and 0 · NaN of a request
    that had the row before and failed is NaN."""
    padding.zero_()


def cache_bytes(model: PreTrainedModel, batch: int, tokens: int) -> int:
    """Return the bytes of the cache of `batch` texts of `tokens` tokens, extrapolated from two short prompts."""
    sizes = []
    for length in _SHORT:
        cache = prompt_cache(model.config)
        model(input_ids=torch.zeros(1, length, dtype=torch.long, device=model.device), past_key_values=cache)
        sizes.append(sum(map(_layer_bytes, cache.layers)))
    per_token = (sizes[1] - sizes[0]) // (_SHORT[1] - _SHORT[0])
    per_text = sizes[0] - per_token * _SHORT[0]
    return batch * (per_token * _columns(tokens) + per_text)


def _layer_bytes(layer: object) -> int:
    size = sum(buffer.nbytes for buffer in _buffers(layer)) if isinstance(layer, DynamicLayer) else 0
    if isinstance(layer, LinearAttentionLayer):
        tensors = (tensor for name in _STATES for tensor in getattr(layer, name).values())
        size += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return size


def _columns(end: int) -> int:
    columns = _FIRST_COLUMNS
    while columns <= end:
        columns *= 2
    return columns
