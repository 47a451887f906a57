"""Reductions of a GPU, in Triton's interpreter, against those in torch: in the process that test_kernel.py starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.capture.transport import Arena
from steerscope.engines.vllm.wire import Wire, WireCapture
from steerscope.engines.vllm.worker.device import Reductions
from steerscope.engines.vllm.worker.requests import RowSlice, TrackedRequest
from steerscope.specs.errors import RequestFailed
from steerscope.specs.tokens import EVERYWHERE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernel.py starts")
LENGTH, HIDDEN = 24, 5


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    folder: Path = tmp_path_factory.mktemp("arena")
    return Arena(folder / "arena", 4096, create=True)


def request(kind: str, width: int, hold: int) -> TrackedRequest:
    capture = WireCapture((), EVERYWHERE, False, kind, hold, LENGTH)  # type: ignore[arg-type]
    return TrackedRequest(Wire("a", None, 0, 1, (), capture), [], 1, width)


def part(one: TrackedRequest, start: int, stop: int, cell: int) -> RowSlice:
    return RowSlice(one, start, stop, cell, stop, (stop - start) * one.width)


@interpreted
@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(["mean", "last"]), st.integers(1, 3), st.integers(0, 5)), min_size=1,
                   max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5),
    over=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_chunks_of_many_requests_give_what_each_gives_alone(arena, kinds, steps, over, dtype) -> None:
    """Steps begin at or before what was taken in, as after a preemption; the text ends some rows before the last."""
    from steerscope.engines.vllm.cuda.reductions import CudaReductions

    cells = torch.randn(LENGTH * 8, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    requests = [request(*kind) for kind in kinds]
    roads = [Reductions(cells), CudaReductions(cells)]
    held = [[road.start(one.wire.capture, one.width) for one in requests] for road in roads]
    reached = 0
    for back, size in steps:
        start = max(0, reached - back)
        stop = min(start + size, LENGTH)
        if stop <= start:
            continue
        parts = [part(one, start, stop, 7 * i + start) for i, one in enumerate(requests)]
        for road, mine in zip(roads, held, strict=True):
            road.push(list(zip(mine, parts, strict=True)))
        reached = max(reached, stop)
    rows = max(1, reached - over)
    for i, one in enumerate(requests):
        found = []
        for road, mine in zip(roads, held, strict=True):
            target = arena.view(64, (one.width, HIDDEN), torch.float32).fill_(torch.nan)
            try:
                n = road.finish(mine[i], rows, rows, arena, 64)
                road.flush()
                found.append((n, target.clone()))
            except RequestFailed:
                found.append(None)
        assert (found[0] is None) == (found[1] is None) == (over > kinds[i][2] and reached > rows + kinds[i][2])
        if found[0] and found[1]:
            assert found[0][0] == found[1][0] == rows
            assert torch.allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


@interpreted
def test_results_of_requests_that_end_together_go_to_their_own_places(arena) -> None:
    from steerscope.engines.vllm.cuda.reductions import CudaReductions

    cells = torch.arange(60.0).view(12, 5)
    one, other = request("mean", 2, 1), request("last", 1, 4)
    road = CudaReductions(cells)
    held = [road.start(a.wire.capture, a.width) for a in (one, other)]
    road.push([(held[0], part(one, 0, 3, 0)), (held[1], part(other, 0, 4, 6))])
    road.push([])
    memory = arena.view(64, (3, HIDDEN), torch.float32).fill_(-1.0)
    assert [road.finish(held[0], 3, 3, arena, 64), road.finish(held[1], 2, 2, arena, 64 + 2 * HIDDEN * 4)] == [3, 2]
    assert (memory == -1).all()  # nothing is there before it is asked for
    road.flush()
    assert torch.equal(memory[:2], cells[:6].view(3, 2, 5).mean(0))
    assert torch.equal(memory[2], cells[7])


@interpreted
def test_memory_that_is_used_again_starts_from_nothing(arena) -> None:
    from steerscope.engines.vllm.cuda.reductions import CudaReductions

    cells = torch.arange(60.0).view(12, 5)
    road, memory, places = CudaReductions(cells), arena.view(64, (1, HIDDEN), torch.float32), []
    for cell in (0, 6, 9):
        one = request("mean", 1, 1)
        held = road.start(one.wire.capture, 1)
        places.append(held.total.data_ptr())
        road.push([(held, part(one, 0, 2, cell))])
        road.push([(held, part(one, 2, 3, cell + 2))])
        road.finish(held, 3, 3, arena, 64)
        road.flush()
        assert torch.equal(memory[0], cells[cell : cell + 3].mean(0))
    assert len(set(places)) == 1


@interpreted
def test_nothing_is_written_outside_the_arena(arena) -> None:
    from steerscope.engines.vllm.cuda.reductions import CudaReductions

    cells = torch.arange(60.0).view(12, 5)
    for road in (Reductions(cells), CudaReductions(cells)):
        one = request("mean", 1, 1)
        held = road.start(one.wire.capture, 1)
        road.push([(held, part(one, 0, 3, 0))])
        with pytest.raises(ValueError, match="outside an arena"):
            road.finish(held, 3, 3, arena, arena.size - 8)
        road.flush()


@interpreted
def test_rows_are_taken_in_behind_their_forward_and_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that only record calls: no other check would notice a missing wait."""
    from steerscope.engines.vllm.cuda import reductions

    log: list[tuple[str, ...]] = []
    current = ["main"]

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: "Event") -> None:
            log.append((self.name, "waits for", event.after))

    class Event:
        after = ""

        def record(self, stream: Stream | None = None) -> None:
            self.after = f"{stream.name if stream else current[0]} {len(log)}"
            log.append((self.after,))

        def query(self) -> bool:
            return False

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        current[0] = stream.name
        yield
        current[0] = "main"

    cells, one = torch.arange(60.0).view(12, 5), request("mean", 1, 1)
    road = reductions.CudaReductions(cells)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("main"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    road._side = Stream("side")  # type: ignore[assignment]
    empty = torch.empty
    made: list[str] = []
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (made.append(current[0]), empty(*args, **kwargs))[1])
    held = road.start(one.wire.capture, 1)
    assert made == ["side", "side"], "its memory is used again in the order of that stream"
    road.join()
    assert log == []
    road.push([(held, part(one, 0, 3, 0))])
    assert log == [("main 0",), ("side", "waits for", "main 0"), ("side 2",)]
    for _ in range(2):
        road.join()
    assert log[3:] == [("main", "waits for", "side 2")], "once"
