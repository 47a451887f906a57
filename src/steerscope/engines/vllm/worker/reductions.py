"""Reductions of captured rows in a worker, of all requests of a step together.

Rows past the end of a text, which an engine that schedules ahead computes before it hears of the end, must not be among
them: the newest `hold` rows of a request are kept apart. `core.reductions.HeldBack` is the definition, and what runs on
a CPU; on a GPU one kernel does a step of all requests.
"""

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from steerscope.capture.transport import Arena
from steerscope.core.reductions import HeldBack, Reducer
from steerscope.engines.vllm.wire import WireCapture
from steerscope.engines.vllm.worker.requests import Slice
from steerscope.specs.tokens import END


class Reductions(Protocol):
    def start(self, capture: WireCapture, width: int) -> Any:
        """What a request of so many taps keeps until its end."""
        ...

    def push(self, parts: Sequence[tuple[Any, Slice]]) -> None:
        """Take rows in; their cells may be used again behind the next `join`."""
        ...

    def join(self) -> None:
        """The next forward comes behind whatever was pushed: it may write to those cells."""
        ...

    def foretell(self, ends: Sequence[tuple[Any, int, Arena, int, int]]) -> None:
        """So many rows were taken in, and no more will come: their result may be written to the first place of the
        arena, and then their number to the second. `finish` may still say that some do not count."""
        ...

    def fence(self) -> torch.cuda.Event | None:
        """When all that was foretold is written; None: it is."""
        ...

    def finish(self, held: Any, rows: int, counted: int, arena: Arena, place: int) -> int:
        """Of `counted` rows, all at positions below `rows`, the result [taps, hidden] is to be at this place of the
        shared memory after `flush`; how many rows it stands for."""
        ...

    def flush(self) -> None: ...

    def release(self, held: Any) -> None:
        """Nobody asks for anything of it any more."""
        ...


class HostReductions:
    def __init__(self, cells: torch.Tensor) -> None:
        self._cells = cells

    def start(self, capture: WireCapture, width: int) -> HeldBack:
        assert capture.reduce is not None
        return HeldBack(Reducer(capture.reduce, width, self._cells.shape[1], self._cells.device), capture.hold)

    def push(self, parts: Sequence[tuple[HeldBack, Slice]]) -> None:
        for held, part in parts:
            count, width = part.stop - part.start, part.asker.width
            rows = self._cells[part.cell : part.cell + count * width].view(count, width, -1)
            held.push(range(part.start, part.stop), rows)

    def join(self) -> None: ...

    def foretell(self, ends: Sequence[tuple[HeldBack, int, Arena, int, int]]) -> None:
        for held, counted, arena, place, counter in ends:
            reducer = copy.deepcopy(held).finish(END)
            if reducer.n == counted:
                _write(reducer, arena, place)
                arena.words[counter // 8] = counted

    def fence(self) -> None: ...

    def finish(self, held: HeldBack, rows: int, counted: int, arena: Arena, place: int) -> int:
        del counted  # the rows themselves say
        reducer = held.finish(rows)
        _write(reducer, arena, place)
        return reducer.n

    def flush(self) -> None: ...

    def release(self, held: HeldBack) -> None: ...


def _write(reducer: Reducer, arena: Arena, place: int) -> None:
    result = reducer.result()
    arena.view(place, tuple(result.shape), torch.float32).copy_(result)


def make_reductions(cells: torch.Tensor) -> Reductions:
    if cells.device.type == "cuda":
        from steerscope.engines.vllm.cuda.reductions import DeviceReductions

        return DeviceReductions(cells)
    return HostReductions(cells)
