"""Shared memory: regions never overlap, live as long as a view of them, and come back whole."""

import gc
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.capture.transport import (
    ALIGN,
    FAILED,
    HEADER,
    LEFT,
    OWNER,
    ROWS,
    Arena,
    Region,
    Regions,
    shared_folder,
)
from steerscope.specs.errors import CapacityExceeded

SIZE = 1 << 16


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path / "arena", SIZE, create=True)


def test_what_one_side_writes_the_other_reads_without_a_copy(arena: Arena) -> None:
    regions = Regions(arena)
    region = regions.allocate(4 * 6 * 4)
    assert region is not None
    worker = Arena(arena.path, SIZE, create=False)
    worker.view(region.offset + HEADER, (4, 6), torch.float32).copy_(torch.arange(24.0).view(4, 6))
    worker.words[(region.offset + ALIGN * (ROWS + 3)) // 8] = 7
    worker.words[(region.offset + ALIGN * FAILED) // 8] = 1
    tensor = region.tensor((4, 6), torch.float32)
    assert torch.equal(tensor, torch.arange(24.0).view(4, 6))
    assert region.counters[ROWS : ROWS + 5].tolist() == [0, 0, 0, 7, 0]
    assert region.counters[FAILED] == 1
    assert not any(region.counters[LEFT:OWNER])
    worker.view(region.offset + HEADER, (1,), torch.float32).fill_(-1)
    assert tensor[0, 0] == -1, "it is the same memory"


@pytest.mark.slow
def test_another_process_sees_the_same_bytes_and_the_file_needs_no_name_any_more(arena: Arena) -> None:
    region = Regions(arena).allocate(256)
    assert region is not None
    code = (
        "import sys, torch; from pathlib import Path; from steerscope.capture.transport import *\n"
        f"Arena(Path(sys.argv[1]), {SIZE}, create=False).view(int(sys.argv[2]) + HEADER, (8,), torch.int64).fill_(42)"
    )
    subprocess.run([sys.executable, "-c", code, str(arena.path), str(region.offset)], check=True)
    arena.unlink()
    assert not arena.path.exists()
    assert region.tensor((8,), torch.int64).tolist() == [42] * 8


def test_a_view_keeps_its_region_and_the_last_one_gives_it_back(arena: Arena) -> None:
    regions = Regions(arena)
    region = regions.allocate(1000)
    assert region is not None
    row = region.tensor((10, 25), torch.float32)[3]
    del region
    gc.collect()
    assert regions.used == Regions.bytes_for(1000)
    taken = {regions.allocate(100) for _ in range(20)}
    assert all(one is not None and one.offset >= Regions.bytes_for(1000) for one in taken)
    del row
    gc.collect()
    taken.clear()
    assert regions.used == 0


def test_memory_is_not_handed_out_again_while_a_worker_may_still_write_to_it(arena: Arena) -> None:
    """A scheduler that runs ahead computes rows of a request that has ended: they must not land in another's."""
    regions = Regions(arena)
    half = (SIZE - ALIGN) // 2 // ALIGN * ALIGN - HEADER
    first, second = regions.allocate(half, stages=(0, 1)), regions.allocate(half, stages=(0,))
    assert first is not None
    assert second is not None
    first.shrink(64)
    offset, del_counters = first.offset, regions.counters(first.offset)
    del first
    gc.collect()
    assert regions.allocate(64) is None, "neither the tail nor the region was left"
    del_counters[LEFT] = 1
    assert regions.allocate(64) is None, "one of two stages was"
    del_counters[LEFT + 1] = 1
    again = regions.allocate(half)
    assert again is not None
    assert again.offset == offset


def test_memory_that_was_used_is_used_again_before_what_never_was(arena: Arena) -> None:
    """Its pages are mapped. What may still be written to stays where it is."""
    regions = Regions(arena)
    first, busy = regions.allocate(100, (0,)), regions.allocate(100, (0,))
    assert first is not None
    assert busy is not None
    place = first.offset
    first.counters[LEFT] = 1
    del first, busy
    again = regions.allocate(100, (0,))
    assert again is not None
    assert again.offset == place
    other = regions.allocate(100, (0,))
    assert other is not None
    assert other.owner != again.owner
    assert other.offset > again.offset + again.size  # not where a worker may still write


def test_no_room_is_none_and_a_gap_between_neighbours_is_whole_again(arena: Arena) -> None:
    regions = Regions(arena)
    third = ((SIZE - ALIGN) // 3 - HEADER) // ALIGN * ALIGN
    parts: list[Region | None] = [regions.allocate(third) for _ in range(3)]
    assert None not in parts
    assert regions.allocate(third) is None
    parts[0] = None
    parts[1] = None
    both = regions.allocate(2 * third + HEADER)
    assert both is not None
    assert both.offset == ALIGN


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000)), max_size=60))
def test_regions_never_overlap_and_nothing_is_lost(actions: list[tuple[bool, int]]) -> None:
    folder = shared_folder(SIZE)
    arena = Arena(folder / f"steerscope-test-{os.getpid()}-{id(actions)}", SIZE, create=True)
    arena.unlink()
    regions, held = Regions(arena), []
    for take, size in actions:
        if take or not held:
            region = regions.allocate(size)
            held += [region] if region is not None else []
            del region
        else:
            held.pop(size % len(held))
        spans = sorted((one.offset, one.offset + one.size) for one in held)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert regions.used == sum(one.size for one in held)
    held.clear()
    assert regions.used == 0


def test_a_full_disk_is_found_at_the_start_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityExceeded, match="No space left on device; lower capture_budget"):
        Arena(tmp_path / "arena", SIZE, create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_view_outside_the_arena_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="outside an arena"):
        arena.view(SIZE - 8, (2,), torch.int64)


def test_nobody_else_may_read_the_memory_that_rows_travel_in(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        arena = Arena(tmp_path / "arena", 4096, create=True)
        assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
        with pytest.raises(FileExistsError):  # a file that another user put there is not used
            Arena(tmp_path / "arena", 4096, create=True)
    finally:
        os.umask(before)


def test_what_a_finaliser_gives_back_while_parts_are_judged_is_not_lost(arena: Arena) -> None:
    regions = Regions(arena)
    first, others = regions.allocate(100, (0,)), [regions.allocate(100)]
    assert first is not None
    first.counters[LEFT] = 1

    class Collected(tuple):
        __slots__ = ()

        def __iter__(self):  # type: ignore[no-untyped-def]
            others.clear()  # as the garbage collector may at any moment
            return super().__iter__()

    first.stages = Collected((0,))
    del first
    regions.tidy()
    assert regions.untidy
    regions.tidy()
    assert not regions.untidy
    assert regions.used == 0


def test_who_keeps_rows_until_python_ends_hears_nothing(tmp_path: Path) -> None:
    """Some module may be longer there than the one that they need to be given back."""
    script = f"""
from pathlib import Path
import steerscope.capture.transport as transport
regions = transport.Regions(transport.Arena(Path({str(tmp_path / "arena")!r}), {SIZE}, create=True))
kept = [regions.allocate(64, (0,)) for _ in range(3)]
import numpy
numpy.kept = kept
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_first_that_is_given_back_is_told(arena: Arena) -> None:
    told: list[int] = []
    regions = Regions(arena, lambda: told.append(len(told)))
    one, two, three = (regions.allocate(100, (0,)) for _ in range(3))
    assert one is not None
    one.counters[LEFT] = 1
    del one, two
    gc.collect()
    assert told == [0]
    regions.tidy()  # one of them must wait for its writer
    assert not regions.untidy
    del three
    gc.collect()
    assert told == [0, 1]
