"""Wake-ups of an event loop, counted; and what a thread waits at."""

import asyncio
from types import SimpleNamespace

from steerscope.engines.result_channels import LoopChannel, LoopWaker, ResultChannel, in_this_thread, together


class Counted:
    """A real loop whose wake-ups from other threads are counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.woken = loop, 0

    def call_soon_threadsafe(self, call):
        self.woken += 1
        return self.loop.call_soon_threadsafe(call)


async def test_what_is_told_together_wakes_a_loop_once_and_arrives_in_order():
    loop = Counted(asyncio.get_running_loop())
    channel = LoopChannel(LoopWaker(loop))  # type: ignore[arg-type]
    job = SimpleNamespace(abandoned=False)

    def tell(numbers: range) -> None:
        with together():
            for number in numbers:
                channel.put(job, number)  # type: ignore[arg-type]
                if number == 2:
                    with together():  # inside another it changes nothing
                        pass
                assert loop.woken == before, "nobody is woken before the end"

    found: list[object] = []
    for numbers in (range(5), range(5, 9)):
        before = loop.woken
        await asyncio.to_thread(tell, numbers)
        assert loop.woken == before + 1
        found += [outcome for _, outcome in await channel.take()]
    assert found == list(range(9))


async def test_alone_each_wakes_at_once():
    loop = Counted(asyncio.get_running_loop())
    channel = LoopChannel(LoopWaker(loop))  # type: ignore[arg-type]
    await asyncio.to_thread(channel.put, SimpleNamespace(abandoned=False), "one")  # type: ignore[arg-type]
    assert loop.woken == 1
    assert [outcome for _, outcome in await channel.take()] == ["one"]


def test_a_thread_is_woken_once_for_what_is_told_together():
    box, job = ResultChannel(), SimpleNamespace(abandoned=False)
    with together():
        for number in range(5):
            box.put(job, number)  # type: ignore[arg-type]
        assert box._woken.empty()
    assert box._woken.qsize() == 1
    assert [outcome for _, outcome in in_this_thread(box.take())] == list(range(5))
    box.put(job, 5)  # type: ignore[arg-type]
    assert [outcome for _, outcome in in_this_thread(box.take())] == [5]


def test_what_comes_for_a_caller_that_has_left_is_not_kept():
    box = ResultChannel()
    box.put(SimpleNamespace(abandoned=False), "before")  # type: ignore[arg-type]
    box.put(SimpleNamespace(abandoned=True), "after")  # type: ignore[arg-type]
    assert box._rest() == []
