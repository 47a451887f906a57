"""Decide how many bytes of rows are copied to the host beside a step.

The limit is what the bus carries in a part of the step's time. The small copies of a step (sampled tokens) wait behind
copies of rows. With too many rows the step lasts as long as their copy, and the rows seem to fit beside it; so the
device times steps and rows separately.
"""

_FIRST_BYTES = 64 << 20  # while nothing was measured
_MIN_BYTES = 1 << 20  # smaller copies measure latency, not the rate of the bus
_SHARE = 0.7  # of a step; the rest is for the step's own copies
_TIMED_EVERY = 7  # of so many copies beside steps of a known size, two in a row are timed, at three events more


class Pace:
    """Step times by the number of tokens: a step with prompts takes as long as fifty others."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes per millisecond, of the last rows that arrived
        self._steps: dict[int, tuple[float, float]] = {}  # milliseconds of the last two steps of a size
        self._excess = 0  # bytes copied beyond what was allowed
        self._turn, self._new = 0, False

    def timed(self, tokens: int) -> bool:
        """Return whether the copies beside the next step are timed. A step lasts from one mark to the next, so the step
        after one of unknown size is timed too."""
        before, self._new = self._new, not self.rate or tokens.bit_length() not in self._steps
        self._turn += 1
        return before or self._new or self._turn % _TIMED_EVERY < 2

    def step_took(self, tokens: int, ms: float) -> None:
        size = tokens.bit_length()
        self._steps[size] = self._steps.get(size, (ms, ms))[1], ms

    def rows_took(self, n_bytes: int, ms: float) -> None:
        if ms > 0 and n_bytes >= _MIN_BYTES:
            self.rate = n_bytes / ms

    def beside(self, tokens: int) -> int:
        """Return the bytes to copy beside a step with so many tokens."""
        known = self._steps.get(tokens.bit_length())
        if known is None or not self.rate:
            return _FIRST_BYTES - self._excess
        fits = int(_SHARE * min(known) * self.rate)  # one of the two steps may have waited for requests
        return max(_MIN_BYTES, fits) - self._excess  # never zero, or longer steps would go unnoticed

    def copied(self, n_bytes: int, allowed: int) -> None:
        """Charge bytes above the allowance to the next step: copies are not cut to size."""
        self._excess = max(0, n_bytes - allowed)
