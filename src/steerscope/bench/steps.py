"""The clock of a round, and what it says of an engine's steps."""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_AHEAD = 2  # steps of an asynchronous engine until the first one's tokens are there


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clocked(work: Callable[[], Any], steps: "StepTimes | None" = None) -> tuple[float, Any]:
    gc.collect()  # what the last round left is not this one's to sweep
    synchronise()
    start = time.perf_counter()
    found = work()
    synchronise()
    end = time.perf_counter()
    if steps is not None:
        steps.start, steps.end = start, end
    return end - start, found


class StepTimes:
    """When each call of an engine's `step` began and ended, in the round that is clocked."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.begun: list[float] = []
        self.done: list[float] = []
        self.start = self.end = 0.0

    def __call__(self) -> Any:
        self.begun.append(time.perf_counter())
        found = self._step()
        self.done.append(time.perf_counter())
        return found

    def clear(self) -> None:
        self.begun.clear()
        self.done.clear()

    def phases(self, prompts: int) -> dict[str, float]:
        """Milliseconds until the first step, of that step (where the engine is asynchronous, until the device is busy),
        of the steps until the prompts are read (such an engine prepares one more meanwhile), of the rest, behind the
        last, and of one that decodes. Prompts are read in so many steps."""
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
