"""What a tap does to decoding tokens, laid out before the steps that use it.

To steer a token, a tap looks up which vector, then reads it, and the second read waits for the first: in a decoding
step that is most of what steering costs. Keeping a row is the same with its place in its group. But from one step to
the next the tokens of a decoding batch ask for the same. So when the batch changes, one kernel writes for every tap and
token what is to be added, or the vector of an op that depends on the stream, and the place of the tap in the token's
group, where only the token's number leads. What rules switch, and tokens with several such ops, are looked up as ever.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerscope.engines.vllm.worker.step_index import ENTRIES, GROUP

# Numbers behind a row, a whole cache line: what it is, the five coefficients of an op, the place in the group, and
# whether that keeps rows as they were before their ops.
TAIL, PLACE, BEFORE = 16, 6, 7
_MOST = 128 << 20  # bytes, at most


@triton.jit
def _lay_kernel(
    laid, index, vectors, coefficients, orders, before, tokens, rows, index_width, hidden, slots, numbers, groups,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr, TAIL: tl.constexpr,
    PLACE: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """−1: look it up; 0: nothing; 1: add this row; 2: this is the vector of the only op, its coefficients follow."""
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    out = laid + (tap * rows + token) * (hidden + TAIL)
    what = -1.0
    if token < tokens:
        at = tl.arange(0, BLOCK)
        inside = at < hidden
        mine = index + token * index_width
        group = tl.load(mine + GROUP)
        tl.store(out + hidden + PLACE, tl.load(orders + tap * groups + group).to(tl.float32))
        tl.store(out + hidden + BEFORE, tl.load(before + group).to(tl.float32))
        row = tl.zeros([BLOCK], dtype=tl.float32)
        last = tl.zeros([BLOCK], dtype=tl.float32)
        acting, hard, gated, five = 0, 0, 0, coefficients + tap * numbers * 5
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
                hard += ((s != 0) | (m != 0)).to(tl.int32)
                gated += (tl.load(mine + ENTRIES + 2 + 3 * k) != 0).to(tl.int32)
        if acting == 0:
            what = 0.0
        elif (hard == 0) & (gated == 0):
            what = 1.0
        elif (acting == 1) & (gated == 0):
            what = 2.0
            row = last
            for i in tl.static_range(5):
                tl.store(out + hidden + 1 + i, tl.load(five + i))
        if what > 0:
            tl.store(out + at, row, mask=inside)
    tl.store(out + hidden, what)


class Laying:
    """For the taps of a worker, [taps, slots, …] as the slot table has them."""

    def __init__(
        self, vectors: Tensor, coefficients: Tensor, orders: Tensor, before: Tensor, index: Tensor, requests: int
    ) -> None:
        taps, _, hidden = vectors.shape
        self._vectors, self._coefficients, self._index = vectors, coefficients, index
        self._orders, self._before = orders, before  # [taps, groups], [groups]
        self.rows = min(requests, _MOST // (4 * taps * (hidden + TAIL)))  # tokens of a step that has this
        self.laid = torch.zeros(taps, self.rows, hidden + TAIL, device=vectors.device)
        self.laid[:, :, hidden] = -1
        self._tokens = 0

    def lay(self, tokens: int) -> None:
        """For so many tokens, as the index on the device says; what lay ready for others no longer does."""
        count, self._tokens = max(tokens, self._tokens), tokens
        if not count:
            return
        taps, slots, hidden = self._vectors.shape
        block = triton.next_power_of_2(hidden)
        _lay_kernel[(count, taps)](  # type: ignore[index]
            self.laid,
            self._index,
            self._vectors,
            self._coefficients,
            self._orders,
            self._before,
            tokens,
            self.rows,
            self._index.shape[1],
            hidden,
            slots,
            self._coefficients.shape[1],
            self._orders.shape[1],
            COLUMNS=(self._index.shape[1] - ENTRIES) // 3,
            BLOCK=block,
            GROUP=GROUP,
            ENTRIES=ENTRIES,
            TAIL=TAIL,
            PLACE=PLACE,
            BEFORE=BEFORE,
            num_warps=max(1, min(16, block // 256)),
        )
