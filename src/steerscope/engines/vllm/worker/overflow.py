"""Steering that leaves the numbers: rows that are not finite, and who must be told."""

from collections import deque

from steerscope.engines.vllm.wire import OVERFLOW, Recent
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.pool import Pool
from steerscope.engines.vllm.worker.requests import Asker
from steerscope.engines.vllm.worker.step_index import Books

_LOOKING = 16  # steps in which rows that were steered may still be found not to be finite


class Faults:
    """Every request that steers has a flag on the device."""

    def __init__(self, requests: int, pool: Pool, books: Books, delivery: Delivery) -> None:
        self._pool, self._books, self._delivery = pool, books, delivery
        self._owners: dict[int, Asker] = {}  # of flags, also after they have left
        self._numbers = deque(range(1, 2 * requests + 2))  # those given back are used again last
        self._spoilt = Recent()
        self.looking = 0  # so many more steps

    def give(self, asker: Asker) -> None:
        asker.number = self._numbers.popleft()
        self._owners[asker.number] = asker

    def release(self, asker: Asker) -> None:
        if asker.number:
            self._numbers.append(asker.number)
            asker.number = 0

    def inherited(self, asker: Asker) -> bool:
        """What it has read from the prefix cache may be what such steering left."""
        return asker.cached and bool(asker.wire.columns) and asker.wire.steering in self._spoilt

    def look(self, steers: bool) -> None:
        """After a step."""
        if steers:
            self.looking = _LOOKING
        if self.looking:
            self.looking -= 1
            self._note(self._pool.faulty())

    def look_now(self) -> None:
        self._note(self._pool.faulty(wait=True))

    def _note(self, numbers: list[int]) -> None:
        for number in numbers:
            asker = self._owners.get(number)
            if asker is not None and asker.failed is None:
                self._spoilt.add(asker.wire.steering)
                self._delivery.fail(asker, OVERFLOW)
                for other in self._books.askers.values():  # they may have read what it left in the prefix cache
                    if other.cached and other.failed is None and other.wire.steering == asker.wire.steering:
                        self._delivery.fail(other, OVERFLOW)
