"""Packing ops into columns, and the slots they live in: order, sharing, eviction, and nothing left behind."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.core.equation import NOTHING
from steerscope.core.slot_table import Column, Key, Lease, PlacedOp, SlotPool, SlotTable, pack
from steerscope.specs.errors import CapacityExceeded
from steerscope.specs.steering import Coefficients
from steerscope.specs.tokens import EVERYWHERE, Positions

PROPERTY = settings(deadline=None, max_examples=80, derandomize=True)
HIDDEN = 4
CPU = torch.device("cpu")
KEYS: list[Key] = [(0, "resid_post"), (1, "resid_post"), (1, "attn_out"), (2, "mlp_out")]
INF = float("inf")


def vector(number: float) -> np.ndarray:
    return np.full(HIDDEN, number, dtype=np.float32)


def strength(c: float) -> Coefficients:
    return (c, 0.0, 0.0, -INF, INF)


def column(vectors: dict[Key, float], c: float = 1.0) -> Column:
    return Column(EVERYWHERE, 0, {key: vector(x) for key, x in vectors.items()}, {key: strength(c) for key in vectors})


# --- packing

SPANS = [EVERYWHERE, Positions(((0, 3),)), Positions(((2, 5),)), Positions(((0, 1), (4, 6)))]


@settings(PROPERTY, max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(KEYS), st.sampled_from(SPANS), st.integers(0, 1)),
        max_size=10,
    )
)
def test_every_token_meets_its_ops_at_every_tap_in_the_order_they_were_given(drawn):
    ops = [PlacedOp(key, positions, vector(i), strength(i), gate) for i, (key, positions, gate) in enumerate(drawn)]
    columns = pack(ops)
    for key in KEYS:
        for position in range(7):
            expected = [(i, op.gate) for i, op in enumerate(ops) if op.key == key and position in op.positions]
            replayed = [
                (int(c.coefficients[key][0]), c.gate) for c in columns if position in c.positions and key in c.vectors
            ]
            assert replayed == expected
            assert all(c.vectors.keys() == c.coefficients.keys() for c in columns)
    assert sum(len(c.vectors) for c in columns) == len(ops)


def test_an_op_on_every_layer_needs_one_column_and_each_further_op_at_a_tap_one_more():
    everywhere = [PlacedOp((layer, "resid_post"), EVERYWHERE, vector(1), strength(1)) for layer in range(32)]
    assert len(pack(everywhere)) == 1
    assert len(pack(everywhere + everywhere)) == 2
    assert pack([]) == []


def test_ops_with_other_tokens_or_gates_go_into_other_columns():
    ops = [PlacedOp((layer, "resid_post"), SPANS[layer], vector(1), strength(1)) for layer in range(3)]
    assert len(pack(ops)) == 3
    gated = [PlacedOp((layer, "resid_post"), EVERYWHERE, vector(1), strength(1), gate=layer) for layer in range(3)]
    assert len(pack(gated)) == 3


# --- slots by content key


class Model:
    """What SlotPool promises, in the plainest form: users per key, idle keys oldest first."""

    def __init__(self, capacity: int) -> None:
        self.room, self.users, self.idle = capacity - 1, {}, OrderedDict()

    def acquire(self, key: str) -> bool:
        """Whether there is room."""
        if key not in self.users:
            if len(self.users) == self.room:
                if not self.idle:
                    return False
                del self.users[self.idle.popitem(last=False)[0]]
            self.users[key] = 0
        self.users[key] += 1
        self.idle.pop(key, None)
        return True

    def release(self, key: str) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            self.idle[key] = None


@PROPERTY
@given(capacity=st.integers(1, 5), steps=st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefg")), max_size=40))
def test_slots_follow_their_plain_model_step_by_step(capacity: int, steps):
    slots, model = SlotPool(capacity, "vector"), Model(capacity)
    held: list[str] = []
    numbers: dict[str, int] = {}
    for take, key in steps:
        if take:
            known = set(model.users)
            if model.acquire(key):
                slot, new = slots.acquire(key)
                assert new == (key not in known)
                assert 1 <= slot < capacity  # 0 means "do nothing" and belongs to no vector
                held.append(key)
                numbers = {k: n for k, n in numbers.items() if k in model.users} | {key: slot}
            else:
                with pytest.raises(CapacityExceeded):
                    slots.acquire(key)
        elif key in held:
            held.remove(key)
            model.release(key)
            slots.release(key)
        assert slots.in_use == len(set(held))
        in_use = [numbers[k] for k in set(held)]
        assert len(in_use) == len(set(in_use))  # two contents never share a slot
        for k in set(held):
            assert slots.acquire(k) == (numbers[k], False)  # in use: never moved, never evicted
            slots.release(k)


def test_the_longest_unused_slot_goes_first_and_using_it_again_makes_it_the_last():
    slots = SlotPool(4, "vector")
    number = {key: slots.acquire(key)[0] for key in "abc"}
    for key in "bac":
        slots.release(key)
    assert slots.acquire("b") == (number["b"], False)
    slots.release("b")  # unused since: a, c, b
    assert slots.acquire("x") == (number["a"], True)
    assert slots.acquire("y") == (number["c"], True)
    assert slots.acquire("b") == (number["b"], False)


def test_a_slot_shared_by_two_is_kept_until_both_are_gone():
    slots = SlotPool(2, "vector")
    slots.acquire("a")
    slots.acquire("a")
    slots.release("a")
    with pytest.raises(CapacityExceeded):
        slots.acquire("b")
    slots.release("a")
    assert slots.acquire("b") == (1, True)


def test_full_slots_say_how_many_there_are_and_what_to_do():
    slots = SlotPool(3, "vector")
    slots.acquire("a")
    slots.acquire("b")
    with pytest.raises(CapacityExceeded, match="all 2 vector slots are in use.*wait for some to finish.*more slots"):
        slots.acquire("c")
    assert slots.in_use == 2


# --- the table

known_or_not = pytest.mark.parametrize("known", [False, True])


def made(capacity: int, known: bool) -> SlotTable:
    """`known`: all taps are, from the start, and lie in one piece."""
    table = SlotTable(HIDDEN, capacity, CPU)
    if known:
        vectors, coefficients = table.reserve(KEYS)
        assert [table.tensors(key)[0].data_ptr() for key in KEYS] == [part.data_ptr() for part in vectors]
        assert [table.tensors(key)[1].data_ptr() for key in KEYS] == [part.data_ptr() for part in coefficients]
    return table


def check(table: SlotTable, lease: Lease, expected: Column) -> None:
    """At every tap the lease's slots hold exactly the column, and nothing where the column has nothing."""
    for key in KEYS:
        vectors, coefficients = table.tensors(key)
        wanted = torch.from_numpy(expected.vectors.get(key, vector(0)))
        assert torch.equal(vectors[lease.vector_slot], wanted)
        assert coefficients[lease.coefficient_slot].tolist() == list(expected.coefficients.get(key, NOTHING))
        assert not vectors[0].any()
        assert coefficients[0].tolist() == list(NOTHING)


CONTENTS = st.builds(
    column,
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=3),
    st.sampled_from([float(x) for x in range(1, 9)]),
)


@settings(PROPERTY, max_examples=120)
@given(
    capacity=st.integers(2, 4),
    known=st.booleans(),
    steps=st.lists(st.one_of(CONTENTS, st.integers(0, 20)), max_size=50),
)
def test_whatever_comes_and_goes_each_lease_finds_exactly_its_own_numbers(capacity: int, known: bool, steps):
    """A column is acquired, a number releases the lease of that index. Taps appear as they are first used."""
    table = made(capacity, known)
    held: list[tuple[Lease, Column]] = []
    for step in steps:
        if isinstance(step, int):
            if step < len(held):
                table.release(held.pop(step)[0])
            continue
        before = table.in_use
        try:
            held.append((table.acquire(step), step))
        except CapacityExceeded:
            assert table.in_use == before
        for lease, expected in held:
            for key, wanted in expected.vectors.items():
                vectors, coefficients = table.tensors(key)
                assert torch.equal(vectors[lease.vector_slot], torch.from_numpy(wanted))
                assert coefficients[lease.coefficient_slot].tolist() == list(expected.coefficients[key])
    for lease, expected in held:
        check(table, lease, expected)


def test_equal_contents_share_slots_and_another_strength_costs_one_coefficient_row():
    table = SlotTable(HIDDEN, 8, CPU)
    first = table.acquire(column({KEYS[0]: 1.0, KEYS[1]: 2.0}))
    same = table.acquire(column({KEYS[1]: 2.0, KEYS[0]: 1.0}))
    louder = table.acquire(column({KEYS[0]: 1.0, KEYS[1]: 2.0}, c=5.0))
    assert same == first
    assert louder.vector_slot == first.vector_slot
    assert louder.coefficient_slot != first.coefficient_slot
    assert table.in_use == 1


def test_the_version_tells_when_something_that_was_looked_up_may_have_changed():
    table = SlotTable(HIDDEN, 3, CPU)
    seen = [table.version]
    for number in (1.0, 2.0):
        lease = table.acquire(column({KEYS[0]: number}))
        seen.append(table.version)
        table.release(lease)
    table.acquire(column({KEYS[0]: 2.0}))
    assert seen == sorted(set(seen))
    assert table.version == seen[-1], "nothing was written"


def test_contents_that_differ_in_one_number_or_one_tap_never_share():
    table = SlotTable(HIDDEN, 16, CPU)
    contents: list[dict[Key, float]] = [
        {KEYS[0]: 1.0},
        {KEYS[0]: float(np.nextafter(np.float32(1), np.float32(2)))},
        {KEYS[1]: 1.0},
        {KEYS[2]: 1.0},
        {KEYS[0]: 1.0, KEYS[1]: 1.0},
        {KEYS[0]: 1.0, KEYS[1]: 2.0},
        {KEYS[0]: 2.0, KEYS[1]: 1.0},
    ]
    leases = [table.acquire(column(content)) for content in contents]
    assert len({lease.vector_slot for lease in leases}) == len(contents)
    for lease, content in zip(leases, contents, strict=True):
        check(table, lease, column(content))


@known_or_not
def test_a_slot_used_again_holds_nothing_of_its_last_owner_at_any_layer(known: bool):
    table = made(2, known)  # one slot for vectors: it must be used again
    first = table.acquire(column({KEYS[0]: 1.0, KEYS[1]: 2.0}, c=3.0))
    table.release(first)
    # The second owner comes with a tap that did not exist when the slot was first written.
    wanted = column({KEYS[1]: 7.0, KEYS[3]: 8.0}, c=4.0)
    second = table.acquire(wanted)
    assert second.vector_slot == first.vector_slot
    check(table, second, wanted)
    table.release(second)
    check(table, table.acquire(last := column({KEYS[2]: 9.0})), last)


@known_or_not
def test_coefficient_slots_used_again_hold_nothing_of_their_last_owner_either(known: bool):
    table = made(2, known)  # 7 coefficient slots
    for c in range(1, 8):
        table.release(table.acquire(column({KEYS[0]: 1.0, KEYS[1]: 1.0}, c=float(c))))
    wanted = column({KEYS[1]: 1.0}, c=99.0)
    check(table, table.acquire(wanted), wanted)


def test_a_request_refused_for_want_of_coefficient_slots_leaves_no_unwritten_vector_behind():
    """The vector slot was taken first: asked for again later, it must hold the vector and not what was there before."""
    table = SlotTable(HIDDEN, 3, CPU)  # 2 vector slots, 11 coefficient slots
    crowd = [table.acquire(column({KEYS[0]: 1.0}, c=float(c))) for c in range(1, 12)]
    late = column({KEYS[0]: 5.0, KEYS[1]: 6.0}, c=50.0)
    with pytest.raises(CapacityExceeded, match="all 11 coefficient slots"):
        table.acquire(late)
    assert table.in_use == 1
    table.release(crowd.pop())
    check(table, table.acquire(late), late)
    for c, lease in enumerate(crowd, start=1):
        check(table, lease, column({KEYS[0]: 1.0}, c=float(c)))


def test_a_refused_request_leaves_the_counts_as_they_were_and_the_others_untouched():
    table = SlotTable(HIDDEN, 3, CPU)
    kept = [column({KEYS[0]: 1.0}), column({KEYS[0]: 2.0}, c=2.0)]
    leases = [table.acquire(content) for content in kept]
    for _ in range(3):
        with pytest.raises(CapacityExceeded, match="all 2 vector slots"):
            table.acquire(column({KEYS[0]: 3.0}, c=3.0))
    assert table.in_use == 2
    for lease, content in zip(leases, kept, strict=True):
        check(table, lease, content)
    for lease in leases:
        table.release(lease)
    assert table.in_use == 0
    table.acquire(column({KEYS[0]: 3.0}, c=3.0))
    assert table.in_use == 1


def test_a_tap_for_which_memory_runs_out_takes_no_slot(monkeypatch: pytest.MonkeyPatch):
    table = SlotTable(HIDDEN, 3, CPU)
    wanted = column({KEYS[0]: 1.0})

    def no_memory(_table: SlotTable, key: Key) -> None:
        raise torch.OutOfMemoryError(f"no room for {key}")

    with monkeypatch.context() as patch:
        patch.setattr(SlotTable, "tensors", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            table.acquire(wanted)
    assert table.in_use == 0
    check(table, table.acquire(wanted), wanted)


def test_the_table_keeps_its_own_copy_of_a_vector():
    table = SlotTable(HIDDEN, 3, CPU)
    wanted = column({KEYS[0]: 1.0})
    lease = table.acquire(wanted)
    wanted.vectors[KEYS[0]][:] = 99.0
    check(table, lease, column({KEYS[0]: 1.0}))
