"""One text of a request inside vLLM: what it carries there, and what comes back."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from steerscope.capture.handle import CaptureHandle
from steerscope.core.rows import selected
from steerscope.engines.plan import CapturePlan
from steerscope.engines.results import Choice, EngineJob, FinishReason, TokenLogprobs
from steerscope.engines.sequence import RunningText, TextContext
from steerscope.engines.vllm.client.capacity import Allocation, Capacity
from steerscope.engines.vllm.client.core_outputs import CoreOutputs
from steerscope.engines.vllm.client.submit import Submitter
from steerscope.specs.errors import CapacityExceeded, RequestFailed

_LATE = 8  # steps after which the workers have looked whether steered rows are finite
_PATIENCE = 5.0  # seconds, for a reading whose token is there; then it is missing
_HOLD = 4  # rows a reduction keeps back: vLLM may run a step or two past the end of a text
# the same where vLLM learns of the end from this process, some steps late
_HOLD_LATE = 64
_HOLD_BYTES = 64 << 20
Lack = Literal["rows", "answer"]  # rows come with the steps that follow; for an answer the workers have to be asked


@dataclass(frozen=True, slots=True)
class VLLMContext(TextContext):
    capacity: Capacity
    outputs: CoreOutputs
    core_is_apart: bool  # vLLM's core is another process


class VLLMText(RunningText):
    def __init__(self, job: EngineJob, context: VLLMContext, key: str) -> None:
        super().__init__(job, context)
        self.context = context
        self.key = key  # its name in vLLM: request ids come again, this does not
        asks = self.plan.columns or self.plan.capture or self.plan.watch
        self.allocation = Allocation(context.capacity, self.plan) if asks else None
        rules = self.plan.watch.compiled.rules if self.plan.watch else []
        self._stops_by_rule = any(rule.kind == "stop" for rule in rules)
        self._from_core = context.outputs.direct and self.plan.sampling.logprobs is None
        self.deferred = self._from_core and self.quiet and not self._stops_by_rule  # its tokens are read at its end
        self._sampled: list[int] = []  # so far, where it is deferred
        self._n_readings = 0  # readings that were taken over

    @property
    def needs_slot(self) -> bool:
        return self.allocation is not None

    def prepare(self) -> bool:
        """Take slots and shared memory; return False when there is no room for them now."""
        try:
            if self.allocation is not None:
                self.allocation.take()
        except CapacityExceeded:
            return False
        self.started()
        return True

    def _release(self) -> None:
        if self.allocation is not None:
            self.allocation.release()

    def submit(self, submitter: Submitter) -> None:
        """Queue it in vLLM."""
        ids = self.plan.prompt.token_ids
        plain = ids if type(ids[0]) is int else np.asarray(ids).tolist()
        extra: dict[str, object] | None = None
        salt: str | None = None
        cached = True
        if self.allocation is not None:
            hold = self._hold(self.plan.capture) if self.plan.capture else 0
            extra = self.allocation.entry(self.key, hold)
            salt = self.context.capacity.salts.of(self.allocation.shared)
            cached = self.allocation.shared.reads_cached
        submitter.add(self.key, plain, salt, self.plan.sampling, cached, extra, in_output_processor=not self._from_core)
        if self.deferred:
            self.context.outputs.keep(self.key, self._sampled)

    def _hold(self, capture: CapturePlan) -> int:
        """Return the rows a reduction keeps back."""
        if not (self.plan.sampling.stop or self.job.stream or self.context.core_is_apart or self._stops_by_rule):
            return _HOLD
        capacity = self.context.capacity
        row = len(capture.keys) * capacity.facts.hidden * capacity.dtype.itemsize
        return min(self.plan.sampling.max_tokens, max(_HOLD_LATE, _HOLD_BYTES // row))

    def take(self, output: Any) -> FinishReason | None:
        """Take new tokens, of a deferred text all. Return the reason if the text is over."""
        new = output if self._from_core else output.outputs[0]
        reason = self.accept_all(self._sampled) if self.deferred else self._accept_new(new)
        if reason:
            return reason
        if not output.finished:
            return None
        if (why := str(new.finish_reason)) not in ("stop", "length"):
            raise RequestFailed(f"vLLM gave {self.name} up: {why}")
        return "length" if why == "length" else "stop"

    def _accept_new(self, new: Any) -> FinishReason | None:
        tokens, told = (new.new_token_ids, ()) if self._from_core else (new.token_ids, new.logprobs or ())
        for i, token in enumerate(tokens):
            if self.notes is not None and not self._note(len(self.history)) and self.failure is None:
                raise RequestFailed(f"{self.name} failed: a reading did not arrive within {_PATIENCE:g} s of its token")
            found = _logprobs(token, told[i], self.plan.sampling.logprobs or 0) if told else None
            if reason := self.accept(token, found):
                return reason
        return None

    def without_token(self) -> bool:
        """Return whether a deferred text has no token yet; note the time of the first one."""
        if self._sampled:
            self._first = self._first or time.perf_counter()
        return not self._sampled

    def catch_up(self) -> None:
        """Take the tokens of a deferred text that ends before vLLM reports its end."""
        if self.deferred:
            self.accept_all(self._sampled[self.count :])

    def _note(self, rows: int) -> bool:
        """Take over the readings of the first rows; return whether all were there. Later readings may not belong to
        the text."""
        watch = self.plan.watch
        allocation = self.allocation
        if watch is None or allocation is None or allocation.region is None or self.notes is None:
            return True
        wanted = watch.positions.count(rows)
        if allocation.read < wanted:  # a GPU writes readings and tokens beside each other
            until = time.monotonic() + _PATIENCE
            while allocation.read < wanted and self.failure is None and time.monotonic() < until:
                time.sleep(1e-5)
        stop = min(allocation.read, wanted)
        if stop > self._n_readings:
            positions = selected(watch.positions, rows)[self._n_readings : stop]
            self.notes.note(allocation.readings(self._n_readings, stop), 0, positions)
            self._n_readings = stop
        return stop == wanted

    def _choice(self, reason: FinishReason) -> Choice:
        self._note(self.computed)
        watch = self.plan.watch
        if watch is not None and self._n_readings < (wanted := watch.positions.count(self.computed)):
            raise RequestFailed(f"{self.name} failed: {wanted - self._n_readings} of {wanted} readings did not arrive")
        return super()._choice(reason)

    @property
    def failure(self) -> str | None:
        """Return why the workers gave it up."""
        region = self.allocation.region if self.allocation else None
        return None if region is None else region.failure

    @property
    def computed(self) -> int:
        """Return the number of its rows: p + g − 1, and none if it was never started."""
        return len(self.history) - 1 if self.count else 0

    def lacks(self) -> Lack | None:
        """Return what of a text that has ended is not here."""
        allocation = self.allocation
        plan = self.plan
        count = self.count
        if allocation is None or allocation.region is None:
            return None
        if not count or allocation.region.failed:  # it may be in the very step that runs now
            return "answer"
        if plan.columns and count <= _LATE:  # faults of the last steps may not have been read
            return "answer"
        if plan.watch and allocation.read < plan.watch.positions.count(self.computed):
            return "answer"
        if plan.capture is None:
            return None
        if plan.capture.spec.reduce:
            return "answer"
        if allocation.arrived() >= plan.capture.positions.count(self.computed):
            return None
        return "answer" if plan.columns or allocation.left() else "rows"  # its end may hide a fault of the last steps

    def ending(self) -> list[Any]:
        assert self.allocation is not None
        assert self.allocation.region is not None
        return [self.key, self.computed, self.allocation.region.offset, bool(self.plan.columns)]

    def _handle(self) -> CaptureHandle | None:
        capture = self.plan.capture
        held = self.job.held
        if capture is None or held is None:
            if held is not None:  # there were readings, which have been taken over
                held.release()
            return None
        if self.allocation is None or self.allocation.region is None:  # cancelled while it waited
            held.release()
            return None
        columns, count, size = self.allocation.hand_over(self.computed)
        held.shrink(size)
        return self.handle_of(columns, self.computed, count, held)


def _logprobs(token: int, told: Any, most: int) -> TokenLogprobs:
    """Return log-probabilities from vLLM's, which has the sampled token beside or among the best ones, with ranks."""
    ranked = sorted((one.rank, found, one.logprob) for found, one in told.items())
    return TokenLogprobs(token, told[token].logprob, tuple((found, value) for _, found, value in ranked[:most]))
