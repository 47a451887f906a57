"""Rows of prompts that taps sum: which they are, against what a step without sums does; and, in Triton's interpreter
(the process that test_kernel.py starts), the whole road from the step index to a result."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.capture.transport import Arena
from steerscope.core.slot_table import Lease
from steerscope.engines.vllm.wire import Wire, WireCapture, WireColumn, WireWatch
from steerscope.engines.vllm.worker import tap
from steerscope.engines.vllm.worker.decode_fast_path import StepPlan
from steerscope.engines.vllm.worker.device import Reductions
from steerscope.engines.vllm.worker.index_layout import CELL, FEW, GROUP, ROWS, RUN_NUMBERS
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest, WatchState
from steerscope.engines.vllm.worker.step_index import StepIndex
from steerscope.lenses.rules import Compiled
from steerscope.specs.tokens import END, EVERYWHERE, Positions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernel.py starts")
TOKENS, SPAN = 1024, 2


@dataclass(frozen=True)
class Kind:
    """What a request asks, and the tokens that it feeds in two steps."""

    reduce: Any = "mean"
    hold: int = 4
    width: int = 2
    first: int = 150
    second: int = 1
    skipped: int = 0  # positions that it does not capture
    watched: bool = False
    steers: bool = False


KINDS = st.builds(
    Kind,
    reduce=st.sampled_from(["mean", "mean", "mean", "last", None]),
    hold=st.sampled_from([0, 4, 64]),
    width=st.integers(1, 3),
    first=st.integers(1, 200),
    second=st.sampled_from([0, 1, 90, 150]),
    skipped=st.sampled_from([0, 0, 3]),
    watched=st.sampled_from([False, False, True]),
)


def request(i: int, kind: Kind) -> TrackedRequest:
    positions = Positions(((kind.skipped, END),)) if kind.skipped else EVERYWHERE
    columns = (WireColumn(b"", b"", {}, EVERYWHERE, 0),) if kind.steers else ()
    capture = WireCapture((), positions, False, kind.reduce, kind.hold, 1000)
    leases = [Lease(1, 1, b"", b"")] * len(columns)
    watch = WireWatch("p", (0, "resid_post"), EVERYWHERE, 5, None, Compiled([], []), 5, 1000, 0)
    wire = Wire(str(i), None, 0, 1, columns, capture, watch if kind.watched else None)
    width = 1 if kind.watched else kind.width  # of which there is a group for each
    one = TrackedRequest(wire, leases, width, width)
    one.watched = WatchState(watch, None, [], 4, 5, 1000) if kind.watched else None  # type: ignore[arg-type]
    return one


class Steps:
    """Two steps of the same requests, beside one that asks for nothing; cells are never given twice."""

    def __init__(self, kinds: list[Kind], span: int) -> None:
        self.step_index, self.kinds, self.span, self.next = StepIndex(TOKENS, 1), kinds, span, 0
        self.step_index.requests.update({str(i): request(i, kind) for i, kind in enumerate(kinds)})
        self.at = dict.fromkeys([*self.step_index.requests, "plain"], 0)

    def reserve(self, cells: int) -> int:
        self.next += cells
        return self.next - cells

    def step(self, number: int, back: int = 0) -> tuple[StepPlan, np.ndarray]:
        """What it does, and its index. Some requests go back a few tokens, as after a preemption."""
        counts = {str(i): (kind.first, kind.second)[number] for i, kind in enumerate(self.kinds)} | {"plain": 37}
        names = [name for name, count in counts.items() if count]
        self.starts = np.cumsum([0, *(counts[name] for name in names)])
        computed = np.array([max(0, self.at[name] - back) for name in names])
        early: list[RowSlice] = []
        plan = self.step_index.plan(names, self.starts, computed, self.reserve, early.extend, self.span)
        for name, at in zip(names, computed, strict=True):
            self.at[name] = int(at) + counts[name]
        self.first = dict(zip(names, self.starts, strict=False))
        return plan, self.step_index.index.copy()


@settings(deadline=None, max_examples=120)
@given(st.lists(KINDS, min_size=1, max_size=4), st.sampled_from([0, 0, 5]))
def test_every_token_is_kept_or_summed_once_and_only_old_rows_of_means_are_summed(kinds: list[Kind], back: int) -> None:
    plain, summing = Steps(kinds, 0), Steps(kinds, SPAN)
    used: set[int] = set()
    for number in (0, 1):
        wanted, index = plain.step(number, back * number)
        found, mine = summing.step(number, back * number)
        assert wanted.runs is None
        assert [(s.start, s.stop, s.n_rows) for s in found.slices] == [
            (s.start, s.stop, s.n_rows) for s in wanted.slices
        ]
        summed = np.zeros(TOKENS, dtype=bool)
        runs = np.zeros((0, RUN_NUMBERS), dtype=int) if found.runs is None else found.runs.astype(int)
        met = np.zeros(TOKENS, dtype=int)
        for first, count, step, group, _ in runs:
            tokens = first + step * np.arange(count)
            assert 0 < count <= ROWS
            met[tokens] += 1
            summed[tokens] |= group != 0
            assert not group or (index[tokens, GROUP] == group).all()
        assert (met[: found.tokens] == 1).all() or not len(runs)
        assert not met[found.tokens :].any()
        assert not mine[summed, GROUP].any(), "what is summed is not kept"
        assert (mine[~summed, GROUP] == index[~summed, GROUP]).all()
        old = [s for s in found.slices if s.summed]
        assert summed.sum() == sum(s.summed for s in old)
        for part in old:
            kind = kinds[int(part.request.wire.name)]
            assert (kind.reduce, kind.watched) == ("mean", False)
            assert not (back and number), "rows that may have come before are kept one by one"
            assert part.summed == part.stop - part.start - kind.hold
            width = kind.width
            token = summing.first[part.request.wire.name] + (0 if number else kind.skipped)
            sums = [cell for first, _, _, group, cell in runs if group and token <= first < token + part.summed]
            assert sums == list(range(part.cell - len(sums) * SPAN * width, part.cell, SPAN * width))
            assert len(sums) == -(-part.summed // ROWS)
        for part in found.slices:
            first, size = part.freed
            cells = set(range(first, first + size))
            assert not cells & used
            used |= cells
            assert part.cell + (part.stop - part.start - part.summed) * part.request.width == first + size or not size


def test_where_somebody_steers_or_little_is_there_nothing_is_summed() -> None:
    for kinds in ([Kind(), Kind(steers=True)], [Kind(first=67)], [Kind(reduce="last")], [Kind(hold=100)]):
        plan, _ = Steps(kinds, SPAN).step(0)
        assert plan.runs is None
        assert not any(part.summed for part in plan.slices)
    assert Steps([Kind(first=68)], SPAN).step(0)[0].slices[0].summed == 64


def test_rows_that_follow_each_other_are_told_to_the_index_where_they_are() -> None:
    kinds = [Kind(reduce=None, first=5), Kind(reduce=None, first=6), Kind(first=100, width=2), Kind(first=90, width=3)]
    plan, index = Steps(kinds, SPAN).step(0)
    for part, first in zip(plan.slices, (0, 5, 11, 111), strict=True):
        kept = np.arange(first + part.summed, first + part.stop)
        assert index[kept, CELL].tolist() == list(range(part.cell, part.cell + len(kept) * part.request.width,
                                                        part.request.width))  # fmt: skip
        assert (index[kept, GROUP] == part.request.group).all()


@interpreted
@pytest.mark.parametrize(
    ("kinds", "dtype", "padding"),
    [
        ([Kind(first=85, second=90, width=3), Kind(reduce=None, first=3, second=0)], torch.float32, 20),
        ([Kind("last", first=20, watched=True), Kind(hold=0, first=70), Kind(skipped=3, first=90)], torch.bfloat16, 0),
        ([Kind(first=2, second=90), Kind(hold=64, first=130, second=130, width=1)], torch.bfloat16, 20),
    ],
)
def test_from_the_books_to_the_result(tmp_path: Path, kinds: list[Kind], dtype: torch.dtype, padding: int) -> None:
    """Every tap of two steps through the kernel, and what it leaves into the reductions of a GPU; beside it the rows
    themselves into those of a CPU. The norm and the stream are those of a step that sums nothing, to the bit."""
    from steerscope.engines.vllm.cuda import fused_norm
    from steerscope.engines.vllm.cuda.reductions import CudaReductions

    hidden, taps, rng = 6, 3, torch.Generator().manual_seed(len(kinds))
    steps = Steps(kinds, 4 // dtype.itemsize)
    cells = torch.zeros(5000 + TOKENS, hidden, dtype=dtype)
    order = torch.full((8, taps), -1, dtype=torch.int32)
    for group in range(1, 4):  # of as many taps; 4: watched at the first; 5: that and captured there
        order[group, :group] = torch.arange(group)
    order[4, 0], order[5, 0] = tap.WATCHED - 1, tap.WATCHED
    device, plain = CudaReductions(cells), {}
    requests = {
        name: one for name, one in steps.step_index.requests.items() if one.wire.capture and one.wire.capture.reduce
    }
    held = {name: device.start(one.wire.capture, one.width) for name, one in requests.items()}
    host = {name: Reductions(cells).start(one.wire.capture, one.width) for name, one in requests.items()}
    bare, none = torch.zeros(0, dtype=dtype), torch.zeros(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_norm, "FEW", 1)
        for number in (0, 1):
            plan, index = steps.step(number)
            tokens = int(steps.starts[-1])
            rows = torch.zeros(taps, tokens, hidden, dtype=dtype)
            for i in range(taps):
                delta, residual = torch.randn(2, tokens + padding, hidden, generator=rng).to(dtype)
                weight = torch.randn(hidden, generator=rng).to(dtype)
                found = []
                for runs in (None, plan.runs) if i == number == 0 else (plan.runs,):
                    where = torch.from_numpy(np.ascontiguousarray(index))
                    target = cells if runs is plan.runs else torch.zeros_like(cells)
                    listed = None if runs is None else torch.from_numpy(runs)
                    doing = tap.TapMode(False, True, listed, plan.tokens)
                    tap.at_first_tap(where, lambda doing=doing: doing)
                    found.append(fused_norm.cuda_tap_norm(
                        delta, residual, weight, 1e-6, padding == 0, none, bare, bare, bare, target, where,
                        torch.zeros(1, hidden), torch.zeros(1, 5), torch.ones(1), order[:, i].contiguous(),
                        torch.zeros(8, dtype=torch.bool), torch.zeros(8, dtype=torch.int32), True, True, i == 2,
                    ))  # fmt: skip
                    assert not tap.end_forward(where)
                assert all(torch.equal(*pair) for pair in zip(found[0], found[-1], strict=True))
                rows[i] = found[0][1][:tokens]
            for part in plan.slices:
                name = part.request.wire.name
                if name not in held or part.n_freed == 0:
                    continue
                first = int(steps.first[name]) + max(0, part.start - (steps.at[name] - steps_of(kinds, name, number)))
                mine = rows[: part.request.width, first : first + part.stop - part.start].transpose(0, 1)
                host[name].push(range(part.start, part.stop), mine)
                device.push([(held[name], part)])
                plain[name] = part.stop
            for name, one in requests.items():  # rows of pages, as they are closed
                for part in steps.step_index.close_page(one):
                    mine = cells[part.cell : part.cell + part.request.width].view(1, -1, hidden)
                    host[name].push(range(part.start, part.stop), mine)
                    device.push([(held[name], part)])
                    plain[name] = part.stop
    arena = Arena(tmp_path / "arena", 4096, create=True)
    for name, stop in plain.items():
        one = requests[name]
        assert one.wire.capture is not None
        count = one.wire.capture.positions.count(stop)
        memory = arena.view(64, (one.width, hidden), torch.float32).fill_(torch.nan)
        assert device.finish(held[name], stop, count, arena, 64) == count
        device.flush()
        wanted = host[name].finish(stop)
        assert wanted.n == count
        assert torch.allclose(memory, wanted.result(), rtol=1e-5, atol=1e-5)


def steps_of(kinds: list[Kind], name: str, number: int) -> int:
    kind = kinds[int(name)]
    return (kind.first, kind.second)[number]


@interpreted
def test_a_step_that_cannot_sum_is_refused() -> None:
    from steerscope.engines.vllm.cuda import fused_norm

    index, runs = torch.zeros(FEW + 9, 16, dtype=torch.int32), torch.zeros(1, RUN_NUMBERS, dtype=torch.int32)
    for tokens, doing in ((FEW, tap.TapMode(False, True, runs)), (FEW + 1, tap.TapMode(True, True, runs))):
        tap.at_first_tap(index, lambda doing=doing: doing)
        with pytest.raises(ValueError, match="a tap was to sum rows"):
            fused_norm.cuda_tap_norm(
                torch.zeros(tokens, 4), torch.zeros(tokens, 4), torch.ones(4), 1e-6, False, *[torch.zeros(0)] * 4,
                torch.zeros(9, 4), index, *[torch.zeros(1)] * 6, True, True, False,
            )  # fmt: skip
        tap.end_forward(index)
