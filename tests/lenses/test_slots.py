"""The books of the hot slab, against a plain model of least recently used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.lenses.slots import LensSlots
from steerscope.specs.errors import CapacityExceeded


def test_the_unit_used_longest_ago_makes_room():
    slots = LensSlots(6, [])
    for name, lenses in (("a", (0, 1)), ("b", (2, 3)), ("c", (4, 5))):
        assert slots.place(name, lenses, ()) is not None
    slots.touch("a")
    found = slots.place("d", (6, 7), ())
    assert list(slots) == ["c", "a", "d"]
    assert found == {6: 2, 7: 3}, "d takes the slots b had"


def test_locked_units_stay_and_a_unit_that_finds_no_room_leaves_no_trace():
    slots = LensSlots(4, [])
    slots.place("a", (0, 1), ())
    slots.place("b", (2, 3), ())
    before = dict(slots.of)
    assert slots.place("c", (4, 5, 6), {"a"}) is None
    assert "c" not in slots
    assert slots.of == {lens: slot for lens, slot in before.items() if lens in (0, 1)}
    assert slots.place("c", (4, 5), {"a"}) is not None
    assert slots.place("d", (0, 9), {"a", "c"}) is None
    assert set(slots.of) == {0, 1, 4, 5}, "the lens d shares with a must not go with d"


def test_a_lens_of_two_units_has_one_slot_and_stays_with_the_second():
    slots = LensSlots(4, [])
    slots.place("a", (0, 1), ())
    assert slots.place("b", (1, 2), ()) == {2: 2}
    slots.evict("a")
    assert set(slots.of) == {1, 2}


def test_pinned_lenses_are_first_and_never_leave():
    slots = LensSlots(3, [7, 8])
    assert slots.of == {7: 0, 8: 1}
    assert slots.place("a", (7, 1), ()) == {1: 2}
    slots.evict("a")
    assert slots.of == {7: 0, 8: 1}
    with pytest.raises(CapacityExceeded, match="2 slots"):
        LensSlots(2, [1, 2, 3])


def test_neighbouring_slots_are_preferred():
    slots = LensSlots(8, [])
    for name, lens in zip("abcdefgh", range(8), strict=True):
        slots.place(name, (lens,), ())
    for name in "acde":
        slots.evict(name)
    assert slots.place("x", (10, 11, 12), ()) == {10: 2, 11: 3, 12: 4}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_books_hold_under_any_sequence_of_use(data: st.DataObject):
    count = data.draw(st.integers(4, 9))
    pinned = data.draw(st.lists(st.integers(0, 15), max_size=2, unique=True))
    slots, order = LensSlots(count, pinned), []
    units = {
        name: tuple(data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True))) for name in "abcd"
    }
    room = count - len(pinned)
    for name in data.draw(st.lists(st.sampled_from("abcd"), max_size=20)):
        if len(set(units[name]) - set(pinned)) > room:
            continue
        if name in slots:
            slots.touch(name)
            order.remove(name)
        else:
            known = set(slots.of)
            found = slots.place(name, units[name], ())
            assert found is not None
            assert not set(found) & (known & set(slots.of)) or set(found).isdisjoint(known)
        order = [other for other in order if other in slots] + [name]
        assert list(slots) == order
        assert set(slots.of) == set(pinned) | {lens for unit in order for lens in units[unit]}
        assert len(set(slots.of.values())) == len(slots.of)
        assert all(0 <= slot < count for slot in slots.of.values())
