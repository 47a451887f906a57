"""Admit new requests to a worker: lease slots for their vectors, and give their tokens groups, flags and seats."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerscope.core.slot_table import Key
from steerscope.engines.vllm.settings import NAME
from steerscope.engines.vllm.wire import OVERFLOW, Wire
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.lenses import WorkerLenses
from steerscope.engines.vllm.worker.overflow import OverflowWatch
from steerscope.engines.vllm.worker.requests import TrackedRequest
from steerscope.engines.vllm.worker.step_index import StepIndex
from steerscope.engines.vllm.worker.tap_set import TapSet, groups_of

log = logging.getLogger("steerscope")


class RequestAdmission:
    def __init__(
        self, taps: TapSet, step_index: StepIndex, delivery: Delivery, overflow: OverflowWatch, lenses: WorkerLenses
    ) -> None:
        self._taps = taps
        self._step_index = step_index
        self._delivery = delivery
        self._overflow = overflow
        self._lenses = lenses
        self._vectors: dict[bytes, dict[Key, np.ndarray]] = {}

    def register(self, name: bytes, keys: list, data: bytes) -> None:
        """Keep vectors for later requests: float32 [keys, hidden]."""
        rows = np.frombuffer(data, dtype="<f4").reshape(len(keys), self._taps.hidden)
        self._vectors[bytes(name)] = {(layer, site): row for (layer, site), row in zip(keys, rows, strict=True)}

    def unregister(self, name: bytes) -> None:
        self._vectors.pop(bytes(name), None)

    def admit_all(self, new_requests: Sequence[Any]) -> None:
        """Admit new requests of vLLM that steer, capture or are watched."""
        flags = []
        for new in new_requests:
            extra = new.sampling_params.extra_args if new.sampling_params else None
            if extra is not None and (flag := self._admit(new, extra.get(NAME))):
                flags.append(flag)
        clear_overflow_flags(self._delivery.pool.overflow_flags, flags)

    def _admit(self, new: Any, packed: bytes | None) -> int:
        """Admit one request; return its overflow flag, 0 without one."""
        if packed is None or new.req_id in self._step_index.requests:  # a preempted request comes again
            return 0
        try:
            wire = Wire.unpack(packed)
        except Exception as error:
            log.error("a request carries a steerscope entry that cannot be read: %s", error)
            return 0
        request = TrackedRequest(wire, [], 0, 0, cached=new.num_computed_tokens > 0)
        try:
            self._delivery.find_region(request)
            self._lease_slots(request)
            if request.wire.capture or request.wire.watch:
                self._join_groups(request)
        except Exception as error:
            self._delivery.fail(request, f"{type(error).__name__}: {error}")
        if self._overflow.inherited(request):
            self._delivery.fail(request, OVERFLOW)
        request.wire = request.wire.without_content()
        self._step_index.admit(new.req_id, request)
        return request.flag

    def _lease_slots(self, request: TrackedRequest) -> None:
        table = self._taps.table
        for column in request.wire.columns:
            lease = table.lease(column.vectors, column.strengths)
            if lease is None:
                lease = table.acquire(column.placed(self._vectors, self._taps.taps, self._taps.hidden))
            request.leases.append(lease)
        if request.wire.columns:
            self._overflow.assign(request)

    def _join_groups(self, request: TrackedRequest) -> None:
        """Give tokens that are captured, watched or both their groups, for the taps of this worker."""
        capture = request.wire.capture
        watch = request.wire.watch
        keys, taps_before = self._taps.share_of(capture.keys) if capture else ((), 0)
        watched = watch.key if watch and watch.key in self._taps.taps else None
        numbers: list[int] = []
        for group in groups_of(keys, bool(capture and capture.before_steering), watched):
            numbers.append(self._taps.join_group(group))
            request.groups.append(group)
        if capture and keys:
            request.group = numbers[0]
            request.width = len(keys)
            request.taps_before = taps_before
            self._delivery.reserve_rows(request)
        if watch and watched:
            self._lenses.admit(request, watch, read_group=numbers[1 if keys else 0], both_group=numbers[-1])

    def release(self, request: TrackedRequest) -> None:
        """Give back all that an ended request holds."""
        while request.leases:
            self._taps.table.release(request.leases.pop())
        while request.groups:
            self._taps.groups.release(request.groups.pop())
        request.group = 0
        self._lenses.release(request)
        self._overflow.release(request)


def clear_overflow_flags(overflow_flags: Tensor, numbers: list[int]) -> None:
    """Clear the flags of new requests, which earlier owners may have left set."""
    if numbers:
        on_host = torch.tensor(numbers, pin_memory=overflow_flags.is_cuda)
        overflow_flags.index_fill_(0, on_host.to(overflow_flags.device, non_blocking=True), 0)
