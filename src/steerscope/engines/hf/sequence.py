"""One running sequence of the transformers engine: its tokens, text, slots and rows, from admission to its end."""

import functools
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.engines.generation import Choice, FinishReason, Job, Timings, TokenEvent
from steerscope.engines.hf.sampler import Chooser
from steerscope.engines.plan import Plan, tap_of
from steerscope.engines.text import Decoder, Detokenizer, StopStrings
from steerscope.residual.reduce import Reducer
from steerscope.residual.rows import RowBuffer, make_labels, selected
from steerscope.residual.table import Key, Lease, SlotTable
from steerscope.specs.errors import RequestFailed

if TYPE_CHECKING:
    from steerscope.engines.hf.engine import HFEngine


class Row:
    """A row of the batch."""

    def __init__(self, job: Job, decoder: Decoder, eos: frozenset[int], engine: "HFEngine") -> None:
        plan = job.plan
        self.job, self.plan, self.engine = job, plan, engine
        self.name = plan.request_id
        self.prompt_length = len(plan.prompt.token_ids)
        self.history = list(plan.prompt.token_ids)  # prompt and generated ids
        self.fed = 0  # how many of them the model has seen
        self.tapped: set[Key] = plan.tapped
        self.leases: list[Lease] = []
        self.buffer: RowBuffer | None = None
        self.reducer: Reducer | None = None
        self.chooser = Chooser.of(plan.sampling, self.history, engine.model.device)
        self._table: SlotTable | None = None
        self._eos = frozenset() if plan.sampling.ignore_eos else eos
        self._detokenizer, self._stops = Detokenizer(decoder), StopStrings(plan.sampling.stop)
        self._pieces: list[str] = []
        self._born = time.perf_counter()
        self._admitted = self._first = 0.0
        self.over = False  # reported; a row ends once

    @property
    def generated(self) -> list[int]:
        return self.history[self.prompt_length :]

    def lease(self, table: SlotTable) -> None:
        """Take table slots and row memory; all or nothing."""
        try:
            for column in self.plan.columns:
                self.leases.append(table.acquire(column))
        except Exception:
            self._release(table)
            raise
        self._table = table
        self._admitted = time.perf_counter()
        capture = self.plan.capture
        if capture is None:
            return
        model, hidden = self.engine.model, self.engine.facts.hidden
        if capture.spec.reduce:
            self.reducer = Reducer(capture.spec.reduce, len(capture.keys), hidden, model.device)
        else:
            self.buffer = RowBuffer(capture.keys, capture.positions, self.plan.most_rows, hidden, model.dtype)

    def _release(self, table: SlotTable | None) -> None:
        while self.leases and table is not None:
            table.release(self.leases.pop())

    def accept(self, token: int) -> FinishReason | None:
        """Take a sampled token; the reason if it was the last one."""
        self.history.append(token)
        count = len(self.history) - self.prompt_length
        if count == 1:
            self._first = time.perf_counter()
        reason: FinishReason | None = None
        if token in self._eos:
            reason = "stop"
        elif count >= self.plan.sampling.max_tokens:
            reason = "length"
        text = self._stops.push(self._detokenizer.push(token))
        if reason and self._stops.found is None:
            text += self._stops.push(self._detokenizer.flush())
        if self._stops.found is not None:
            reason = "stop_string"
        elif reason:
            text += self._stops.flush()
        self._pieces.append(text)
        if self.job.stream:
            self.job.report(TokenEvent(self.plan.choice, count - 1, token, text))
        return reason

    def end(self, reason: FinishReason) -> None:
        if self.over:
            return
        self._release(self._table)
        if reason == "cancelled":
            self._pieces.append(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
        now = time.perf_counter()
        admitted, first = self._admitted or now, self._first or now
        try:
            capture = self._handle()
        except RequestFailed as error:
            self.fail(error)
            return
        self.over = True
        choice = Choice(
            index=self.plan.choice,
            text="".join(self._pieces),
            token_ids=self.generated,
            finish_reason=reason,
            stop_string=self._stops.found,
            seed=self.plan.sampling.seed or 0,
            timings=Timings(admitted - self._born, first - self._born, now - self._born),
            capture=capture,
        )
        self.job.report(choice)

    def fail(self, error: RequestFailed) -> None:
        if not self.over:
            self.over = True
            self._release(self._table)
            self.job.fail(error)

    def _handle(self) -> CaptureHandle | None:
        plan, held = self.plan, self.job.held
        if plan.capture is None or held is None:
            return None
        # The last sampled token is never fed: p + g − 1 rows, and none at all for what was never started.
        computed = min(self.fed, len(self.history) - 1)
        if self.reducer is not None:
            tensor, index = self.reducer.result(), selected(plan.capture.positions, computed)
            if self.reducer.n != len(index):
                raise RequestFailed(f"{self.reducer.n} of {len(index)} rows were reduced")
        elif self.buffer is not None:
            index, tensor = self.buffer.finish(computed)
        else:  # cancelled while it waited
            held.release()
            return None
        held.shrink(tensor.numel() * tensor.element_size())
        name = self.engine.facts.name
        load = functools.partial(_rows, plan, index, tensor, list(self.history), name)
        return CaptureHandle(self.name, len(index), load, self.engine.budget, held, self.engine.capture_ttl)


def _rows(plan: Plan, index: np.ndarray, tensor: torch.Tensor, history: list[int], model: str) -> Rows:
    assert plan.capture is not None
    prompt, reduce = plan.prompt, plan.capture.spec.reduce
    labels = make_labels(plan.request_id, index, history, len(prompt.token_ids), prompt.messages, prompt.open_message)
    column = {key: j for j, key in enumerate(plan.capture.keys)}
    tensors = {key: tensor[..., column[tap_of(*key)], :] for key in plan.capture.asked}
    return Rows(tensors, labels, model, reduce, prompt.messages)
