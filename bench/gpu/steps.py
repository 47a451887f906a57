"""When the steps of an engine began and ended, for drivers that measure."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from steerscope.bench.drivers import clocked, synchronise

_AHEAD = 2  # steps of an asynchronous engine until the first one's tokens are there


class StepTimes:
    """When each call of an engine's `step` began and ended, in the round that is clocked."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self._begun: list[float] = []  # also of steps after the round
        self._done: list[float] = []
        self.begun: list[float] = []
        self.done: list[float] = []
        self.start = self.end = 0.0

    @property
    def n_done(self) -> int:
        """Return the number of steps since the round began."""
        return len(self._done)

    def __call__(self) -> Any:
        self._begun.append(time.perf_counter())
        found = self._step()
        self._done.append(time.perf_counter())
        return found

    def clocked(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds that a call takes, and its result; this call is the round."""

        def timed() -> Any:
            self._begun.clear()
            self._done.clear()
            self.start = time.perf_counter()
            found = work()
            synchronise()
            self.end = time.perf_counter()
            return found

        seconds, found = clocked(timed)
        self.begun, self.done = list(self._begun), list(self._done)
        return seconds, found

    def phases(self, prompts: int) -> dict[str, float]:
        """Milliseconds until the first step, of that step (where the engine is asynchronous, until the device is busy),
        of the steps until the prompts are read (such an engine prepares one more meanwhile), of the rest, behind the
        last, and of one that decodes. The first `prompts` steps read prompts."""
        first = min(prompts + _AHEAD, len(self.done)) - 1
        edges = [self.start, self.begun[0], self.done[0], self.done[first], self.done[-1], self.end]
        names = "coming", "starting", "prompts", "decoding", "going"
        found = dict(zip(names, np.diff(edges) * 1e3, strict=True))
        return {name: float(value) for name, value in found.items()} | {
            "step": float(np.median(np.diff(self.done[first:])) * 1e3) if len(self.done) > first + 1 else 0.0
        }

    def told(self, prompts: int) -> dict[str, Any]:
        """Of the round: its phases, and the milliseconds from one step's end to the next one's."""
        return {"phases": self.phases(prompts), "steps_ms": (np.diff(self.done) * 1e3).round(3).tolist()}
