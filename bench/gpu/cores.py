"""The cores that a run has. A host's cores may be shared with others: on some, half of them are half as fast at any
moment, and one that has worked for a second becomes so. An engine whose threads stay on such cores pays round after
round. So each run has the few cores that are fastest before it, which favours no engine; and it is known for how long
others had them meanwhile. Who works longer on the host loses more there: pairs that were measured again for that are
kept in the file, and the ratio of all."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_FEWEST = 8  # cores: with fewer there is nothing to choose from
_CHOSEN = 3  # of them: one thread drives the engine, one waits for the device's answers
_PIECE = 30_000  # additions: about a millisecond
_LOOKS = 2  # at each: what is fast once may be slow again
_FORGOTTEN = 0.5  # of what was found before, each time


def work() -> float:
    """Seconds of a small piece of what drives an engine: Python."""
    began = time.perf_counter()
    total = 0
    for i in range(_PIECE):
        total += i
    return time.perf_counter() - began


class Cores:
    def __init__(self, choose: bool, measure: Callable[[], float] = work) -> None:
        self.all = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.chosen, self._measure = choose and len(self.all) >= _FEWEST, measure
        self._known: dict[int, float] = {}

    def fastest(self) -> list[int]:
        for core in self.all:
            took = max(self._took(core) for _ in range(_LOOKS))
            self._known[core] = took + (1 - _FORGOTTEN) * (self._known.get(core, took) - took)
        return sorted(self.all, key=self._known.__getitem__)[:_CHOSEN]

    def _took(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        try:
            return self._measure()
        finally:
            os.sched_setaffinity(0, self.all)


def stolen(cores: list[int], counts: Path = Path("/proc/stat")) -> float:
    """Seconds, ever, in which one of these was wanted and others had it (in hundredths; 0 where it is unknown)."""
    wanted = {f"cpu{core}" for core in cores}
    lines = counts.read_text().splitlines() if wanted and counts.exists() else []
    found = [int(parts[8]) for line in lines if (parts := line.split())[:1] and parts[0] in wanted and len(parts) > 8]
    return sum(found) / os.sysconf("SC_CLK_TCK")


def confine(cores: list[int]) -> None:
    """All threads of this process to these."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)
