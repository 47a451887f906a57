"""A row of the transformers engine's batch: a sequence with its slots, its rows and its place in the cache."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from steerscope.capture.handle import CaptureHandle
from steerscope.core.rows import Reducer, RowBuffer
from steerscope.core.slot_table import Key, Lease, SlotTable
from steerscope.engines.hf.sampler import Chooser
from steerscope.engines.results import EngineJob
from steerscope.engines.sequence import RunningText, TextContext
from steerscope.lenses.monitor import Monitor, Seat
from steerscope.specs.errors import RequestFailed


@dataclass(frozen=True, slots=True)
class HFContext(TextContext):
    """What the texts of one engine share."""

    model: PreTrainedModel
    table: SlotTable
    monitor: Monitor


class Row(RunningText):
    def __init__(self, job: EngineJob, context: HFContext) -> None:
        super().__init__(job, context)
        self.context = context
        self.fed = 0  # number of tokens of its history that the model has seen
        self.prefilled: Cache | None = None  # of the part of its prompt that the model has seen
        self.alone = False  # its prefill failed, and is tried once more without other prompts
        self.tapped = self.plan.template.tapped
        self.leases: list[Lease] = []
        self.kept: RowBuffer | Reducer | None = None  # its captured rows
        self.chooser = Chooser.of(self.plan.sampling, self.history, context.model.device)
        self.seat: Seat | None = None
        self.fault: RequestFailed | None = None  # why its rows or readings of the last forward are missing

    @property
    def needs_slot(self) -> bool:
        return bool(self.plan.columns)  # rows have host memory of their own, and rules as many places as the batch

    def lease(self) -> None:
        """Take table slots, a seat if it is watched, and row memory; all or nothing."""
        try:
            for column in self.plan.columns:
                self.leases.append(self.context.table.acquire(column))
            if self.plan.watch is not None:
                self.seat = self.context.monitor.admit(self.plan.watch)
        except Exception:
            self._release()
            raise
        self.started()
        capture = self.plan.capture
        if capture is None:
            return
        model = self.context.model
        hidden = self.context.facts.hidden
        if capture.spec.reduce:
            self.kept = Reducer(capture.spec.reduce, len(capture.keys), hidden, model.device)
        else:
            self.kept = RowBuffer(capture.keys, capture.positions, self.plan.most_rows, hidden, model.dtype)

    def _release(self) -> None:
        while self.leases:
            self.context.table.release(self.leases.pop())
        if self.seat is not None:
            self.context.monitor.release(self.seat)
            self.seat = None

    def gate(self, number: int) -> int:
        """Return the gate id of a planned column's gate."""
        return self.context.monitor.gate(self.seat, number) if self.seat else 0

    @property
    def captured_rows(self) -> int:
        """Return the number of captured rows of what the model has seen."""
        capture = self.plan.capture
        return capture.positions.count(self.fed) if capture else 0

    @property
    def readings(self) -> int:
        """Return the number of rows that lenses have read."""
        return self.plan.watch.positions.count(self.fed) if self.plan.watch else 0

    def restart(self) -> None:
        """Forget what a prefill that failed has computed: the prompt will be run again, alone, from its first token."""
        self.fed = 0
        self.fault = None
        self.prefilled = None
        self.alone = True
        if self.kept is not None:
            self.kept.restart()
        if self.seat is not None and self.seat.slot:
            self.context.monitor.rules.restart(self.seat.slot)
        if self.notes is not None:
            self.notes.restart()

    def _handle(self) -> CaptureHandle | None:
        capture = self.plan.capture
        held = self.job.held
        if capture is None or held is None:
            return None
        # The last sampled token is never fed: p + g − 1 rows, and none at all for what was never started.
        computed = min(self.fed, len(self.history) - 1)
        count = capture.positions.count(computed)
        if self.kept is None:  # cancelled while it waited
            held.release()
            return None
        tensor = self.kept.finish(count)
        held.shrink(tensor.nbytes)

        def columns() -> dict[Key, torch.Tensor]:
            return {key: tensor[..., j, :] for j, key in enumerate(capture.keys)}

        return self.handle_of(columns, computed, count, held)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start, stop) of a row's history, which one forward feeds."""

    row: Row
    start: int
    stop: int

    @classmethod
    def rest(cls, row: Row) -> "TokenSpan":
        """Return all that the model has not seen."""
        return cls(row, row.fed, len(row.history))

    @property
    def muted(self) -> "TokenSpan":
        """Return the same place in the batch, without tokens that have ops, captures or readings."""
        return TokenSpan(self.row, self.stop, self.stop)
