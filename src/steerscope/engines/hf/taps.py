"""Taps: forward hooks that apply the equation and copy rows, on exactly the sites that requests use.

Without such requests there are no hooks. A hook reads the current `Pass`: which tokens of this forward have ops, with
their entries, and which are captured.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerscope.core.equation import apply
from steerscope.core.sites import TABLE
from steerscope.core.slot_table import Key, SlotTable
from steerscope.engines.hf.blocks import Blocks, block_input, first, with_first, with_input
from steerscope.engines.hf.forward_index import Pass, SteeredTokens

OutputHook = Callable[[nn.Module, tuple, Tensor | tuple], Tensor | tuple | None]


class Taps:
    def __init__(self, blocks: Blocks, table: SlotTable) -> None:
        self.blocks = blocks
        self.table = table
        self._current: Pass | None = None
        self._thread: int | None = 0  # None: any
        self.gates = torch.ones(1, device=table.device)
        self._rest: dict[Key, Tensor] = {}  # the part of a site that is not in the module's output
        self._keys: frozenset[Key] = frozenset()
        self._handles: list[RemovableHandle] = []

    @contextlib.contextmanager
    def during(self, now: Pass | None, any_thread: bool = False) -> Iterator[None]:
        """What the taps do in the forward inside the block; a forward of another thread is left alone, unless it may
        be ours: with gradient checkpointing a thread of torch's computes blocks again."""
        self._current = now
        self._thread = None if any_thread else threading.get_ident()
        try:
            yield
        finally:
            self._current = None
            self._rest.clear()

    @property
    def _now(self) -> Pass | None:
        mine = self._thread is None or threading.get_ident() == self._thread
        return self._current if mine else None

    def attach(self, keys: Iterable[Key]) -> None:
        """Hook exactly these taps."""
        wanted = frozenset(keys)
        if wanted == self._keys:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = [
            handle for layer in sorted({layer for layer, _ in wanted}) for handle in self._hook(layer, wanted)
        ]
        self._keys = wanted

    @contextlib.contextmanager
    def attached(self, keys: Iterable[Key]) -> Iterator[None]:
        """Hook these taps during the block, and none afterwards."""
        try:
            self.attach(keys)
            yield
        finally:
            self.attach(())

    def _hook(self, layer: int, wanted: frozenset[Key]) -> Iterable[RemovableHandle]:
        block = self.blocks[layer]
        mid = (layer, "resid_mid") in wanted
        pre = (layer, "resid_pre") in wanted
        if mid or pre:
            yield block.module.register_forward_pre_hook(self._enter(layer, pre, mid), with_kwargs=True)
        if (layer, "mlp_out") in wanted and block.mlp_part is not None:
            yield block.mlp_part.register_forward_hook(self._part((layer, "mlp_out"), block.multiplier))
        by_module: dict[str, list[Key]] = {}
        for site, facts in TABLE.items():
            if facts.side == "output" and (layer, site) in wanted:
                by_module.setdefault(facts.module, []).append((layer, site))
        for name, keys in by_module.items():
            multiplier = 1.0 if name == "module" else block.multiplier
            yield getattr(block, name).register_forward_hook(self._addend(keys, multiplier))

    def _enter(
        self, layer: int, tapped: bool, keep: bool
    ) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            hidden = block_input(args, kwargs)
            changed = self._visit((layer, "resid_pre"), hidden) if tapped else hidden
            if keep and self._now is not None:
                self._rest[layer, "resid_mid"] = changed
            return None if changed is hidden else with_input(args, kwargs, changed)

        return hook

    def _part(self, key: Key, multiplier: float) -> OutputHook:
        def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
            if self._now is not None:
                self._rest[key] = first(output) * multiplier

        return hook

    def _addend(self, keys: Sequence[Key], multiplier: float) -> OutputHook:
        """Visit what the block returns or adds to the stream: the module's output times the block's multiplier."""

        def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple | None:
            hidden = first(output)
            added = changed = hidden if multiplier == 1 else hidden * multiplier
            for key in keys:
                changed = self._visit(key, changed, self._rest.get(key))
            if changed is added:
                return None
            if multiplier != 1:  # only the difference: rows without ops keep their bits, and zero vectors a gradient
                moved = hidden + (changed - added) / multiplier
                changed = torch.where(hidden.isfinite(), moved, changed / multiplier)
            return with_first(output, changed)

        return hook

    def _visit(self, key: Key, delta: Tensor, residual: Tensor | None = None) -> Tensor:
        """Ops, then capture. The stream is delta + residual: projections are of the sum, the change goes to delta."""
        now = self._now
        if now is None:
            return delta
        flat = delta.reshape(-1, delta.shape[-1])
        rest = None if residual is None else residual.reshape(flat.shape)
        now.take(key, True, flat, rest)
        if now.steered is not None:
            flat = self._steer(key, now.steered, flat, rest)
            delta = flat.view(delta.shape)
        now.take(key, False, flat, rest)
        return delta

    def _steer(self, key: Key, steered: SteeredTokens, flat: Tensor, rest: Tensor | None) -> Tensor:
        index = steered.index
        chosen = flat if index is None else flat.index_select(0, index)
        stream = chosen
        if rest is not None:
            stream = chosen + (rest if index is None else rest.index_select(0, index))
        changed = (chosen.float() + apply(stream, steered.at(key, self.table), self.gates)).to(flat.dtype)
        return changed if index is None else flat.index_copy(0, index, changed)
