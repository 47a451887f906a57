"""Fail requests whose steering makes rows that are not finite."""

from collections import deque

from steerscope.engines.vllm.wire import OVERFLOW, Recent
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.device import RowPool
from steerscope.engines.vllm.worker.requests import TrackedRequest
from steerscope.engines.vllm.worker.step_index import StepIndex

_STEPS = 16  # after a steered step in which its overflow may still be found


class OverflowWatch:
    """Flags on the device, one for each request that steers."""

    def __init__(self, max_requests: int, pool: RowPool, step_index: StepIndex, delivery: Delivery) -> None:
        self._pool = pool
        self._step_index = step_index
        self._delivery = delivery
        self._owners: dict[int, TrackedRequest] = {}  # also of flags that were released
        self._free = deque(range(1, 2 * max_requests + 2))  # flags released last are used last
        self._spoilt = Recent()
        self.steps_left = 0  # in which flags are checked

    def assign(self, request: TrackedRequest) -> None:
        request.flag = self._free.popleft()
        self._owners[request.flag] = request

    def release(self, request: TrackedRequest) -> None:
        if request.flag:
            self._free.append(request.flag)
            request.flag = 0

    def inherited(self, request: TrackedRequest) -> bool:
        """Return whether the prefix cache may have given the request rows of a steering that overflowed."""
        return request.cached and bool(request.wire.columns) and request.wire.steering in self._spoilt

    def check(self, steers: bool) -> None:
        """Check the flags after a step."""
        if steers:
            self.steps_left = _STEPS
        if self.steps_left:
            self.steps_left -= 1
            self._fail(self._pool.take_overflows())

    def check_now(self) -> None:
        self._fail(self._pool.take_overflows(wait=True))

    def _fail(self, flags: list[int]) -> None:
        for flag in flags:
            request = self._owners.get(flag)
            if request is None or request.failed is not None:
                continue
            self._spoilt.add(request.wire.steering)
            self._delivery.fail(request, OVERFLOW)
            for other in self._step_index.requests.values():  # it may have read the request's blocks in the cache
                if other.cached and other.failed is None and other.wire.steering == request.wire.steering:
                    self._delivery.fail(other, OVERFLOW)
