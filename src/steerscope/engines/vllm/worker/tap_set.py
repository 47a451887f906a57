"""The taps of one worker, with the tensors that they read."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from steerscope.core.slot_table import Key, SlotPool, SlotTable
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.engines.vllm.worker.lenses import Group, places_of
from steerscope.engines.vllm.worker.model_layout import Layers, attach, in_norms
from steerscope.engines.vllm.worker.device import RowPool
from steerscope.engines.vllm.worker.tap import Tap, TapTables


class TapSet:
    def __init__(
        self,
        layers: Layers,
        keys: Sequence[Key],
        settings: VLLMSettings,
        pool: RowPool,
        gates: Tensor,
        max_requests: int,
        norms: bool,
    ) -> None:
        """Make taps for the (layer, site) pairs of `keys` and put them into the model. With `norms`, taps may be parts
        of the norms that follow them."""
        self.keys, self.settings = tuple(keys), settings
        self.hidden, self.device = pool.cells.shape[1], pool.cells.device
        self._first_layer = min(layers.found)
        self.table = SlotTable(self.hidden, settings.slots, self.device)
        vectors, coefficients = self.table.reserve(self.keys)
        self.groups = SlotPool(settings.groups, "capture group")
        self.orders = torch.full((len(self.keys), settings.groups), -1, dtype=torch.int32, device=self.device)
        self._before = torch.zeros(settings.groups, dtype=torch.bool, device=self.device)
        self._precomputed = None
        if settings.steer:
            self._precomputed = pool.make_precomputed(vectors, coefficients, self.orders, self._before, max_requests)
        self._staged = None
        if norms and in_norms(layers, self.keys):
            self._staged = pool.make_stage(len(self.keys), max_requests)
        # Cells of one row of partial sums; 0: taps do not sum rows.
        self.span = 0 if self._staged is None else 4 // pool.cells.dtype.itemsize
        self.tables = TapTables(
            pool.cells, pool.index, gates, self._before, pool.overflow_flags, self._staged, self.orders
        )
        self.memory = pool.cells, vectors, coefficients, self._precomputed, self._staged
        self.taps = {key: self._make(number, key) for number, key in enumerate(self.keys)}
        self.share_of = functools.lru_cache(maxsize=256)(self._share_of)  # many requests capture the same taps
        attach(layers, self.taps, norms)

    def _make(self, number: int, key: Key) -> Tap:
        vectors, coefficients = self.table.tensors(key)
        return Tap(
            self.tables,
            vectors,
            coefficients,
            steer=self.settings.steer,
            capture=self.settings.capture,
            noop=self.settings.noop,
            last=self.device.type == "cuda" and number == len(self.keys) - 1,
            precomputed=None if self._precomputed is None else self._precomputed[number],
            order=self.orders[number],
            staged=None if self._staged is None else self._staged[number],
        )

    def _share_of(self, keys: tuple[Key, ...]) -> tuple[tuple[Key, ...], int]:
        """Return the keys that this worker has, and the number of those on earlier pipeline stages."""
        return tuple(key for key in keys if key in self.taps), sum(layer < self._first_layer for layer, _ in keys)

    def set_group(self, number: int, group: Group) -> None:
        """Let the taps capture and leave for lenses what a group says, for tokens with its number."""
        self._before[number] = group[1]
        places = torch.tensor(places_of(group, self.keys), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.orders[:, number].copy_(places, non_blocking=True)
