"""Reduce the captured rows of all requests of a step.

An engine that schedules ahead computes rows past the end of a text before it hears of the end, and these must not be
reduced: the newest `hold` rows of a request are kept apart. `core.reductions.HeldBack` is the definition, and the
implementation on a CPU; on a GPU one kernel reduces the rows of all requests.
"""

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from steerscope.capture.transport import Arena
from steerscope.core.reductions import HeldBack, Reducer
from steerscope.engines.vllm.wire import WireCapture
from steerscope.engines.vllm.worker.requests import RowSlice
from steerscope.specs.tokens import END


class Reductions(Protocol):
    def start(self, capture: WireCapture, width: int) -> Any:
        """Return the partial result of a request with `width` taps."""
        ...

    def push(self, parts: Sequence[tuple[Any, RowSlice]]) -> None:
        """Add rows to partial results. Their cells may be written again after the next `join`."""
        ...

    def join(self) -> None:
        """Let the next forward wait for everything pushed: it may write to the same cells."""
        ...

    def write_early(self, ends: Sequence[tuple[Any, int, Arena, int, int]]) -> None:
        """Write results before their requests have ended: (partial result, rows, arena, place of the result, place of
        the row count) each. `finish` may still find that some rows do not count."""
        ...

    def fence(self) -> torch.cuda.Event | None:
        """Return an event after all results written early; None if they are there."""
        ...

    def finish(self, partial: Any, rows: int, counted: int, arena: Arena, place: int) -> int:
        """Queue the result [taps, hidden] of `counted` rows, all at positions below `rows`, to be written by `flush`;
        return the number of rows that it reduces."""
        ...

    def flush(self) -> None:
        """Write all queued results."""
        ...

    def release(self, partial: Any) -> None:
        """Free a partial result."""
        ...


class HostReductions:
    def __init__(self, cells: torch.Tensor) -> None:
        self._cells = cells

    def start(self, capture: WireCapture, width: int) -> HeldBack:
        assert capture.reduce is not None
        return HeldBack(Reducer(capture.reduce, width, self._cells.shape[1], self._cells.device), capture.hold)

    def push(self, parts: Sequence[tuple[HeldBack, RowSlice]]) -> None:
        for partial, part in parts:
            count, width = part.stop - part.start, part.request.width
            rows = self._cells[part.cell : part.cell + count * width].view(count, width, -1)
            partial.push(range(part.start, part.stop), rows)

    def join(self) -> None: ...

    def write_early(self, ends: Sequence[tuple[HeldBack, int, Arena, int, int]]) -> None:
        for partial, counted, arena, place, counter in ends:
            reducer = copy.deepcopy(partial).finish(END)
            if reducer.n == counted:
                _write(reducer, arena, place)
                arena.words[counter // 8] = counted

    def fence(self) -> None: ...

    def finish(self, partial: HeldBack, rows: int, counted: int, arena: Arena, place: int) -> int:
        del counted  # the partial result knows it
        reducer = partial.finish(rows)
        _write(reducer, arena, place)
        return reducer.n

    def flush(self) -> None: ...

    def release(self, partial: HeldBack) -> None: ...


def _write(reducer: Reducer, arena: Arena, place: int) -> None:
    result = reducer.result()
    arena.view(place, tuple(result.shape), torch.float32).copy_(result)


def make_reductions(cells: torch.Tensor) -> Reductions:
    if cells.device.type == "cuda":
        from steerscope.engines.vllm.cuda.reductions import DeviceReductions

        return DeviceReductions(cells)
    return HostReductions(cells)
