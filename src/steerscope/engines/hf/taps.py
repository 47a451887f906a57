"""Taps: forward hooks that apply the equation and copy rows, on exactly the sites that requests use.

Without such requests there are no hooks. A hook reads the current `Pass`: which tokens of this forward have ops, with
their entries, and which are captured. Tokens are addressed in the flattened batch [rows × tokens].
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerscope.core.equation import Operands, apply, look_up, settle
from steerscope.core.sites import TABLE
from steerscope.core.slot_table import Key, SlotTable
from steerscope.engines.hf.blocks import Blocks, block_input, first, with_first, with_input

OutputHook = Callable[[nn.Module, tuple, Tensor | tuple], Tensor | tuple | None]


@dataclass(slots=True)
class Gather:
    """Rows of requests that capture the same keys in the same way, staged for one forward: [n, keys, hidden]."""

    keys: tuple[Key, ...]
    before_steering: bool
    index: Tensor | None  # flat token numbers, None for all of them
    stage: Tensor
    column: dict[Key, int] = field(init=False)

    def __post_init__(self) -> None:
        self.column = {key: j for j, key in enumerate(self.keys)}

    def take(self, key: Key, flat: Tensor) -> None:
        rows = flat if self.index is None else flat.index_select(0, self.index)
        self.stage[:, self.column[key]] = rows


@dataclass(slots=True)
class Work:
    """What a pass does at one tap."""

    before: list[Gather]
    columns: list[Operands]
    after: list[Gather]


@dataclass(slots=True)
class Pass:
    """What one forward must do at the taps; a batch that goes on unchanged uses the same one again."""

    steered: Tensor | None = None  # flat numbers of the tokens that have ops, None for all of them
    entries: Tensor | None = None  # [n, K, 3] of those tokens
    gathers: list[Gather] = field(default_factory=list)
    work: dict[Key, Work] = field(default_factory=dict)  # found at the first visit

    def at(self, key: Key, table: SlotTable) -> Work:
        work = self.work.get(key)
        if work is None:
            mine = [gather for gather in self.gathers if key in gather.column]
            columns = [] if self.entries is None else look_up(*table.tensors(key), self.entries)
            work = self.work[key] = Work(
                [gather for gather in mine if gather.before_steering],
                [settle(column) for column in columns],
                [gather for gather in mine if not gather.before_steering],
            )
        return work


class Taps:
    def __init__(self, blocks: Blocks, table: SlotTable) -> None:
        self.blocks, self.table = blocks, table
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
        self._current, self._thread = now, None if any_thread else threading.get_ident()
        try:
            yield
        finally:
            self._current = None
            self._rest.clear()

    def _mine(self) -> bool:
        return self._thread is None or threading.get_ident() == self._thread

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

    def _hook(self, layer: int, wanted: frozenset[Key]) -> Iterable[RemovableHandle]:
        block = self.blocks[layer]
        mid, pre = (layer, "resid_mid") in wanted, (layer, "resid_pre") in wanted
        if mid or pre:
            yield block.module.register_forward_pre_hook(self._enter(layer, pre, mid), with_kwargs=True)
        if (layer, "mlp_out") in wanted and block.mlp_part is not None:
            yield block.mlp_part.register_forward_hook(self._part((layer, "mlp_out"), block.multiplier))
        by_module: dict[str, list[Key]] = {}
        for site, facts in TABLE.items():
            if facts.side == "output" and (layer, site) in wanted:
                by_module.setdefault(facts.module, []).append((layer, site))
        for name, keys in by_module.items():
            hook = self._output(keys[0]) if name == "module" else self._addend(keys, block.multiplier)
            yield getattr(block, name).register_forward_hook(hook)

    def _enter(
        self, layer: int, tapped: bool, keep: bool
    ) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            hidden = block_input(args, kwargs)
            changed = self._visit((layer, "resid_pre"), hidden) if tapped else hidden
            if keep and self._current is not None and self._mine():
                self._rest[layer, "resid_mid"] = changed
            return None if changed is hidden else with_input(args, kwargs, changed)

        return hook

    def _part(self, key: Key, multiplier: float) -> OutputHook:
        def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
            if self._current is not None and self._mine():
                self._rest[key] = first(output) * multiplier

        return hook

    def _addend(self, keys: Sequence[Key], multiplier: float) -> OutputHook:
        """Visit what the block adds to the stream: the module's output times the block's multiplier."""

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

    def _output(self, key: Key) -> OutputHook:
        def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple | None:
            hidden = first(output)
            changed = self._visit(key, hidden)
            return None if changed is hidden else with_first(output, changed)

        return hook

    def _visit(self, key: Key, delta: Tensor, residual: Tensor | None = None) -> Tensor:
        """Ops, then capture. The stream is delta + residual: projections are of the sum, the change goes to delta."""
        now = self._current
        if now is None or not self._mine():
            return delta
        work = now.at(key, self.table)
        flat = delta.reshape(-1, delta.shape[-1])
        rest = None if residual is None else residual.reshape(flat.shape)
        for gather in work.before:
            gather.take(key, flat if rest is None else flat + rest)
        if work.columns:
            flat = self._steer(now.steered, work.columns, flat, rest)
            delta = flat.view(delta.shape)
        for gather in work.after:
            gather.take(key, flat if rest is None else flat + rest)
        return delta

    def _steer(self, index: Tensor | None, columns: list[Operands], flat: Tensor, rest: Tensor | None) -> Tensor:
        chosen = flat if index is None else flat.index_select(0, index)
        stream = chosen
        if rest is not None:
            stream = chosen + (rest if index is None else rest.index_select(0, index))
        steered = (chosen.float() + apply(stream, columns, self.gates)).to(flat.dtype)
        return steered if index is None else flat.index_copy(0, index, steered)
