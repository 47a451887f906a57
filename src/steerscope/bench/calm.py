"""Whether the host has time. Processor cores are shared with others, whose bursts last seconds and make untouched vLLM
differ from itself by percents. A round that begins between two of them says more; and since this looks at how long a
small piece of work takes before a run, and at no run, it favours nobody."""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_THREADS, _PIECE = min(8, os.cpu_count() or 1), bytes(4 << 20)
_SLOWER = 1.3  # than the fastest so far: somebody else works
_PAUSE_S = 0.1


def work() -> float:
    """Seconds until several cores have done the same small piece."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(len, [b""] * _THREADS))  # its threads are there
        began = time.perf_counter()
        list(pool.map(hashlib.sha256, [_PIECE] * _THREADS))
        return time.perf_counter() - began


class Calm:
    def __init__(self, patience_s: float, measure: Callable[[], float] = work) -> None:
        """Wait for so long, at most and in all."""
        self._left, self._measure, self._best = patience_s, measure, float("inf")
        self.waited = 0.0

    def wait(self) -> None:
        """Until the host is about as fast as it ever was."""
        while self._left > 0:
            began = time.perf_counter()
            took = self._measure()
            self._best = min(self._best, took)
            if took <= _SLOWER * self._best:
                return
            time.sleep(_PAUSE_S)
            lost = time.perf_counter() - began
            self.waited += lost
            self._left -= lost
