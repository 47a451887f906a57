"""The tap: steers the tokens of a forward in place and copies captured rows to the pool.

It reads nothing but tensors whose addresses never change, so it can be compiled and replayed in a CUDA graph; a layer
number never enters it, so that the compiled code of equal layers is equal. What it does is `core.equation.change`.

It is one operator, opaque to the compiler: here in torch, on CUDA as a Triton kernel of the same definition. A launch
costs more than what it does, so where the model's next step is an RMS norm over the same stream, one kernel does both.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from steerscope.core.equation import change
from steerscope.engines.vllm.worker.step_index import ASKER, CELL, ENTRIES, GROUP

library = torch.library.Library("steerscope", "DEF")
library.define(
    "tap(Tensor(a!) delta, Tensor(d!)? residual, Tensor(b!) pool, Tensor index, Tensor vectors, Tensor coefficients, "
    "Tensor gates, Tensor order, Tensor before, Tensor(c!) faults, bool steer, bool capture) -> ()"
)
# What the last tap does after it: move the cells on. (That it writes to the index, and others to the stage, is not
# said: nobody but taps reads them, and they come one after the other, since all write to the faults.)
library.define("end(Tensor delta, Tensor index, Tensor(a!) faults) -> ()")
library.define(
    "tap_norm(Tensor delta, Tensor residual, Tensor weight, float epsilon, bool beside_one, Tensor laid, "
    "Tensor staged, Tensor stage, Tensor orders, Tensor(a!) pool, Tensor index, Tensor vectors, Tensor coefficients, "
    "Tensor gates, Tensor order, Tensor before, Tensor(b!) faults, bool steer, bool capture, bool last) "
    "-> (Tensor, Tensor)"
)


@torch.library.register_fake("steerscope::tap", lib=library)
def _fake(*_: object) -> None:
    return None


@torch.library.register_fake("steerscope::end", lib=library)
def _fake_end(*_: object) -> None:
    return None


@torch.library.register_fake("steerscope::tap_norm", lib=library)
def _fake_norm(delta: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(delta), torch.empty_like(delta)


# In `order`, added to a place: a group that reads the row too. It is left behind the cells, at the token's own number,
# so that whoever is watched needs no cells: the rows of one step are looked at before the next.
WATCHED = 1 << 16


class Doing(NamedTuple):
    """What the taps of a step do on CUDA, at most."""

    steer: bool = True
    capture: bool = True
    runs: Tensor | None = None  # where they sum rows instead of keeping them (`summing`)
    covered: int = 0  # the first so many tokens are in these
    columns: int = 0  # of ops that any token has at most; 0: nobody knows


_working = Doing()  # graphs may be captured with less


@contextlib.contextmanager
def kernels(steer: bool, capture: bool) -> Iterator[None]:
    """What is launched meanwhile does no more than this."""
    global _working
    _working = Doing(steer, capture)
    try:
        yield
    finally:
        _working = Doing()


_steps: dict[int, Callable[[], Doing] | Doing] = {}  # of those that are not replayed, by the address of an index


def before_first(index: Tensor, ask: Callable[[], Doing]) -> None:
    """Whichever tap of the forward that follows comes first does this before it reads the index: the device then has
    the layers before it to work on. Only for forwards that are not replayed."""
    _steps[index.data_ptr()] = ask


def over(index: Tensor) -> bool:
    """The forward is. Whether no tap came, and that was never done."""
    return bool(_steps) and callable(_steps.pop(index.data_ptr(), None))


def come(index: Tensor) -> Doing:
    """A tap is about to read this index."""
    if not _steps:
        return _working
    known = _steps.get(index.data_ptr(), _working)
    if callable(known):
        _steps[index.data_ptr()] = _working
        known = _steps[index.data_ptr()] = known()
    return known


def _torch_tap(
    delta: Tensor,
    residual: Tensor | None,
    pool: Tensor,
    index: Tensor,
    vectors: Tensor,
    coefficients: Tensor,
    gates: Tensor,
    order: Tensor,
    before: Tensor,
    faults: Tensor,
    steer: bool,
    capture: bool,
) -> None:
    if delta.ndim != 2 or delta.shape[0] > index.shape[0]:
        raise ValueError(f"the layer's output has shape {tuple(delta.shape)}, not [up to {len(index)} tokens, hidden]")
    come(index)
    if not faults[0]:
        return
    first_watched = pool.shape[0] - index.shape[0]
    index = index[: delta.shape[0]]
    group = index[:, GROUP]
    place = order.index_select(0, group)
    watched = place >= WATCHED - 1
    place = torch.where(watched, place - WATCHED, place)
    wanted = place >= 0 if capture else torch.zeros_like(group, dtype=torch.bool)
    early = wanted & before.index_select(0, group)
    _copy_rows(early, delta, residual, pool, index, place)
    if steer:
        columns = (index.shape[1] - ENTRIES) // 3
        entries = index[:, ENTRIES : ENTRIES + 3 * columns].reshape(len(index), columns, 3)
        used = entries[:, :, 1].ne(0)
        steered = used.any(1).nonzero().squeeze(1)
        if len(steered):
            entries = entries[:, : int(used.any(0).nonzero().max()) + 1]
            mine = delta.index_select(0, steered)
            stream = mine if residual is None else mine + residual.index_select(0, steered)
            gained = change(stream, vectors, coefficients, entries.index_select(0, steered), gates)
            changed = (mine.float() + gained).to(delta.dtype)
            delta.index_copy_(0, steered, changed)
            stream = changed if residual is None else changed + residual.index_select(0, steered)
            _silence(steered[~torch.isfinite(stream).all(1)], delta, residual, index, faults)
    _copy_rows(wanted & ~early, delta, residual, pool, index, place)
    if capture:
        _leave_rows(watched, delta, residual, pool, first_watched)


def _silence(lost: Tensor, delta: Tensor, residual: Tensor | None, index: Tensor, faults: Tensor) -> None:
    """Rows that steering made infinite or NaN. Their request fails, but some steps later, and what it left in the cache
    is read by whoever gets its blocks next: times zero, but zero times NaN is NaN."""
    if len(lost):
        faults[index[lost, ASKER].long()] = 1
        for tensor in (delta, residual):
            if tensor is not None:
                tensor[lost] = 0


def _leave_rows(which: Tensor, delta: Tensor, residual: Tensor | None, pool: Tensor, first: int) -> None:
    """Rows of watched tokens, behind the cells."""
    tokens = which.nonzero().squeeze(1)
    if len(tokens):
        rows = delta.index_select(0, tokens)
        if residual is not None:
            rows = rows + residual.index_select(0, tokens)
        pool.index_copy_(0, tokens + first, rows.to(pool.dtype))


def _copy_rows(
    which: Tensor, delta: Tensor, residual: Tensor | None, pool: Tensor, index: Tensor, place: Tensor
) -> None:
    tokens = which.nonzero().squeeze(1)
    if len(tokens):
        rows = delta.index_select(0, tokens)
        if residual is not None:
            rows = rows + residual.index_select(0, tokens)
        pool.index_copy_(0, (index[tokens, CELL] + place[tokens]).long(), rows.to(pool.dtype))


library.impl("tap", _torch_tap, "CPU")


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that all taps of a worker read."""

    pool: Tensor  # [cells + tokens, hidden]
    index: Tensor  # [tokens, 2 + 3 · columns]
    gates: Tensor
    before: Tensor  # [groups]: the group captures before steering
    faults: Tensor  # [askers]: 1 where a steered row is not finite; on the CPU, [0]: somebody asks for something
    stage: Tensor | None = None  # [taps, rows, hidden]: on CUDA, where rows may be left until the step ends
    orders: Tensor | None = None  # [taps, groups]: of all taps


class Tap(nn.Module):
    """The tensors of one (layer, site)."""

    pool: Tensor
    index: Tensor
    gates: Tensor
    before: Tensor
    faults: Tensor
    vectors: Tensor
    coefficients: Tensor
    order: Tensor
    laid: Tensor
    staged: Tensor
    stage: Tensor
    orders: Tensor

    def __init__(
        self,
        shared: Shared,
        vectors: Tensor,
        coefficients: Tensor,
        steer: bool = True,
        capture: bool = True,
        noop: bool = False,
        last: bool = False,
        laid: Tensor | None = None,  # what is done to tokens, ready, on CUDA
        order: Tensor | None = None,  # [groups]: place of this tap in each, −1: none
        staged: Tensor | None = None,  # its part of the stage
    ) -> None:
        super().__init__()
        self.steer, self.capture, self.noop = steer, capture, noop
        self.last = last  # of a step, on CUDA
        order = torch.full_like(shared.before, -1, dtype=torch.int32) if order is None else order
        tensors = {"pool": shared.pool, "index": shared.index, "gates": shared.gates, "before": shared.before}
        tensors["faults"] = shared.faults
        less = {"laid": laid, "staged": staged, "stage": shared.stage, "orders": shared.orders}
        tensors |= {name: torch.zeros(0, device=vectors.device) if t is None else t for name, t in less.items()}
        tensors |= {"vectors": vectors, "coefficients": coefficients, "order": order}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def _tables(self) -> tuple[Tensor, ...]:
        """As both operators take them."""
        return (
            self.pool,
            self.index,
            self.vectors,
            self.coefficients,
            self.gates,
            self.order,
            self.before,
            self.faults,
        )

    def forward(self, delta: Tensor, residual: Tensor | None) -> None:
        """In place."""
        if self.noop:
            return
        torch.ops.steerscope.tap(delta, residual, *self._tables(), self.steer, self.capture)
        if self.last and self.capture:
            torch.ops.steerscope.end(delta, self.index, self.faults)

    def normed(self, delta: Tensor, residual: Tensor, norm: "RMSNorm") -> tuple[Tensor, Tensor]:
        """On CUDA: this tap and the norm that follows it; the normed stream and the stream."""
        return torch.ops.steerscope.tap_norm(
            delta,
            residual,
            norm.weight.data,
            norm.variance_epsilon,
            beside_one(norm),
            self.laid,
            self.staged,
            self.stage,
            self.orders,
            *self._tables(),
            self.steer,
            self.capture,
            self.last,
        )


class RMSNorm(Protocol):
    """What vLLM's RMSNorm and GemmaRMSNorm are made of."""

    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any: ...


def beside_one(norm: RMSNorm) -> bool:
    """Gemma's weights are what is added to one."""
    return type(norm).__name__ == "GemmaRMSNorm"


class TappedNorm(nn.Module):
    """A norm of the model, in its place, behind a tap on the stream that enters it."""

    def __init__(self, norm: nn.Module, tap: Tap) -> None:
        super().__init__()
        self.norm, self.tap = norm, tap
        self.fused = tap.pool.device.type == "cuda" and not tap.noop

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            return self.tap.normed(x, residual, self.norm)  # type: ignore[arg-type]
        self.tap(x, residual)
        return self.norm(x, residual)
