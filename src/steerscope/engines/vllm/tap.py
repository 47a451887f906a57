"""The tap: one operator that steers the tokens of a forward in place and copies captured rows to the pool.

It reads nothing but tensors whose addresses never change, so it can be compiled and replayed in a CUDA graph; a layer
number never enters it, so that the compiled code of equal layers is equal. To the compiler it is opaque: what it does
is `residual.equation.change`, here in torch, on CUDA as a Triton kernel of the same definition.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steerscope.engines.vllm.step import CELL, ENTRIES, GROUP
from steerscope.residual.equation import change

library = torch.library.Library("steerscope", "DEF")
library.define(
    "tap(Tensor(a!) delta, Tensor? residual, Tensor(b!) pool, Tensor index, Tensor vectors, Tensor coefficients, "
    "Tensor gates, Tensor order, Tensor before, Tensor(c!) faults, bool steer, bool capture) -> ()"
)


@torch.library.register_fake("steerscope::tap", lib=library)
def _fake(*_: object) -> None:
    return None


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
        raise ValueError(f"a tap met {tuple(delta.shape)}, it takes [tokens ≤ {index.shape[0]}, hidden]")
    index = index[: delta.shape[0]]
    group = index[:, GROUP]
    place = order.index_select(0, group)
    wanted = place >= 0 if capture else torch.zeros_like(group, dtype=torch.bool)
    early = wanted & before.index_select(0, group)
    _copy_rows(early, delta, residual, pool, index, place)
    if steer:
        entries = index[:, ENTRIES:].view(len(index), -1, 3)
        used = entries[:, :, 1].ne(0)
        steered = used.any(1).nonzero().squeeze(1)
        if len(steered):
            entries = entries[:, : int(used.any(0).nonzero().max()) + 1]
            mine = delta.index_select(0, steered)
            stream = mine if residual is None else mine + residual.index_select(0, steered)
            gained = change(stream, vectors, coefficients, entries.index_select(0, steered), gates)
            changed = (mine.float() + gained).to(delta.dtype)
            delta.index_copy_(0, steered, changed)
            faults[steered[~torch.isfinite(changed).all(1)]] = 1
    _copy_rows(wanted & ~early, delta, residual, pool, index, place)


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

    pool: Tensor  # [cells, hidden]
    index: Tensor  # [tokens, 2 + 3 · columns]
    gates: Tensor
    before: Tensor  # [groups]: the group captures before steering
    faults: Tensor  # [tokens]: 1 where a steered row is not finite


class Tap(nn.Module):
    """The tensors of one (layer, site)."""

    order: Tensor

    def __init__(
        self, shared: Shared, vectors: Tensor, coefficients: Tensor, steer: bool, capture: bool, noop: bool = False
    ) -> None:
        super().__init__()
        self.steer, self.capture, self.noop = steer, capture, noop
        order = torch.full_like(shared.before, -1, dtype=torch.int32)  # place of this tap in each group, −1: none
        tensors = {"pool": shared.pool, "index": shared.index, "gates": shared.gates, "before": shared.before}
        tensors["faults"] = shared.faults
        tensors |= {"vectors": vectors, "coefficients": coefficients, "order": order}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, delta: Tensor, residual: Tensor | None) -> None:
        if self.noop:
            return
        torch.ops.steerscope.tap(
            delta,
            residual,
            self.pool,
            self.index,
            self.vectors,
            self.coefficients,
            self.gates,
            self.order,
            self.before,
            self.faults,
            self.steer,
            self.capture,
        )
