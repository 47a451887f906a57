"""Tiers: whatever comes and goes in the hot slab, the results are those of the full bank; and the budget holds."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenses.packs import make, rows
from lenses.test_expand import assert_as_slow
from steerscope.lenses import Pack
from steerscope.lenses.bank import Bank
from steerscope.lenses.expand import BankExpander
from steerscope.lenses.tiers import LensSlots, Tiers
from steerscope.specs.errors import InvalidRequest

COUNTS = [3, 8, 20, 40]


def used(tiers: Tiers) -> int:
    return len(tiers.slots.of)


@settings(max_examples=20, deadline=None)
@given(
    at_once=st.booleans(),
    extra=st.integers(1, 40),
    base_levels=st.integers(1, 2),
    top_k=st.integers(1, 8),
    depth=st.integers(0, 4),
    calibrated=st.booleans(),
    normed=st.booleans(),
    seed=st.integers(0, 30),
    batches=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_any_budget_and_any_access_give_what_the_full_bank_gives(
    extra, base_levels, top_k, depth, calibrated, normed, seed, batches, at_once
):
    pack = make(COUNTS, seed=seed, calibrated=calibrated, normed=normed)
    budget = sum(COUNTS[:base_levels]) + extra
    bank = Bank(pack)
    tiers = Tiers(pack, budget=budget, base_levels=base_levels, at_once=at_once)
    for turn, n in enumerate(batches):
        x = rows(n, seed=seed * 100 + turn)
        found = tiers.expand(x, top_k, depth, keep_scores=True)
        assert_as_slow(found, bank.scores(x), base_levels, top_k, depth)
        assert used(tiers) <= budget


def test_what_is_hot_is_found_in_one_pass_over_the_slab():
    pack, x = make(COUNTS, calibrated=True), rows(3)
    tiers = Tiers(pack, budget=60, at_once=True)
    tiers._stack.tensors["b2"][11:].fill_(torch.nan)  # slots that hold nothing yet
    first = tiers.expand(x, 5, 4, keep_scores=True)
    assert tiers.stats.misses
    moved, hits, misses = tiers.stats.bytes_moved, tiers.stats.hits, tiers.stats.misses
    tiers._expand = None  # what the way that loads would need
    again = tiers.expand(x, 5, 4, keep_scores=True)
    assert (tiers.stats.bytes_moved, tiers.stats.misses) == (moved, misses)
    assert tiers.stats.hits > hits
    assert_as_slow(again, Bank(pack).scores(x), 2, 5, 4)
    assert torch.equal(again.indices, first.indices)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_narrow_weights_are_the_same_narrow_weights_in_a_bank(weights):
    pack, x = make(COUNTS, calibrated=True), rows(9)
    tiers = Tiers(pack, budget=20, weights=weights)
    found = tiers.expand(x, 5, 4, keep_scores=True)
    full = BankExpander(Bank(pack, weights=weights)).expand(x, 5, 4, keep_scores=True)
    assert torch.equal(found.indices, full.indices)
    torch.testing.assert_close(found.scores, full.scores, atol=1e-5, rtol=0)


def test_a_pack_on_disk_is_read_as_far_as_it_is_needed(tmp_path: Path):
    make(COUNTS).save(tmp_path / "pack")
    pack, x = Pack.load(tmp_path / "pack", verify=False), rows(1)
    tiers = Tiers(pack, budget=30)
    found = tiers.expand(x, 2, 1)
    loaded = tiers.stats.bytes_read / pack.lens_bytes
    assert torch.equal(found.indices, BankExpander(Bank(pack)).expand(x, 2, 1).indices)
    assert 0 < loaded < 15


# --- budgets


def test_the_slab_is_as_large_as_the_budget_and_never_grows():
    pack = make(COUNTS)
    tiers = Tiers(pack, budget=18)
    slab = {name: tensor.data_ptr() for name, tensor in tiers._stack.tensors.items()}
    assert {len(tensor) for tensor in tiers._stack.tensors.values()} == {18}
    tiers.expand(rows(40), 6, 4)
    assert tiers.stats.misses > 18
    assert {name: tensor.data_ptr() for name, tensor in tiers._stack.tensors.items()} == slab


def test_a_budget_in_bytes_is_not_exceeded():
    pack = make(COUNTS)
    tiers = Tiers(pack, budget_bytes=30_000)
    size = sum(tensor.nbytes for tensor in tiers._stack.tensors.values())
    assert 30_000 - tiers._stack.lens_bytes < size <= 30_000


def test_a_budget_that_cannot_hold_the_base_and_one_more_is_refused():
    pack = make(COUNTS)
    with pytest.raises(
        InvalidRequest, match="holds 11 lenses; the base levels and pinned concepts are 11.*at least 12"
    ):
        Tiers(pack, budget=11)
    with pytest.raises(InvalidRequest, match="pinned concepts are 13"):
        Tiers(pack, budget=13, pinned=["c2.3", "c3.5"])
    with pytest.raises(InvalidRequest, match="twice or not at all"):
        Tiers(pack)
    tiers = Tiers(make([3, 8]), budget=11)  # the whole pack is the base: nothing will ever be loaded
    assert tiers.expand(rows(2)).indices.shape == (2, 10)


# --- what stays hot


def test_the_lenses_used_longest_ago_make_room_and_pinned_ones_stay():
    slots = LensSlots(7, [9])
    for lenses in ((0, 1), (2, 3), (4, 5)):
        slots.place(lenses)
    slots.touch((0, 1, 9))
    assert slots.place((6, 7)) == [3, 4]
    assert slots.of == {9: 0, 0: 1, 1: 2, 6: 3, 7: 4, 4: 5, 5: 6}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_slots_hold_under_any_sequence_of_use(data: st.DataObject):
    count = data.draw(st.integers(4, 9))
    pinned = data.draw(st.lists(st.integers(0, 15), max_size=2, unique=True))
    groups = st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True)
    slots, order = LensSlots(count, pinned), list[int]()  # lenses that are not pinned, last used at the end
    for lenses in data.draw(st.lists(groups, max_size=20)):
        moving = [lens for lens in lenses if lens not in pinned]
        if len(moving) > slots.room:
            continue
        before = dict(slots.of)
        slots.touch(lenses)
        slots.place([lens for lens in moving if lens not in before])
        held = [lens for lens in moving if lens in before]
        order = [lens for lens in order if lens not in moving] + held + [x for x in moving if x not in before]
        order = order[max(0, len(order) - slots.room) :]
        assert set(slots.of) == {*pinned, *order}
        assert len(set(slots.of.values())) == len(slots.of)
        assert all(0 <= slot < count for slot in slots.of.values())
        assert all(slots.of[lens] == slot for lens, slot in before.items() if lens in slots.of)


def test_what_was_loaded_once_is_a_hit_the_second_time():
    pack, x = make(COUNTS), rows(3)
    tiers = Tiers(pack, budget=60)
    tiers.expand(x, 4, 3)
    assert tiers.stats.hits < tiers.stats.misses
    moved, missed, hits = tiers.stats.bytes_moved, tiers.stats.misses, tiers.stats.hits
    tiers.expand(x, 4, 3)
    assert (tiers.stats.bytes_moved, tiers.stats.misses) == (moved, missed)
    assert tiers.stats.hits >= hits + missed
    assert tiers.stats.hit_rate == tiers.stats.hits / (tiers.stats.hits + tiers.stats.misses)


def test_bytes_and_misses_count_every_lens_that_was_loaded():
    pack = make(COUNTS)
    tiers = Tiers(pack, budget=60)
    tiers.expand(rows(2), 3, 4)
    loaded = used(tiers) - 11
    assert tiers.stats.misses == loaded > 0
    assert tiers.stats.bytes_moved == loaded * tiers._stack.lens_bytes


def test_pinned_concepts_are_hot_from_the_start_and_scored_without_a_load():
    pack, x = make(COUNTS, calibrated=True, normed=True), rows(5)
    names = ["c3.7", "c0.1", "c2.4"]
    tiers = Tiers(pack, budget=16, pinned=names)
    tiers.expand(rows(30), 6, 4)
    missed = tiers.stats.misses
    found = tiers.pinned_scores(x)
    assert tiers.stats.misses == missed
    expected = Bank(pack).scores(x)[:, [pack.index(name) for name in names]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_warm_tier_has_a_bound_and_spares_the_cold_one():
    pack, x = make(COUNTS), rows(20)
    tiers = Tiers(pack, budget=14, warm_bytes=1 << 30)
    tiers.expand(x, 6, 3)
    read, moved = tiers.stats.bytes_read, tiers.stats.bytes_moved
    tiers.expand(x, 6, 3)
    assert tiers.stats.bytes_moved > moved
    assert tiers.stats.bytes_read - read < read / 2
    tiers = Tiers(pack, budget=14, warm_bytes=5000)
    tiers.expand(x, 6, 3)
    assert 0 < tiers._warm.nbytes <= 5000


# --- loading


def test_a_load_that_fails_is_reported_and_tried_again_the_next_time():
    pack, x = make(COUNTS), rows(4)
    tiers = Tiers(pack, budget=30)
    real = tiers._warm.get

    def broken(lenses: tuple[int, ...]):
        raise OSError(f"the disk is gone {len(lenses)}")

    tiers._warm.get = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        tiers.expand(x, 5, 3)
    tiers._warm.get = real  # type: ignore[method-assign]
    found = tiers.expand(x, 5, 3)
    assert torch.equal(found.indices, BankExpander(Bank(pack)).expand(x, 5, 3).indices)


def test_threads_share_tiers_and_each_gets_its_own_results():
    pack = make(COUNTS)
    whole = BankExpander(Bank(pack))
    inputs = [rows(3, seed=s) for s in range(6)]
    expected = [whole.expand(x, 4, 3).indices for x in inputs]
    wrong: list[int] = []
    tiers = Tiers(pack, budget=16)

    def work(i: int) -> None:
        for _ in range(5):
            if not torch.equal(tiers.expand(inputs[i], 4, 3).indices, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
