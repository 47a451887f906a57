"""The taps of one worker, with the tensors that they read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from steerscope.core.slot_table import Key, SlotPool, SlotTable
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.engines.vllm.worker.device import RowPool
from steerscope.engines.vllm.worker.index_layout import WATCHED
from steerscope.engines.vllm.worker.model_layout import Layers, attach
from steerscope.engines.vllm.worker.tap import Tap, TapTables

Group = tuple[tuple[Key, ...], bool, Key | None]  # captured taps, whether before steering, and the watched tap


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
        self.keys = tuple(keys)
        self.hidden = pool.cells.shape[1]
        self.device = pool.cells.device
        on_gpu = self.device.type == "cuda"
        n_taps = len(self.keys)
        self._first_layer = min(layers.found)
        self.table = SlotTable(self.hidden, settings.slots, self.device)
        vectors, coefficients = self.table.reserve(self.keys)
        self.groups = SlotPool(settings.groups, "capture group")
        self._orders = torch.full((n_taps, settings.groups), -1, dtype=torch.int32, device=self.device)
        self._before = torch.zeros(settings.groups, dtype=torch.bool, device=self.device)
        precomputed = torch.zeros(n_taps, 0, device=self.device)
        if settings.steer:
            precomputed = pool.make_precomputed(vectors, coefficients, self._orders, self._before, max_requests)
        self.memory = pool.cells, vectors, coefficients, precomputed
        self.taps: dict[Key, Tap] = {}
        for i, key in enumerate(self.keys):
            steering = *self.table.tensors(key), gates
            tables = TapTables(pool.cells, pool.index, *steering, self._orders[i], self._before, pool.overflow_flags)
            last = on_gpu and i == n_taps - 1
            self.taps[key] = Tap(tables, precomputed[i], settings.steer, settings.capture, settings.noop, last)
        attach(layers, self.taps, norms)

    def share_of(self, keys: tuple[Key, ...]) -> tuple[tuple[Key, ...], int]:
        """Return the keys that this worker has, and the number of those on earlier pipeline stages."""
        return tuple(key for key in keys if key in self.taps), sum(layer < self._first_layer for layer, _ in keys)

    def join_group(self, group: Group) -> int:
        """Return the number of a group, whose tokens the taps capture and leave for lenses as it says."""
        number, fresh = self.groups.acquire(group)
        if fresh:
            self._before[number] = group[1]
            places = torch.tensor(places_of(group, self.keys), dtype=torch.int32, pin_memory=self.device.type == "cuda")
            self._orders[:, number].copy_(places, non_blocking=True)
        return number


def groups_of(keys: tuple[Key, ...], before: bool, watched: Key | None) -> list[Group]:
    """Return the groups that tokens of one request can belong to: captured, watched, both."""
    found: list[Group] = [(keys, before, None)] if keys else []
    if watched is not None:
        found.append(((), False, watched))
    if keys and watched is not None:
        found.append((keys, before, watched))
    return found


def places_of(group: Group, taps: Sequence[Key]) -> list[int]:
    """Return for each tap the place of its row among those captured (−1: not captured), plus `WATCHED` if lenses read
    it."""
    keys, _, watched = group
    place = {key: i for i, key in enumerate(keys)}
    return [place.get(key, -1) + (WATCHED if key == watched else 0) for key in taps]
