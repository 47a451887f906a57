"""Runs of slots and the columns of their results."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from steerscope.lenses.stack import columns_of, quantise, slot_ranges


@given(
    slots=st.lists(st.integers(0, 40), unique=True, max_size=20).map(sorted),
    bridge=st.integers(0, 6),
    data=st.data(),
)
def test_every_slot_is_in_one_run_of_its_kind_and_its_column_is_found(slots, bridge, data):
    flags = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    runs = slot_ranges(slots, flags, bridge)
    evaluated = [(slot, run.normed) for run in runs for slot in range(run.start, run.stop)]
    assert [evaluated[column] for column in columns_of(slots, runs)] == list(zip(slots, flags, strict=True))
    assert len(evaluated) - len(slots) <= bridge * len(slots)
    if bridge == 0:
        assert len(evaluated) == len(slots)
    neighbours = zip(runs, runs[1:], strict=False)
    assert all(b.start - a.stop > bridge or a.normed != b.normed for a, b in neighbours)


def test_int8_is_off_by_half_a_step_at_most():
    weight = torch.randn(5, 7, 64)
    weight[2, 3] = 0
    small, scale = quantise(weight)
    assert small.dtype == torch.int8
    assert small.abs().max() == 127
    step = scale.unsqueeze(-1)
    assert ((small * step - weight).abs() <= step / 2 * (1 + 1e-5)).all()
