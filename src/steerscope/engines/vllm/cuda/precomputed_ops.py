"""Compute the ops of decoding tokens before the steps that run them.

To steer a token, a tap looks up the number of a vector and then loads the vector; the second load waits for the first,
which is most of the cost of steering a decoding step. But the ops of a decoding batch stay the same from step to step.
So when the batch changes, one kernel writes for every tap and token the row to be added, or the vector of an op that
depends on the stream, and the tap's place in the token's group; a tap finds them by the token's number alone. Ops that
rules switch, and several stream-dependent ops of one token, are looked up in every step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.worker.index_layout import ENTRIES, GROUP

# Numbers behind a row, a whole cache line: its kind, the five coefficients of an op, the place in the group, and
# whether the group captures before steering.
TAIL = 16
PLACE = 6
BEFORE = 7
_MAX_BYTES = 128 << 20


@triton.jit
def _precompute_kernel(
    precomputed, index, vectors, coefficients, orders, before, tokens, rows, index_width, hidden, slots, numbers,
    groups,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr, TAIL: tl.constexpr,
    PLACE: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Write the kind of a row: −1: look the ops up; 0: no op; 1: add this row; 2: the row is the vector of the only op,
    whose coefficients follow."""
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    out = precomputed + (tap * rows + token) * (hidden + TAIL)
    row_kind = -1.0
    if token < tokens:
        at = tl.arange(0, BLOCK)
        inside = at < hidden
        mine = index + token * index_width
        group = tl.load(mine + GROUP)
        tl.store(out + hidden + PLACE, tl.load(orders + tap * groups + group).to(tl.float32))
        tl.store(out + hidden + BEFORE, tl.load(before + group).to(tl.float32))
        row = tl.zeros([BLOCK], dtype=tl.float32)
        last = tl.zeros([BLOCK], dtype=tl.float32)
        acting, dependent, gated, five = 0, 0, 0, coefficients + tap * numbers * 5
        for k in tl.static_range(COLUMNS):
            number = tl.load(mine + ENTRIES + 1 + 3 * k)
            here = coefficients + (tap * numbers + number) * 5
            c, s, m = tl.load(here), tl.load(here + 1), tl.load(here + 2)
            if (number != 0) & ((c != 0) | (s != 0) | (m != 0)):
                slot = tl.load(mine + ENTRIES + 3 * k).to(tl.int64)
                last = tl.load(vectors + (tap * slots + slot) * hidden + at, mask=inside, other=0.0)
                low = tl.maximum(0.0, tl.load(here + 3), propagate_nan=tl.PropagateNan.ALL)
                clipped = tl.minimum(low, tl.load(here + 4), propagate_nan=tl.PropagateNan.ALL)
                row += (c + clipped) * last
                five = here
                acting += 1
                dependent += ((s != 0) | (m != 0)).to(tl.int32)
                gated += (tl.load(mine + ENTRIES + 2 + 3 * k) != 0).to(tl.int32)
        if acting == 0:
            row_kind = 0.0
        elif (dependent == 0) & (gated == 0):
            row_kind = 1.0
        elif (acting == 1) & (gated == 0):
            row_kind = 2.0
            row = last
            for i in tl.static_range(5):
                tl.store(out + hidden + 1 + i, tl.load(five + i))
        if row_kind > 0:
            tl.store(out + at, row, mask=inside)
    tl.store(out + hidden, row_kind)


class PrecomputedOps:
    """The precomputed ops of all taps of a worker; the tables are [taps, slots, …] of the slot table."""

    def __init__(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, index: Tensor, max_requests: int
    ) -> None:
        taps, _, hidden = vectors.shape
        self._vectors = vectors
        self._coefficients = coefficients
        self._index = index
        # [taps, groups], [groups]
        self._orders = orders
        self._before = before
        self.rows = min(max_requests, _MAX_BYTES // (4 * taps * (hidden + TAIL)))  # tokens of a step, at most
        self.table = torch.zeros(taps, self.rows, hidden + TAIL, device=vectors.device)
        self.table[:, :, hidden] = -1
        self._tokens = 0

    def compute(self, tokens: int) -> None:
        """Compute the ops of the first tokens from the index on the device, and invalidate those of the others."""
        count = max(tokens, self._tokens)
        self._tokens = tokens
        if not count:
            return
        taps, slots, hidden = self._vectors.shape
        block = triton.next_power_of_2(hidden)
        sizes = self._index.shape[1], hidden, slots, self._coefficients.shape[1], self._orders.shape[1]
        _precompute_kernel[(count, taps)](  # type: ignore[index]
            self.table, self._index, self._vectors, self._coefficients, self._orders, self._before, tokens, self.rows,
            *sizes, COLUMNS=(self._index.shape[1] - ENTRIES) // 3, BLOCK=block, GROUP=GROUP, ENTRIES=ENTRIES, TAIL=TAIL,
            PLACE=PLACE, BEFORE=BEFORE, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
