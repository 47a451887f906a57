"""The byte budget: exact under threads, patient, and clear when it must refuse."""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.capture.budget import ByteBudget, Reservation, human
from steerscope.specs.errors import CapacityExceeded
from support.waiting import HUNG_S


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads change as often as the interpreter lets them, so that a race has its chance."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def reserve(budget: ByteBudget, size: int) -> Reservation:
    return asyncio.run(budget.reserve(size, "this capture"))


def test_reserving_takes_bytes_and_releasing_gives_them_back_once():
    budget = ByteBudget(100, wait_s=0)
    first, second = reserve(budget, 60), reserve(budget, 40)
    assert budget.used == 100
    first.release()
    first.release()
    assert budget.used == 40
    second.release()
    assert budget.used == 0


def test_shrinking_gives_back_the_difference_and_never_grows():
    budget = ByteBudget(100, wait_s=0)
    held = reserve(budget, 60)
    held.shrink(25)
    assert (held.size, budget.used) == (25, 25)
    held.shrink(80)
    assert (held.size, budget.used) == (25, 25)
    held.release()
    assert (held.size, budget.used) == (0, 0)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(sizes=st.lists(st.integers(0, 50), max_size=6), shrunk=st.lists(st.integers(0, 60), min_size=7, max_size=7))
def test_parts_of_a_reservation_add_up_to_the_whole_and_live_on_their_own(sizes, shrunk):
    budget = ByteBudget(1000, wait_s=0)
    whole = reserve(budget, sum(sizes) + 7)
    parts = [whole.split(size) for size in sizes]
    assert budget.used == sum(sizes) + 7 == whole.size + sum(part.size for part in parts)
    for part, size in zip([whole, *parts], shrunk, strict=False):
        part.shrink(size)
    assert budget.used == whole.size + sum(part.size for part in parts)
    for part in (whole, *parts):
        part.release()
    assert budget.used == 0


async def test_what_can_never_fit_is_refused_at_once_with_every_remedy():
    budget = ByteBudget(1 << 20, wait_s=60)
    start = time.monotonic()
    with pytest.raises(
        CapacityExceeded, match=r"this capture needs 3\.0 MiB, the capture budget is 1\.0 MiB"
    ) as caught:
        await budget.reserve(3 << 20, "this capture")
    assert time.monotonic() - start < budget.wait_s
    for remedy in ("fewer layers", "lower max_tokens", "reduce", "raise capture_budget"):
        assert remedy in str(caught.value)
    assert budget.used == 0


async def test_a_waiting_reservation_gets_room_when_another_gives_some_back():
    budget = ByteBudget(100, wait_s=HUNG_S)
    held = await budget.reserve(80, "a")
    waiting = asyncio.create_task(budget.reserve(50, "b"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    held.shrink(50)
    reservation = await asyncio.wait_for(waiting, HUNG_S)
    assert (reservation.size, budget.used) == (50, 100)


async def test_a_small_reservation_does_not_overtake_a_large_one_that_waits():
    budget = ByteBudget(100, wait_s=HUNG_S)
    held = await budget.reserve(80, "a")
    large = asyncio.create_task(budget.reserve(90, "b"))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.reserve(10, "c"))
    await asyncio.sleep(0.1)
    assert not small.done()
    held.release()
    await asyncio.wait_for(asyncio.gather(large, small), HUNG_S)
    assert budget.used == 100


async def test_a_reservation_that_waited_in_vain_is_refused_with_who_holds_the_room():
    budget = ByteBudget(2048, wait_s=0.05)
    await budget.reserve(1536, "a")
    with pytest.raises(CapacityExceeded) as caught:
        await budget.reserve(1024, "this capture")
    text = str(caught.value)
    assert "this capture needs 1.0 KiB, but open captures hold 1.5 KiB of 2.0 KiB" in text
    assert "0.05 s" in text
    assert "close handles you have fetched, or raise capture_budget" in text
    assert budget.used == 1536


async def test_a_request_cancelled_while_it_waits_takes_nothing():
    budget = ByteBudget(10, wait_s=HUNG_S)
    held = await budget.reserve(10, "a")
    waiting = asyncio.create_task(budget.reserve(5, "b"))
    await asyncio.sleep(0.03)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.release()
    await asyncio.sleep(0.05)
    assert budget.used == 0


def test_many_threads_never_take_too_much_nor_give_back_too_much(eager_threads: None):
    assert eager_threads is None
    budget = ByteBudget(1000, wait_s=HUNG_S)
    wrong: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)

        async def go() -> None:
            for _ in range(60):
                held = await budget.reserve(chance.randint(1, 400), "x")
                wrong.extend([budget.used] if not 0 <= budget.used <= 1000 else [])
                part = held.split(held.size // 2)
                await asyncio.sleep(0)
                held.shrink(held.size // 3)
                part.release()
                held.release()

        asyncio.run(go())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert budget.used == 0


def test_two_threads_that_release_the_same_reservation_give_it_back_once(monkeypatch: pytest.MonkeyPatch):
    """A handle can be closed by its user while the engine lets it expire."""
    budget = ByteBudget(100, wait_s=0)
    held, other = reserve(budget, 60), reserve(budget, 40)
    give_back, rivals = budget.give_back, []

    def interrupted(size: int) -> None:
        if not rivals:
            rivals.append(threading.Thread(target=held.release))
            rivals[0].start()
            rivals[0].join(0.1)  # it gets its chance in the middle of ours
        give_back(size)

    monkeypatch.setattr(budget, "give_back", interrupted)
    held.release()
    rivals[0].join()
    assert budget.used == other.size == 40


# --- expiry


def test_sweeping_calls_what_is_due_and_only_that():
    budget = ByteBudget(10, wait_s=0)
    called: list[str] = []
    budget.expire_after(1, -1, lambda: called.append("due"))
    budget.expire_after(2, 60, lambda: called.append("later"))
    budget.expire_after(3, -1, lambda: called.append("forgotten"))
    budget.forget(3)
    budget.forget(99)
    budget.sweep()
    assert called == ["due"]


async def test_a_waiting_reservation_gets_the_room_of_what_expires_meanwhile():
    budget = ByteBudget(10, wait_s=HUNG_S)
    held = await budget.reserve(10, "a")
    budget.expire_after(1, 0.05, held.release)
    assert (await asyncio.wait_for(budget.reserve(8, "b"), HUNG_S)).size == 8
    assert budget.used == 8


def test_something_collected_during_a_sweep_may_forget_itself():
    """Garbage collection can run a handle's finaliser at any point, also in the middle of the sweep's loop."""
    budget = ByteBudget(10, wait_s=0)

    class Deadline(float):
        def __le__(self, now: float) -> bool:
            budget.forget(2)  # as the finaliser of a handle does
            return super().__le__(now)

    class Ttl(float):
        def __radd__(self, now: float) -> Deadline:
            return Deadline(now + 60)

    for number in range(4):
        budget.expire_after(number, Ttl(1), lambda: None)
    budget.sweep()
    assert budget.used == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_written_for_people(size: int, text: str):
    assert human(size) == text
