"""How many bytes of rows may leave beside a step: what the bus carries in a part of the time that such a step takes.

The small copies of a step (sampled tokens out) wait behind rows that are on their way. Too many of them and the step
lasts as long as they do, so that they seem to fit beside it: steps and rows are timed apart, by the device.
"""

_FIRST = 64 << 20  # while nobody knows better
_ENOUGH = 1 << 20  # the least; smaller ones tell how long a copy takes, not how fast the bus is
_SHARE = 0.7  # of a step: what is left over is for the step's own
_AGAIN = 7  # of so many that go beside steps of a known size, two in a row are timed: three events more for the host


class Pace:
    """Steps are told apart by how many tokens they have: a step that reads prompts takes as long as fifty others."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes per millisecond, of the last rows that arrived
        self._steps: dict[int, tuple[float, float]] = {}  # by the size of a step: milliseconds of the last two
        self._owed = 0  # bytes that went out beyond what they should
        self._turn, self._new = 0, False

    def timed(self, tokens: int) -> bool:
        """Whether what goes beside the next step, with so many tokens, is to be timed. A step lasts from one mark to
        the next, so what follows a step that nobody knows is timed too."""
        before, self._new = self._new, not self.rate or tokens.bit_length() not in self._steps
        self._turn += 1
        return before or self._new or self._turn % _AGAIN < 2

    def step_took(self, tokens: int, ms: float) -> None:
        size = tokens.bit_length()
        self._steps[size] = self._steps.get(size, (ms, ms))[1], ms

    def rows_took(self, size: int, ms: float) -> None:
        if ms > 0 and size >= _ENOUGH:
            self.rate = size / ms

    def beside(self, tokens: int) -> int:
        """Bytes for a step with so many tokens."""
        known = self._steps.get(tokens.bit_length())
        if known is None or not self.rate:
            return _FIRST - self._owed
        fits = int(_SHARE * min(known) * self.rate)  # one of two may have waited for somebody to come
        return max(_ENOUGH, fits) - self._owed  # some, always: else nobody would find out that there is time again

    def sent(self, size: int, allowed: int) -> None:
        """Copies are not cut to size: what was too much is not sent with the next step, what was too little is gone."""
        self._owed = max(0, size - allowed)
