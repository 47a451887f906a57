"""A row of the transformers engine's batch: a sequence with its slots, its rows and its place in the cache."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from steerscope.capture.handle import CaptureHandle
from steerscope.core.reductions import Reducer
from steerscope.core.rows import RowBuffer
from steerscope.core.slot_table import Key, Lease, SlotTable
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.hf.sampler import Chooser
from steerscope.engines.results import Job
from steerscope.engines.sequence import RunningText, captured
from steerscope.lenses.monitor import Seat
from steerscope.specs.errors import RequestFailed

if TYPE_CHECKING:
    from steerscope.engines.hf.engine import HFEngine


class Row(RunningText):
    def __init__(self, job: Job, decoder: Decoder, eos: frozenset[int], engine: "HFEngine") -> None:
        super().__init__(job, decoder, eos)
        self.engine = engine
        self.fed = 0  # how many tokens of its history the model has seen
        self.prefilled: DynamicCache | None = None  # of the part of its prompt that the model has seen
        self.alone = False  # its prefill failed, and is tried once more without other prompts
        self.tapped: set[Key] = self.plan.tapped
        self.leases: list[Lease] = []
        self.buffer: RowBuffer | None = None
        self.reducer: Reducer | None = None
        self.chooser = Chooser.of(self.plan.sampling, self.history, engine.model.device)
        self._table: SlotTable | None = None
        self.seat: Seat | None = None
        self.fault: RequestFailed | None = None  # why its rows or readings of the last forward are missing

    @property
    def needs_slot(self) -> bool:
        return bool(self.plan.columns)  # rows have host memory of their own, and rules as many places as the batch

    def lease(self, table: SlotTable) -> None:
        """Take table slots, a seat if it is watched, and row memory; all or nothing."""
        self._table = table
        try:
            for column in self.plan.columns:
                self.leases.append(table.acquire(column))
            if self.plan.watch is not None:
                self.seat = self.engine.monitor.admit(self.plan.watch)
        except Exception:
            self._release()
            raise
        self.started()
        capture = self.plan.capture
        if capture is None:
            return
        model, hidden = self.engine.model, self.engine.facts.hidden
        if capture.spec.reduce:
            self.reducer = Reducer(capture.spec.reduce, len(capture.keys), hidden, model.device)
        else:
            self.buffer = RowBuffer(capture.keys, capture.positions, self.plan.most_rows, hidden, model.dtype)

    def _release(self) -> None:
        while self.leases and self._table is not None:
            self._table.release(self.leases.pop())
        if self.seat is not None:
            self.engine.monitor.release(self.seat)
            self.seat = None

    def gate(self, number: int) -> int:
        """The gate id of a planned column's gate."""
        return self.engine.monitor.gate(self.seat, number) if self.seat else 0

    @property
    def captured_rows(self) -> int:
        """How many rows were captured of what the model has seen."""
        capture = self.plan.capture
        return capture.positions.count(self.fed) if capture else 0

    @property
    def readings(self) -> int:
        """How many rows lenses have read."""
        return self.plan.watch.positions.count(self.fed) if self.plan.watch else 0

    def restart(self) -> None:
        """Forget what a prefill that failed has computed: the prompt will be run again, alone, from its first token."""
        self.fed, self.fault = 0, None
        self.prefilled, self.alone = None, True
        for kept in (self.buffer, self.reducer):
            if kept is not None:
                kept.restart()
        if self.seat is not None and self.seat.slot:
            self.engine.monitor.rules.restart(self.seat.slot)
        if self.notes is not None:
            self.notes.restart()

    def _handle(self) -> CaptureHandle | None:
        plan, capture, held = self.plan, self.plan.capture, self.job.held
        if capture is None or held is None:
            return None
        # The last sampled token is never fed: p + g − 1 rows, and none at all for what was never started.
        computed = min(self.fed, len(self.history) - 1)
        count = capture.positions.count(computed)
        if self.reducer is not None:
            tensor = self.reducer.result()
            if self.reducer.n != count:
                raise RequestFailed(f"{self.reducer.n} of {count} rows were reduced")
        elif self.buffer is not None:
            _, tensor = self.buffer.finish(computed)
        else:  # cancelled while it waited
            held.release()
            return None
        held.shrink(tensor.numel() * tensor.element_size())

        def columns() -> dict[Key, torch.Tensor]:
            return {key: tensor[..., j, :] for j, key in enumerate(capture.keys)}

        load = functools.partial(captured, plan, computed, columns, self.history, self.engine.facts.name)
        return CaptureHandle(self.name, count, load, self.engine.budget, held, self.engine.capture_ttl)


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, stop) of a row's history, which one forward feeds."""

    row: Row
    start: int
    stop: int

    @classmethod
    def rest(cls, row: Row) -> "Slice":
        """All that the model has not seen."""
        return cls(row, row.fed, len(row.history))

    @property
    def muted(self) -> "Slice":
        """The same place in the batch, without a token that has ops, captures or readings."""
        return Slice(self.row, self.stop, self.stop)
