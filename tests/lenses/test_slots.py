"""Slots of the hot slab, against a plain model of least recently used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.lenses.slots import LensSlots
from steerscope.specs.errors import CapacityExceeded


def test_the_lenses_used_longest_ago_make_room():
    slots = LensSlots(6, [])
    for lenses in ((0, 1), (2, 3), (4, 5)):
        assert slots.place(lenses, ()) is not None
    slots.touch((0, 1))
    assert slots.place((6, 7), ()) == {6: 2, 7: 3}
    assert set(slots.of) == {0, 1, 4, 5, 6, 7}


def test_locked_lenses_stay_and_a_placement_without_room_changes_nothing():
    slots = LensSlots(4, [])
    slots.place((0, 1), ())
    slots.place((2, 3), ())
    before = dict(slots.of)
    assert slots.place((4, 5, 6), {0, 1}) is None
    assert slots.of == before
    assert slots.place((4, 5), {0, 1}) is not None
    assert set(slots.of) == {0, 1, 4, 5}
    assert slots.place((0, 9), {1, 4, 5}) is None, "the lens 0 is wanted itself and makes no room"


def test_a_lens_of_two_groups_has_one_slot():
    slots = LensSlots(4, [])
    slots.place((0, 1), ())
    assert slots.place((1, 2), ()) == {2: 2}
    assert slots.holds((0, 1, 2))


def test_pinned_lenses_are_first_and_never_leave():
    slots = LensSlots(3, [7, 8])
    assert slots.of == {7: 0, 8: 1}
    assert slots.place((7, 1), ()) == {1: 2}
    assert slots.place((8, 2), ()) == {2: 2}
    assert slots.of == {7: 0, 8: 1, 2: 2}
    with pytest.raises(CapacityExceeded, match="2 slots"):
        LensSlots(2, [1, 2, 3])


def test_neighbouring_slots_are_preferred():
    slots = LensSlots(8, [])
    slots.place(range(8), ())
    slots.evict((0, 2, 3, 4))
    assert slots.place((10, 11, 12), ()) == {10: 2, 11: 3, 12: 4}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_slots_hold_under_any_sequence_of_use(data: st.DataObject):
    count = data.draw(st.integers(4, 9))
    pinned = data.draw(st.lists(st.integers(0, 15), max_size=2, unique=True))
    groups = st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True)
    slots, order = LensSlots(count, pinned), list[int]()  # lenses that are not pinned, last used at the end
    for lenses in data.draw(st.lists(groups, max_size=20)):
        moving = [lens for lens in lenses if lens not in pinned]
        if len(moving) > count - len(pinned):
            continue
        before = dict(slots.of)
        found = slots.place(lenses, ())
        assert found is not None
        assert set(found) == set(lenses) - set(before)
        order = [lens for lens in order if lens not in moving] + moving
        order = order[max(0, len(order) - (count - len(pinned))) :]
        assert set(slots.of) == {*pinned, *order}
        assert len(set(slots.of.values())) == len(slots.of)
        assert all(0 <= slot < count for slot in slots.of.values())
        assert all(slots.of[lens] == slot for lens, slot in before.items() if lens in slots.of)
