"""One request inside vLLM: what it carries there, and what comes back."""

import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.transport import FAILED, Region, Regions
from steerscope.engines.generation import FinishReason, Job
from steerscope.engines.plan import CapturePlan
from steerscope.engines.sequence import Sequence, captured
from steerscope.engines.text import Decoder
from steerscope.engines.vllm.wire import Wire, WireCapture, WireColumn, coefficient_hash, salt, vector_hash
from steerscope.residual.rows import selected
from steerscope.residual.table import Key, Slots
from steerscope.specs.errors import CapacityExceeded, RequestFailed

if TYPE_CHECKING:
    from vllm import SamplingParams

    from steerscope.engines.vllm.engine import VLLMEngine

_HOLD = 4  # rows a reduction keeps back: vLLM may run a step or two past the end of a text
_HOLD_LATE, _HOLD_BYTES = 64, 64 << 20  # … and on until it hears of a stop string or a cancellation


class Running(Sequence):
    def __init__(self, job: Job, decoder: Decoder, eos: frozenset[int], engine: "VLLMEngine") -> None:
        super().__init__(job, decoder, eos)
        self.engine = engine
        self.key = f"{self.name}.{self.plan.choice}.{next(engine.numbers)}"  # names come again, this does not
        self.region: Region | None = None
        self._held: list[tuple[Slots, Hashable]] = []

    def prepare(self, regions: Regions) -> bool:
        """Take slots and shared memory; False when there is no room for them now."""
        slots, capture = self.engine.slots, self.plan.capture
        needs: list[tuple[Slots, Hashable]] = []
        for column in self.plan.columns:
            needs += [(slots["vector"], vector_hash(column)), (slots["coefficient"], coefficient_hash(column))]
        if capture is not None:
            needs.append((slots["group"], (capture.keys, capture.spec.before_steering)))
        try:
            for table, content in needs:
                table.acquire(content)
                self._held.append((table, content))
            if self.asks:
                self.region = regions.allocate(self.engine._row_bytes(self.plan), self.engine.stages)
        except CapacityExceeded:
            self._release()
            return False
        if self.asks and self.region is None:
            self._release()
            return False
        self.started()
        return True

    @property
    def asks(self) -> bool:
        """It steers or captures: the workers must know of it, and need a place to answer."""
        return bool(self.plan.columns or self.plan.capture)

    def _release(self) -> None:
        while self._held:
            table, content = self._held.pop()
            table.release(content)

    def prompt(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt_token_ids": [int(token) for token in self.plan.prompt.token_ids]}
        if found := salt(self.plan):
            asked["cache_salt"] = found
        return asked

    def params(self) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        s = self.plan.sampling
        greedy = s.temperature < 1e-6
        extra = {"steerscope": self.wire().pack()} if self.asks else None
        return SamplingParams(
            max_tokens=s.max_tokens,
            temperature=0.0 if greedy else s.temperature,
            top_p=1.0 if greedy else s.top_p,
            top_k=0 if greedy else s.top_k or 0,
            min_p=0.0 if greedy else s.min_p,
            repetition_penalty=s.repetition_penalty,
            seed=None if greedy else s.seed,
            ignore_eos=s.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_reading_prefix_cache=True if self.plan.capture else None,  # cached positions would have no rows
            extra_args=extra,
        )

    def wire(self) -> Wire:
        columns = tuple(WireColumn(vector_hash(c), c.coefficients, c.positions, c.gate) for c in self.plan.columns)
        plan, capture = self.plan.capture, None
        assert self.region is not None
        if plan is not None:
            hold = self._hold(plan)
            capture = WireCapture(
                plan.keys,
                plan.positions,
                plan.spec.before_steering,
                plan.spec.reduce,
                hold,
                self.plan.most_rows,
            )
        return Wire(self.key, self.region.offset, columns, capture)

    def _hold(self, capture: CapturePlan) -> int:
        """Rows a reduction keeps back. Where this process finds the end, vLLM hears of it late, and has run on."""
        late = self.plan.sampling.stop or self.job.stream or self.engine.separate
        row = len(capture.keys) * self.engine.facts.hidden * self.engine.dtype.itemsize
        return min(self.plan.sampling.max_tokens, max(_HOLD_LATE, _HOLD_BYTES // row)) if late else _HOLD

    def take(self, output: Any) -> FinishReason | None:  # noqa: ANN401 - a RequestOutput
        """New tokens; the reason if the request is over."""
        if self.region is not None and self.region.counters[FAILED]:
            return "cancelled"  # the workers gave it up: they will say why
        new = output.outputs[0]
        for token in new.token_ids:
            if reason := self.accept(token):
                return reason
        if not output.finished:
            return None
        if new.finish_reason not in ("stop", "length"):
            raise RequestFailed(f"vLLM gave {self.name} up: {new.finish_reason}")
        return "length" if new.finish_reason == "length" else "stop"

    @property
    def computed(self) -> int:
        """p + g − 1 rows, and none of what was never started."""
        return len(self.history) - 1 if self.generated else 0

    def incomplete(self) -> bool:
        """The workers have to be asked for the rows, or for what became of them."""
        if self.region is None:
            return False
        counters = self.region.counters
        if not self.generated:  # the workers may never have met it: only they can say that nobody writes there
            return True
        if self.plan.capture is None:  # of a short text the last steps' faults may not have been looked at
            return bool(counters[FAILED]) or len(self.generated) <= 2
        wanted = self.plan.capture.positions.count(self.computed)
        stages = self.engine.stages_of(self.plan.capture.keys)
        behind = any(int(counters[stage]) < wanted for stage in stages)
        return bool(self.plan.capture.spec.reduce or behind or counters[FAILED])

    def ending(self) -> list[Any]:
        return [self.key, self.computed, self.region.offset if self.region else 0]

    def _handle(self) -> CaptureHandle | None:
        capture, held, region = self.plan.capture, self.job.held, self.region
        if capture is None or held is None:
            return None
        if region is None:  # cancelled while it waited
            held.release()
            return None
        index = selected(capture.positions, self.computed)
        found = min(int(region.counters[stage]) for stage in self.engine.stages_of(capture.keys))
        short = found != len(index) if capture.spec.reduce else found < len(index)
        if region.counters[FAILED] or short:
            raise RequestFailed(f"{len(index) - found} of {len(index)} rows of {self.name} did not arrive")
        columns = self._columns(capture, region, len(index))
        if not capture.spec.reduce and len(self.engine.stages_of(capture.keys)) == 1:
            held.shrink(size := len(index) * len(capture.keys) * self.engine.facts.hidden * self.engine.dtype.itemsize)
            region.shrink(size)
        self.region = None  # the rows keep it from here on
        load = functools.partial(captured, self.plan, index, columns, list(self.history), self.engine.facts.name)
        return CaptureHandle(self.name, len(index), load, self.engine.budget, held, self.engine.capture_ttl)

    def _columns(self, capture: CapturePlan, region: Region, count: int) -> dict[Key, torch.Tensor]:
        """Each tap's rows. A region holds one block [rows, taps, hidden] per pipeline stage, in the order of stages;
        a reduction is one row of float32."""
        hidden, keys, reduce = self.engine.facts.hidden, capture.keys, capture.spec.reduce
        total = 1 if reduce else capture.positions.count(self.plan.most_rows)
        flat = region.tensor((total * len(keys), hidden), torch.float32 if reduce else self.engine.dtype)
        if reduce and not count:
            return {key: torch.full((hidden,), torch.nan) for key in keys}
        found, start = {}, 0
        for stage in self.engine.stages_of(keys):
            mine = [key for key in keys if self.engine.stage[key] == stage]
            block = flat[start : start + total * len(mine)].view(total, len(mine), hidden)
            found |= {key: block[0, j] if reduce else block[:count, j] for j, key in enumerate(mine)}
            start += total * len(mine)
        return found
