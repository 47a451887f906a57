"""The core that a run is driven from. A host's cores are shared with others: at any moment every other one is only half
as fast, and one that has worked for a second becomes so. Whichever engine is driven from such a core pays for it. So
each run has the fastest core just before it; since this looks at how long a small piece of work takes there, and at no
run, it favours nobody."""

import os
import time
from collections.abc import Callable, Sequence

_FEWEST = 4  # cores: with fewer there is nothing to choose from
_PIECE = 30_000  # additions: about a millisecond
_LOOKS = 2  # at each: what is fast once may be slow again


def work() -> float:
    """Seconds of a small piece of what drives an engine: Python."""
    began = time.perf_counter()
    total = 0
    for i in range(_PIECE):
        total += i
    return time.perf_counter() - began


class Cores:
    def __init__(self, choose: bool, measure: Callable[[], float] = work) -> None:
        self._all: Sequence[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
        self._chosen, self._measure = choose and len(self._all) >= _FEWEST, measure

    def fastest(self) -> int | None:
        """None: whatever the system chooses."""
        if not self._chosen:
            return None
        looks = [[self._took(core) for core in self._all] for _ in range(_LOOKS)]
        slowest = [max(one) for one in zip(*looks, strict=True)]
        return self._all[slowest.index(min(slowest))]

    def _took(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        try:
            return self._measure()
        finally:
            os.sched_setaffinity(0, self._all)
