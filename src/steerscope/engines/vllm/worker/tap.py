"""The tap: steers the tokens of a forward in place and copies captured rows to the pool.

A tap reads only tensors whose addresses never change, so it can be compiled and replayed in a CUDA graph. A layer
number never enters it, so the compiled code of equal layers is equal. Its arithmetic is `core.equation.change`.

It is one operator, opaque to the compiler: torch code here, a Triton kernel of the same definition on CUDA. A launch
costs more than the arithmetic, so where an RMS norm of the model follows on the same stream, one kernel does both.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steerscope.core.equation import change
from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, FLAG, GROUP, WATCHED

library = torch.library.Library("steerscope", "DEF")
library.define(
    "tap(Tensor(a!) delta, Tensor(d!)? residual, Tensor(b!) pool, Tensor index, Tensor vectors, Tensor coefficients, "
    "Tensor gates, Tensor order, Tensor before, Tensor(c!) overflow_flags, bool steer, bool capture) -> ()"
)
# The last tap of a step moves the cells on. Its writes to the index are not in the schema: only taps read them, and
# taps run in order because all of them write to `overflow_flags`.
library.define("end(Tensor delta, Tensor index, Tensor(a!) overflow_flags) -> ()")
library.define(
    "tap_norm(Tensor delta, Tensor residual, Tensor weight, float epsilon, bool adds_one, Tensor precomputed, "
    "Tensor(a!) pool, Tensor index, Tensor vectors, Tensor coefficients, "
    "Tensor gates, Tensor order, Tensor before, Tensor(b!) overflow_flags, bool steer, bool capture, bool last) "
    "-> (Tensor, Tensor)"
)


@torch.library.register_fake("steerscope::tap", lib=library)
@torch.library.register_fake("steerscope::end", lib=library)
def _fake(*_: object) -> None:
    return None


@torch.library.register_fake("steerscope::tap_norm", lib=library)
def _fake_norm(delta: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(delta), torch.empty_like(delta)


class TapMode(NamedTuple):
    """Upper bound of what the taps of a step do on CUDA."""

    steer: bool = True
    capture: bool = True


class _Launch(threading.local):
    mode = TapMode()  # of the kernels that this thread launches now


_launch = _Launch()


@contextlib.contextmanager
def launch_mode(mode: TapMode) -> Iterator[None]:
    """Launch kernels that do no more than this while the context is entered."""
    _launch.mode = mode
    try:
        yield
    finally:
        _launch.mode = TapMode()


def set_launch_mode(mode: TapMode) -> None:
    """Change the mode within `launch_mode`, once the step is planned."""
    _launch.mode = mode


def mode_now() -> TapMode:
    return _launch.mode


class TapTables(NamedTuple):
    """The tensors that all operators of a tap read, in their order."""

    pool: Tensor  # [cells + tokens, hidden]
    step_index: Tensor  # [tokens, columns]
    vectors: Tensor
    coefficients: Tensor
    gates: Tensor
    order: Tensor  # [groups]: place of this tap's row among the captured ones; −1: not captured
    before: Tensor  # [groups]: whether the group captures before steering
    overflow_flags: Tensor  # [requests]: 1 after a steered row was not finite; on a CPU, [0]: the index has rows


def _torch_tap(delta: Tensor, residual: Tensor | None, *arguments: Any) -> None:
    """Do what a tap does; the arguments are `TapTables`, and whether to steer and to capture."""
    tables, (steer, capture) = TapTables(*arguments[:-2]), arguments[-2:]
    pool = tables.pool
    index = tables.step_index
    if delta.ndim != 2 or delta.shape[0] > index.shape[0]:
        raise ValueError(f"the layer's output has shape {tuple(delta.shape)}, not [up to {len(index)} tokens, hidden]")
    if not tables.overflow_flags[0]:  # the index has no row
        return
    first_watched = pool.shape[0] - index.shape[0]
    index = index[: delta.shape[0]]
    group = index[:, GROUP]
    place = tables.order.index_select(0, group)
    watched = place >= WATCHED - 1
    place = torch.where(watched, place - WATCHED, place)
    captured = place >= 0 if capture else torch.zeros_like(group, dtype=torch.bool)
    early = captured & tables.before.index_select(0, group)
    cells = (index[:, CELL] + place).long()
    _store_rows(early, delta, residual, pool, cells)
    if steer:
        _steer(delta, residual, index, tables)
    _store_rows(captured & ~early, delta, residual, pool, cells)
    if capture:
        _store_watched_rows(watched, delta, residual, pool, first_watched)


def _steer(delta: Tensor, residual: Tensor | None, index: Tensor, tables: TapTables) -> None:
    columns = (index.shape[1] - ENTRIES) // 3
    entries = index[:, ENTRIES : ENTRIES + 3 * columns].reshape(len(index), columns, 3)
    used = entries[:, :, 1].ne(0)
    steered = used.any(1).nonzero().squeeze(1)
    if not len(steered):
        return
    entries = entries[:, : int(used.any(0).nonzero().max()) + 1].index_select(0, steered)
    rows = delta.index_select(0, steered)
    stream = rows if residual is None else rows + residual.index_select(0, steered)
    added = change(stream, tables.vectors, tables.coefficients, entries, tables.gates)
    changed = (rows.float() + added).to(delta.dtype)
    delta.index_copy_(0, steered, changed)
    stream = changed if residual is None else changed + residual.index_select(0, steered)
    _clear_overflow(steered[~torch.isfinite(stream).all(1)], delta, residual, index, tables.overflow_flags)


def _clear_overflow(
    tokens: Tensor, delta: Tensor, residual: Tensor | None, index: Tensor, overflow_flags: Tensor
) -> None:
    """Flag the requests of rows that steering made infinite or NaN, and clear the rows. The request fails some steps
    later; until then later owners of its cache blocks read them times zero, and zero times NaN is NaN."""
    if len(tokens):
        overflow_flags[index[tokens, FLAG].long()] = 1
        for tensor in (delta, residual):
            if tensor is not None:
                tensor[tokens] = 0


def _store_watched_rows(which: Tensor, delta: Tensor, residual: Tensor | None, pool: Tensor, first: int) -> None:
    """Store the rows of watched tokens behind the cells."""
    _store_rows(which, delta, residual, pool, torch.arange(first, first + len(which)))


def _store_rows(which: Tensor, delta: Tensor, residual: Tensor | None, pool: Tensor, cells: Tensor) -> None:
    tokens = which.nonzero().squeeze(1)
    if len(tokens):
        rows = delta.index_select(0, tokens)
        if residual is not None:
            rows = rows + residual.index_select(0, tokens)
        pool.index_copy_(0, cells[tokens], rows.to(pool.dtype))


library.impl("tap", _torch_tap, "CPU")


class Tap(nn.Module):
    """The tap of one (layer, site)."""

    pool: Tensor
    step_index: Tensor

    def __init__(
        self,
        tables: TapTables,
        precomputed: Tensor | None = None,  # ops of tokens, computed before the step, on CUDA
        steer: bool = True,
        capture: bool = True,
        noop: bool = False,
        last: bool = False,  # of a step, on CUDA
    ) -> None:
        super().__init__()
        self.steer = steer
        self.capture = capture
        self.noop = noop
        self.last = last
        for name, tensor in (*tables._asdict().items(), ("precomputed", precomputed)):
            self.register_buffer(name, tensor, persistent=False)

    def _tables(self) -> tuple[Any, ...]:
        """Return `TapTables`."""
        steering = self.vectors, self.coefficients, self.gates
        return self.pool, self.step_index, *steering, self.order, self.before, self.overflow_flags

    def forward(self, delta: Tensor, residual: Tensor | None) -> None:
        """Steer `delta` in place and store captured rows of delta + residual."""
        if self.noop:
            return
        torch.ops.steerscope.tap(delta, residual, *self._tables(), self.steer, self.capture)
        if self.last and self.capture:
            torch.ops.steerscope.end(delta, self.step_index, self.overflow_flags)

    def normed(self, delta: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Run this tap and the norm behind it, an RMSNorm of vLLM, in one CUDA kernel; return the normed stream and the
        stream."""
        adds_one = type(norm).__name__ == "GemmaRMSNorm"  # it multiplies by 1 + weight
        scale = norm.weight.data, norm.variance_epsilon, adds_one
        does = self.steer, self.capture, self.last
        return torch.ops.steerscope.tap_norm(delta, residual, *scale, self.precomputed, *self._tables(), *does)


class TappedNorm(nn.Module):
    """A norm of the model behind a tap on the stream that enters it."""

    def __init__(self, norm: nn.Module, tap: Tap) -> None:
        super().__init__()
        self.norm = norm
        self.tap = tap
        self.fused = tap.pool.device.type == "cuda" and not tap.noop

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            return self.tap.normed(x, residual, self.norm)
        self.tap(x, residual)
        return self.norm(x, residual)
