"""The core that both runs of a pair are driven from. A host's cores are shared with others: for seconds one is half as
fast as the next, and whichever engine is driven from it then pays. So a pair has one core, the fastest just before it;
since this looks at how long a small piece of work takes there, and at no run, it favours nobody."""

import os
import time
from collections.abc import Callable, Sequence

_FEWEST = 4  # cores: with fewer there is nothing to choose from
_PIECE = 30_000  # additions: about a millisecond


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
        return min(self._all, key=self._took) if self._chosen else None

    def _took(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        try:
            return self._measure()
        finally:
            os.sched_setaffinity(0, self._all)
