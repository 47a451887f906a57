"""Capture handles: lazy, idempotent, and their bytes always come back."""

import asyncio
import gc
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch

from steerscope.capture import handle as module
from steerscope.capture.budget import ByteBudget
from steerscope.capture.handle import CaptureHandle, UnfetchedRows, fetch_all
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels
from steerscope.specs.errors import CaptureClosed, InvalidRequest
from steerscope.specs.tokens import MessageSpan
from support.waiting import HUNG_S

SPANS = (MessageSpan(0, "system", (1, 2), (0, 3)), MessageSpan(1, "user", (4, 6), (3, 7)))
LENGTH, PROMPT = 11, 8  # positions 8 … 10 are generated


def make_rows(open_message: bool = False, spans: tuple[MessageSpan, ...] | None = SPANS) -> Rows:
    labels = make_labels("r1", np.arange(LENGTH), list(range(100, 100 + LENGTH)), PROMPT, spans, open_message)
    tensor = torch.arange(LENGTH, dtype=torch.float32).reshape(-1, 1).repeat(1, 2)  # a row says its position
    return Rows({(3, "resid_post"): tensor}, labels, "tiny", None, spans)


class Loader:
    """Counts how often rows are really loaded."""

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows, self.calls = rows or make_rows(), 0

    def __call__(self) -> Rows:
        self.calls += 1
        return self.rows


def make(
    budget: ByteBudget | None = None, load: Loader | None = None, size: int = 88, ttl_s: float = 600.0
) -> CaptureHandle:
    budget = budget or ByteBudget(1000, wait_s=0)
    held = asyncio.run(budget.reserve(size, "this capture"))
    return CaptureHandle("r1", LENGTH, load or Loader(), budget, held, ttl_s)


def test_rows_are_loaded_at_the_first_fetch_and_never_again():
    load = Loader()
    with make(load=load) as handle:
        assert load.calls == 0
        assert not handle.fetched
        assert "ready" in repr(handle)
        first = handle.fetch()
        assert handle.fetch() is first
        assert handle.captures is first
        assert handle.message(1).labels.position.tolist() == [4, 5]
        assert load.calls == 1
        assert handle.fetched
        assert "fetched" in repr(handle)


async def test_fetching_without_blocking_gives_the_same_rows():
    budget, load = ByteBudget(1000, wait_s=0), Loader()
    handle = CaptureHandle("r1", LENGTH, load, budget, await budget.reserve(10, "x"), 60)
    async with handle as entered:
        assert entered is handle
        assert await handle.fetch_async() is handle.fetch()
    assert budget.used == 0
    assert load.calls == 1


def test_threads_that_fetch_together_load_once_and_all_get_the_rows():
    started = threading.Barrier(4)

    class Slow(Loader):
        def __call__(self) -> Rows:
            time.sleep(0.05)
            return super().__call__()

    load = Slow()
    found: list[Rows | Exception] = []
    with make(load=load) as handle:

        def work() -> None:
            started.wait()
            try:
                found.append(handle.fetch())
            except Exception as error:
                found.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(item is load.rows for item in found)
    assert load.calls == 1


def test_a_load_that_fails_can_be_tried_again():
    class Flaky(Loader):
        def __call__(self) -> Rows:
            rows = super().__call__()
            if self.calls == 1:
                raise OSError("not now")
            return rows

    with make(load=Flaky()) as handle:
        with pytest.raises(OSError, match="not now"):
            handle.fetch()
        assert handle.fetch().n == LENGTH


def test_closing_gives_the_bytes_back_once_and_says_so_afterwards():
    budget = ByteBudget(1000, wait_s=0)
    handle, other = make(budget), make(budget, size=12)
    assert budget.used == 100
    handle.close()
    handle.close()
    assert budget.used == 12
    assert "closed" in repr(handle)
    with pytest.raises(CaptureClosed, match="the rows of r1 are gone: the handle was closed"):
        handle.fetch()
    other.close()
    assert budget.used == 0


def test_leaving_a_with_block_closes_the_handle_even_after_an_error():
    budget = ByteBudget(1000, wait_s=0)
    with pytest.raises(RuntimeError, match="mine"), make(budget):
        raise RuntimeError("mine")
    assert budget.used == 0


def test_fetched_rows_stay_valid_after_the_handle_is_closed():
    with make() as handle:
        rows = handle.fetch()
    assert rows[3][:, 0].tolist() == list(range(LENGTH))
    assert rows.labels[10].phase == "generated"
    with pytest.raises(CaptureClosed):
        handle.fetch()


# --- dropped and expired


def test_a_handle_dropped_unfetched_warns_and_gives_its_bytes_back():
    budget = ByteBudget(1000, wait_s=0)
    handle = make(budget)
    gone = weakref.ref(handle)
    gc.collect()  # what other tests left is not counted here
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del handle
        gc.collect()
    (warning,) = caught
    assert warning.category is UnfetchedRows
    assert str(warning.message) == "11 captured rows of r1 were dropped unfetched: fetch() or close() them"
    assert gone() is None  # the budget's expiry list does not keep it alive
    assert budget.used == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_bytes_come_back_even_where_warnings_are_errors():
    budget = ByteBudget(1000, wait_s=0)
    handle = make(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle
        gc.collect()
    assert budget.used == 0


def test_a_handle_dropped_after_fetching_gives_its_bytes_back_without_a_warning():
    budget = ByteBudget(1000, wait_s=0)
    handle = make(budget)
    rows = handle.fetch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle
        gc.collect()
    assert budget.used == 0
    assert rows.n == LENGTH


def test_a_handle_in_a_reference_cycle_is_found_by_the_collector():
    budget = ByteBudget(1000, wait_s=0)
    handle = make(budget)
    handle.fetch()
    handle.itself = handle  # type: ignore[attr-defined]
    del handle
    gc.collect()
    assert budget.used == 0


async def test_rows_nobody_fetched_in_time_expire_for_those_who_wait_and_say_so():
    budget = ByteBudget(100, wait_s=HUNG_S)
    handle = CaptureHandle("r1", LENGTH, Loader(), budget, await budget.reserve(90, "a"), ttl_s=0.05)
    reservation = await asyncio.wait_for(budget.reserve(90, "b"), HUNG_S)
    assert budget.used == 90
    with pytest.raises(CaptureClosed, match=r"gone: they were not fetched for 0\.05 s \(capture_ttl\)"):
        handle.fetch()
    reservation.release()


async def test_fetched_rows_never_expire():
    budget = ByteBudget(100, wait_s=0.1)
    handle = CaptureHandle("r1", LENGTH, Loader(), budget, await budget.reserve(90, "a"), ttl_s=0.0)
    rows = handle.fetch()
    budget.sweep()
    assert handle.fetch() is rows
    assert budget.used == 90
    handle.close()


async def test_an_expiry_that_comes_while_rows_are_fetched_does_not_take_them_away():
    """The sweep may have decided just before the fetch; a caller with fetched rows keeps the handle."""
    budget = ByteBudget(100, wait_s=0)
    handle = CaptureHandle("r1", LENGTH, Loader(), budget, await budget.reserve(90, "a"), ttl_s=-1.0)
    ((_, expire),) = budget._expire.values()
    rows = handle.fetch()
    expire()
    assert handle.fetch() is rows
    handle.close()


async def test_a_waiting_reservation_gets_room_when_a_handle_is_closed():
    budget = ByteBudget(100, wait_s=HUNG_S)
    handle = CaptureHandle("r1", LENGTH, Loader(), budget, await budget.reserve(90, "a"), 600)
    waiting = asyncio.create_task(budget.reserve(50, "b"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    handle.close()
    (await asyncio.wait_for(waiting, HUNG_S)).release()
    assert budget.used == 0


def test_handles_closed_from_many_threads_at_once_give_back_each_byte_once():
    budget = ByteBudget(1000, wait_s=0)
    for _ in range(50):
        handle, kept = make(budget, size=100), make(budget, size=7)
        start = threading.Barrier(4)

        def work(handle: CaptureHandle = handle, start: threading.Barrier = start) -> None:
            start.wait()
            handle.close()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert budget.used == 7
        kept.close()


# --- messages


def positions(rows: Rows) -> list[int]:
    """Read from the numbers, and the same by the labels."""
    found = [int(x) for x in rows[3][:, 0]]
    assert found == rows.labels.position.tolist()
    return found


def test_message_gives_the_rows_of_one_message_with_or_without_the_template_around_it():
    with make() as handle:
        assert positions(handle.message(0)) == [1]
        assert positions(handle.message(0, template=True)) == [0, 1, 2]
        assert positions(handle.message(1)) == [4, 5]
        assert positions(handle.message(1, template=True)) == [3, 4, 5, 6]
        assert positions(handle.message(2)) == [8, 9, 10]  # the answer; 7 is the generation prompt, of no message
        assert positions(handle.message(2, template=True)) == [8, 9, 10]
        assert positions(handle.message(-1)) == [8, 9, 10]
        assert {label.role for label in handle.message(2).labels} == {"assistant"}


def test_message_of_a_continued_message_holds_its_prompt_part_and_what_was_generated():
    spans = (SPANS[0], MessageSpan(1, "assistant", (4, 8), (3, 8)))
    with make(load=Loader(make_rows(open_message=True, spans=spans))) as handle:
        assert positions(handle.message(1)) == [4, 5, 6, 7, 8, 9, 10]
        with pytest.raises(InvalidRequest, match="message 2 does not exist; the chat has messages 0–1"):
            handle.message(2)


def test_messages_that_do_not_exist_are_refused_with_those_that_do():
    with make() as handle:
        for i in (3, -4):
            with pytest.raises(InvalidRequest, match=f"message {i} does not exist; the chat has messages 0–2"):
                handle.message(i)


def test_messages_without_proven_spans_are_refused():
    with (
        make(load=Loader(make_rows(spans=None))) as handle,
        pytest.raises(InvalidRequest, match="no proven message spans"),
    ):
        handle.message(0)


def test_template_text_that_cannot_be_told_apart_is_refused_as_in_selectors():
    spans = tuple(MessageSpan(s.index, s.role, s.content, None) for s in SPANS)
    with make(load=Loader(make_rows(spans=spans))) as handle:
        assert positions(handle.message(1)) == [4, 5]
        with pytest.raises(InvalidRequest, match="cannot be told apart"):
            handle.message(1, template=True)


def test_saving_a_handle_fetches_it(tmp_path):
    load = Loader()
    with make(load=load) as handle:
        assert handle.save(tmp_path / "rows.safetensors").exists()
    assert load.calls == 1


def test_a_copy_is_the_callers_own_and_gives_the_room_back() -> None:
    budget, load = ByteBudget(1000, wait_s=0), Loader()
    with make(budget, load) as handle:
        shared = handle.fetch()
        own = handle.fetch(copy=True)
        assert own is handle.fetch(copy=True) is handle.fetch()
        assert (budget.used, load.calls) == (0, 1)
        assert own[3].data_ptr() != shared[3].data_ptr()
        assert torch.equal(own[3], shared[3])
        assert own.message(1).labels.position.tolist() == [4, 5]
    assert budget.used == 0
    assert own[3][5].tolist() == [5.0, 5.0]


def test_copies_of_many_are_taken_together_into_memory_that_was_there() -> None:
    budget = ByteBudget(1000, wait_s=0)
    handles = [make(budget, Loader(make_rows())) for _ in range(3)]
    room = torch.zeros(1000, dtype=torch.uint8)
    found = fetch_all(handles, room=room)
    assert budget.used == 0
    for handle in handles:  # the room may be used again, and then its rows would be others'
        with pytest.raises(CaptureClosed, match="copied to the room"):
            handle.fetch()
    for rows in found:
        assert torch.equal(rows[3], make_rows()[3])
        assert room.data_ptr() <= rows[3].data_ptr() < room.data_ptr() + 1000
    assert len({rows[3].data_ptr() for rows in found}) == 3


def test_a_handle_is_copied_once_however_often_it_is_named() -> None:
    handles = [make(load=Loader(make_rows())) for _ in range(2)]
    first, second, again = fetch_all([*handles, handles[0]], copy=True)
    assert again is first is not second
    assert fetch_all(handles, copy=True) == [first, second]
    for handle in handles:
        handle.close()


async def test_who_awaits_a_copy_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = threading.get_ident(), list[int]()

    def private(rows: list[Rows], room: torch.Tensor | None) -> list[Rows]:
        there.append(threading.get_ident())
        return copies(rows, room)

    copies = module.private
    monkeypatch.setattr(module, "private", private)
    budget = ByteBudget(1000, wait_s=0)
    async with CaptureHandle("r1", LENGTH, Loader(), budget, await budget.reserve(10, "x"), 60) as handle:
        assert torch.equal((await handle.fetch_async(copy=True))[3], make_rows()[3])
    assert len(there) == 1
    assert there[0] != here


def test_a_handle_that_was_closed_meanwhile_keeps_no_copy() -> None:
    handle = make()
    own = handle.keep
    handle.close()
    own(make_rows())
    with pytest.raises(CaptureClosed):
        handle.fetch()
