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
from steerscope.lenses.hierarchy import indices
from steerscope.lenses.tiers import COMPONENTS, Tiers
from steerscope.specs.errors import InvalidRequest
from support.waiting import HUNG_S

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
    with Tiers(pack, budget=budget, base_levels=base_levels, at_once=at_once) as tiers:
        for turn, n in enumerate(batches):
            x = rows(n, seed=seed * 100 + turn)
            found = tiers.expand(x, top_k, depth, keep_scores=True)
            assert_as_slow(found, bank.scores(x), base_levels, top_k, depth)
            assert used(tiers) <= budget


def test_gaps_are_bridged_and_what_lies_in_them_never_shows():
    pack, x = make(COUNTS, normed=True, calibrated=True), rows(6)
    results = []
    for bridge in (0, 3, 1000):
        with Tiers(pack, budget=25) as tiers:
            tiers._bridge = bridge
            tiers._stack.tensors["b2"][11:].fill_(torch.nan)  # slots that hold nothing yet
            results.append(tiers.expand(x, 5, 4, keep_scores=True))
    for result in results:
        assert not result.scores.isnan().any()
        assert torch.equal(result.indices, results[0].indices)
    assert_as_slow(results[2], Bank(pack).scores(x), 2, 5, 4)


def test_what_is_hot_is_found_in_one_pass_over_the_slab():
    pack, x = make(COUNTS, calibrated=True), rows(3)
    with Tiers(pack, budget=60, at_once=True) as tiers:
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
    with Tiers(pack, budget=20, weights=weights) as tiers:
        found = tiers.expand(x, 5, 4, keep_scores=True)
    full = BankExpander(Bank(pack, weights=weights)).expand(x, 5, 4, keep_scores=True)
    assert torch.equal(found.indices, full.indices)
    torch.testing.assert_close(found.scores, full.scores, atol=1e-5, rtol=0)


def test_a_pack_on_disk_is_read_as_far_as_it_is_needed(tmp_path: Path):
    make(COUNTS).save(tmp_path / "pack")
    pack, x = Pack.load(tmp_path / "pack", verify=False), rows(1)
    with Tiers(pack, budget=30) as tiers:
        found = tiers.expand(x, 2, 1)
        loaded = tiers.stats.bytes_read / pack.lens_bytes
    assert torch.equal(found.indices, BankExpander(Bank(pack)).expand(x, 2, 1).indices)
    assert 0 < loaded < 15


# --- budgets


def test_the_slab_is_as_large_as_the_budget_and_never_grows():
    pack = make(COUNTS)
    with Tiers(pack, budget=18) as tiers:
        slab = {name: tensor.data_ptr() for name, tensor in tiers._stack.tensors.items()}
        assert {len(tensor) for tensor in tiers._stack.tensors.values()} == {18}
        tiers.expand(rows(40), 6, 4)
        assert tiers.stats.misses > 18
        assert {name: tensor.data_ptr() for name, tensor in tiers._stack.tensors.items()} == slab


def test_a_budget_in_bytes_is_not_exceeded():
    pack = make(COUNTS)
    with Tiers(pack, budget_bytes=30_000) as tiers:
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
    with Tiers(make([3, 8]), budget=11) as tiers:  # the whole pack is the base: nothing will ever be loaded
        assert tiers.expand(rows(2)).indices.shape == (2, 10)


# --- what stays hot


def test_children_come_together_and_the_oldest_group_goes():
    pack = make(COUNTS)
    sizes = {p: len(indices(pack.children(p))) for p in range(3, 11)}
    parents = [p for p in sizes if sizes[p]][:3]
    room = sizes[parents[0]] + sizes[parents[1]]
    with Tiers(pack, budget=11 + max(room, sizes[parents[2]])) as tiers:
        tiers.prefetch([parents[0]])
        assert {lens for lens in tiers.slots.of if lens >= 11} == set(indices(pack.children(parents[0])))
        tiers.prefetch([parents[1]])
        tiers.prefetch([parents[0]])
        assert tiers.slots.holds(indices(pack.children(parents[1])))
        tiers.prefetch([parents[2]])
        assert tiers.slots.holds(indices(pack.children(parents[2])))
        assert not tiers.slots.holds(indices(pack.children(parents[1])))


def test_what_was_loaded_once_is_a_hit_the_second_time():
    pack, x = make(COUNTS), rows(3)
    with Tiers(pack, budget=60) as tiers:
        tiers.prewarm(x, 4, 3)
        assert tiers.stats.hits < tiers.stats.misses
        moved, missed, hits = tiers.stats.bytes_moved, tiers.stats.misses, tiers.stats.hits
        tiers.expand(x, 4, 3)
        assert (tiers.stats.bytes_moved, tiers.stats.misses) == (moved, missed)
        assert tiers.stats.hits >= hits + missed
        assert tiers.stats.hit_rate == tiers.stats.hits / (tiers.stats.hits + tiers.stats.misses)


def test_bytes_and_misses_count_every_lens_that_was_loaded():
    pack = make(COUNTS)
    with Tiers(pack, budget=60) as tiers:
        tiers.expand(rows(2), 3, 4)
        loaded = used(tiers) - 11
        assert tiers.stats.misses == loaded > 0
        assert tiers.stats.bytes_moved == loaded * tiers._stack.lens_bytes


def test_every_component_of_the_time_is_counted():
    with Tiers(make(COUNTS), budget=20) as tiers:
        tiers.expand(rows(8), 4, 4)
        assert list(tiers.stats.seconds) == list(COMPONENTS)
        assert all(seconds > 0 for seconds in tiers.stats.seconds.values())


def test_pinned_concepts_are_hot_from_the_start_and_scored_without_a_load():
    pack, x = make(COUNTS, calibrated=True, normed=True), rows(5)
    names = ["c3.7", "c0.1", "c2.4"]
    with Tiers(pack, budget=16, pinned=names) as tiers:
        tiers.expand(rows(30), 6, 4)
        missed = tiers.stats.misses
        found = tiers.pinned_scores(x)
        assert tiers.stats.misses == missed
    expected = Bank(pack).scores(x)[:, [pack.index(name) for name in names]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_warm_tier_has_a_bound_and_spares_the_cold_one():
    pack, x = make(COUNTS), rows(20)
    with Tiers(pack, budget=14, warm_bytes=1 << 30) as tiers:
        tiers.expand(x, 6, 3)
        read, moved = tiers.stats.bytes_read, tiers.stats.bytes_moved
        tiers.expand(x, 6, 3)
        assert tiers.stats.bytes_moved > moved
        assert tiers.stats.bytes_read - read < read / 2
    with Tiers(pack, budget=14, warm_bytes=5000) as tiers:
        tiers.expand(x, 6, 3)
        assert 0 < tiers._warm.nbytes <= 5000


# --- loading beside scoring


def test_a_load_that_is_late_delays_a_result_and_changes_nothing():
    pack, x = make(COUNTS), rows(4)
    gate, started = threading.Event(), threading.Event()
    with Tiers(pack, budget=30) as tiers:
        real = tiers._warm.get

        def slow(lenses: tuple[int, ...]):
            started.set()
            assert gate.wait(HUNG_S)
            return real(lenses)

        tiers._warm.get = slow  # type: ignore[method-assign]
        parents = [p for p in range(3, 11) if indices(pack.children(p))]
        tiers.prefetch(parents[:2])  # returns while the thread waits
        assert started.wait(HUNG_S)
        threading.Timer(0.1, gate.set).start()
        found = tiers.expand(x, 5, 3)
    assert torch.equal(found.indices, BankExpander(Bank(pack)).expand(x, 5, 3).indices)


def test_a_load_that_fails_is_reported_and_tried_again_the_next_time():
    pack, x = make(COUNTS), rows(4)
    with Tiers(pack, budget=30) as tiers:
        real = tiers._warm.get

        def broken(lenses: tuple[int, ...]):
            raise OSError(f"the disk is gone {len(lenses)}")

        tiers._warm.get = broken  # type: ignore[method-assign]
        with pytest.raises(OSError, match="the disk is gone"):
            tiers.expand(x, 5, 3)
        tiers._warm.get = real  # type: ignore[method-assign]
        found = tiers.expand(x, 5, 3)
    assert torch.equal(found.indices, BankExpander(Bank(pack)).expand(x, 5, 3).indices)


def test_a_prefetch_that_failed_is_forgotten_and_loaded_when_it_is_wanted():
    pack, x = make(COUNTS), rows(4)
    parents = [p for p in range(3, 11) if indices(pack.children(p))]
    with Tiers(pack, budget=60) as tiers:
        real = tiers._warm.get

        def broken(lenses: tuple[int, ...]):
            raise OSError(f"the disk is gone {len(lenses)}")

        tiers._warm.get = broken  # type: ignore[method-assign]
        tiers.prefetch(parents)
        for job in list(tiers._loading.values()):
            assert isinstance(job.exception(HUNG_S), OSError)
        tiers._warm.get = real  # type: ignore[method-assign]
        found = tiers.expand(x, 5, 3, keep_scores=True)
        assert tiers.stats.misses > 0
    assert_as_slow(found, Bank(pack).scores(x), 2, 5, 3)


def test_threads_share_tiers_and_each_gets_its_own_results():
    pack = make(COUNTS)
    whole = BankExpander(Bank(pack))
    inputs = [rows(3, seed=s) for s in range(6)]
    expected = [whole.expand(x, 4, 3).indices for x in inputs]
    wrong: list[int] = []
    with Tiers(pack, budget=16) as tiers:

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
