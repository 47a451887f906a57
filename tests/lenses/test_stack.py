"""Ranges of slots, and narrow weights."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from steerscope.lenses.stack import quantise, slot_ranges


@given(slots=st.lists(st.integers(0, 40), unique=True, max_size=20).map(sorted))
def test_every_slot_is_in_one_range_and_ranges_do_not_touch(slots):
    ranges = slot_ranges(slots)
    assert [slot for part in ranges for slot in part] == slots
    assert all(b.start > a.stop for a, b in zip(ranges, ranges[1:], strict=False))


def test_int8_is_off_by_half_a_step_at_most():
    weight = torch.randn(5, 7, 64)
    weight[2, 3] = 0
    small, scale = quantise(weight)
    assert small.dtype == torch.int8
    assert small.abs().max() == 127
    step = scale.unsqueeze(-1)
    assert ((small * step - weight).abs() <= step / 2 * (1 + 1e-5)).all()
