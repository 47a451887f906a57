"""Reductions: every position once, whatever the chunks, with the n they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.core.rows import HeldBack, Reducer
from steerscope.specs.errors import RequestFailed

PROPERTY = settings(deadline=None, max_examples=80, derandomize=True)
CPU = torch.device("cpu")
KEYS, HIDDEN, LENGTH = 2, 5, 24
ROWS = torch.randn(LENGTH, KEYS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# A float32 sum of 24 numbers of size 1 is off by at most 24 · 6e-8; the order of adding changes no more than that.
TOLERANCE = 3e-6


def make(kind) -> Reducer:
    return Reducer(kind, KEYS, HIDDEN, CPU)


def expected(kind: str, positions: list[int]) -> torch.Tensor:
    rows = ROWS[positions]
    return rows.mean(0) if kind == "mean" else rows[-1]


@PROPERTY
@given(
    kind=st.sampled_from(["mean", "last"]),
    positions=st.sets(st.integers(0, LENGTH - 1), min_size=1),
    sizes=st.lists(st.integers(1, 7), min_size=LENGTH, max_size=LENGTH),
)
def test_any_chunks_give_the_same_result_and_the_same_n(kind, positions, sizes):
    chosen = sorted(positions)
    reducer, at = make(kind), 0
    for size in sizes:
        part = chosen[at : at + size]
        reducer.update(part, ROWS[part].float())
        at += size
    assert reducer.n == len(chosen)
    assert torch.allclose(reducer.result().double(), expected(kind, chosen), rtol=0, atol=TOLERANCE)


@PROPERTY
@given(
    kind=st.sampled_from(["mean", "last"]),
    steps=st.lists(st.tuples(st.integers(0, LENGTH), st.integers(1, 8)), max_size=10),
)
def test_positions_fed_again_after_a_preemption_count_once(kind, steps):
    """Each step starts anywhere at or below the mark, as a recomputation does, and runs on for some positions."""
    reducer, mark = make(kind), 0
    for back, size in steps:
        start = max(0, mark - back)
        stop = min(start + size, LENGTH)
        rows = ROWS[start:stop].float()
        rows[: max(0, mark - start)] += 1e-3  # recomputed rows may differ a little: the first ones count
        reducer.update(range(start, stop), rows)
        mark = max(mark, stop)
    assert reducer.n == mark
    if mark:
        assert torch.allclose(reducer.result().double(), expected(kind, list(range(mark))), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_half_precision_rows_are_reduced_in_float32(kind):
    rows = torch.full((4096, KEYS, HIDDEN), 1.0078125, dtype=torch.bfloat16)  # a bf16 sum would stop at 256
    reducer = make(kind)
    for start in range(0, 4096, 1000):
        stop = min(start + 1000, 4096)
        reducer.update(range(start, stop), rows[start:stop])
    assert reducer.result().dtype == torch.float32
    assert torch.equal(reducer.result(), torch.full((KEYS, HIDDEN), 1.0078125))
    assert reducer.n == 4096


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_no_rows_are_n_zero_and_not_a_number(kind):
    reducer = make(kind)
    reducer.update([], torch.empty(0, KEYS, HIDDEN))
    assert reducer.n == 0
    assert torch.isnan(reducer.result()).all()  # zeros would pass for a measurement


@PROPERTY
@given(
    kind=st.sampled_from(["mean", "last"]),
    sizes=st.lists(st.integers(1, 5), min_size=8, max_size=8),
    hold=st.integers(0, 6),
    overshoot=st.integers(0, 6),
    again=st.booleans(),
)
def test_rows_past_the_end_never_count(kind, sizes, hold, overshoot, again):
    """The engine computes `overshoot` rows more than the text has; the end is known afterwards."""
    held, at = HeldBack(make(kind), hold), 0
    for i, size in enumerate(sizes):
        start = 0 if again and i == 4 else at  # a preemption: everything comes again
        at += size
        shared = ROWS.float()[start : min(at, LENGTH)].clone()
        held.push(range(start, min(at, LENGTH)), shared)
        shared.fill_(torch.nan)  # the engine uses its memory again
    computed = min(at, LENGTH)
    rows = computed - min(overshoot, computed - 1)
    if held.reducer.next > rows:
        assert overshoot > hold
        with pytest.raises(RequestFailed, match="too far"):
            held.finish(rows)
        return
    reducer = held.finish(rows)
    assert reducer.n == rows
    assert torch.allclose(reducer.result().double(), expected(kind, list(range(rows))), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("hold", [0, 2, 6])
def test_of_rows_that_are_computed_again_while_they_are_held_back_the_first_ones_count(hold):
    held = HeldBack(make("mean"), hold)
    held.push(range(0, 6), ROWS[:6].float())
    held.push(range(3, 9), torch.cat([ROWS[3:6].float() + 1.0, ROWS[6:9].float()]))
    reducer = held.finish(9)
    assert reducer.n == 9
    assert torch.allclose(reducer.result().double(), expected("mean", list(range(9))), rtol=0, atol=TOLERANCE)
