"""One request inside vLLM: what it carries there, and what comes back."""

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from steerscope.capture.handle import CaptureHandle
from steerscope.core.rows import selected
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.plan import CapturePlan
from steerscope.engines.results import Choice, FinishReason, Job, TokenLogprobs
from steerscope.engines.sequence import RunningText, captured
from steerscope.engines.vllm.client.capacity import Claim
from steerscope.engines.vllm.client.submit import Entrance
from steerscope.engines.vllm.wire import reads_cached, salt
from steerscope.specs.errors import CapacityExceeded, RequestFailed
from steerscope.specs.sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

    from steerscope.engines.vllm.client.engine import VLLMEngine

_LATE = 8  # steps after which the workers have looked whether steered rows are finite
_PATIENCE = 5.0  # seconds, for a reading whose token is there; then it is missing
_HOLD = 4  # rows a reduction keeps back: vLLM may run a step or two past the end of a text
_KEPT = 64
_HOLD_LATE, _HOLD_BYTES = 64, 64 << 20  # … and on until it hears of a stop string or a cancellation
# Rows come with the steps that follow; for anything else the workers have to be asked, or for what became of it.
Lack = Literal["rows", "answer"]


class Running(RunningText):
    def __init__(self, job: Job, decoder: Decoder, eos: frozenset[int], engine: "VLLMEngine") -> None:
        super().__init__(job, decoder, eos)
        self.engine = engine
        self.key = f"{self.name}.{self.plan.choice}.{next(engine.numbers)}"  # names come again, this does not
        # The workers must know of it, and need a place to answer.
        asks = self.plan.columns or self.plan.capture or self.plan.watch
        self.claim = Claim(engine.room, self.plan) if asks else None
        rules = self.plan.watch.compiled.rules if self.plan.watch else []
        self._stops_by_rule = any(rule.kind == "stop" for rule in rules)
        # Its tokens come from vLLM's core, and if nobody looks at them before its end, they are kept until then.
        self._direct = engine.exit.direct and self.plan.sampling.logprobs is None
        self.late = self._direct and self.quiet and not self._stops_by_rule
        self._sampled: list[int] = []  # so far, of such a one
        self._noted = 0  # readings that were taken over

    @property
    def needs_slot(self) -> bool:
        return self.claim is not None

    def prepare(self) -> bool:
        """Take slots and shared memory; False when there is no room for them now."""
        try:
            if self.claim is not None:
                self.claim.take()
        except CapacityExceeded:
            return False
        self.started()
        return True

    def _release(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def enter(self, entrance: Entrance) -> None:
        ids, extra = self.plan.prompt.token_ids, None
        if self.claim is not None:
            hold = self._hold(self.plan.capture) if self.plan.capture else 0
            extra = self.claim.wire(self.key, hold).entry()
        plain = ids if type(ids[0]) is int else np.asarray(ids).tolist()
        params = self.engine.sampling_params(self.plan.sampling, reads_cached(self.plan))
        entrance.add(self.key, plain, salt(self.plan), params, extra, booked=not self._direct)
        if self.late:
            self.engine.exit.keep(self.key, self._sampled)

    def _hold(self, capture: CapturePlan) -> int:
        """Rows a reduction keeps back. Where this process finds the end, vLLM hears of it late, and has run on."""
        if not (self.plan.sampling.stop or self.job.stream or self.engine.separate or self._stops_by_rule):
            return _HOLD
        row = len(capture.keys) * self.engine.facts.hidden * self.engine.dtype.itemsize
        return min(self.plan.sampling.max_tokens, max(_HOLD_LATE, _HOLD_BYTES // row))

    def take(self, output: Any) -> FinishReason | None:
        """New tokens, of a quiet one all; the reason if the request is over."""
        new = output if self._direct else output.outputs[0]
        tokens, told = (new.new_token_ids, ()) if self._direct else (new.token_ids, new.logprobs or ())
        if self.late and (reason := self.accept_all(self._sampled)):
            return reason
        for i, token in enumerate(() if self.late else tokens):
            if self.notes is not None and not self._note(len(self.history)) and self.failure is None:
                raise RequestFailed(f"{self.name} failed: a reading did not arrive within {_PATIENCE:g} s of its token")
            found = _logprobs(token, told[i], self.plan.sampling.logprobs or 0) if told else None
            if reason := self.accept(token, found):
                return reason
        if not output.finished:
            return None
        if (why := str(new.finish_reason)) not in ("stop", "length"):
            raise RequestFailed(f"vLLM gave {self.name} up: {why}")
        return "length" if why == "length" else "stop"

    def unborn(self) -> bool:
        """Of one whose tokens are kept until its end: whether none is there. The first time that one is, it is now."""
        if self._sampled:
            self._first = self._first or time.perf_counter()
        return not self._sampled

    def catch_up(self) -> None:
        """It ends before anybody would tell: what was sampled for it is taken."""
        if self.late:
            self.accept_all(self._sampled[self.count :])

    def _note(self, rows: int) -> bool:
        """Take over what was read of the first rows; whether all of it was there. Of later ones, which may be there,
        nobody knows yet whether they belong to the text."""
        watch, claim = self.plan.watch, self.claim
        if watch is None or claim is None or claim.region is None or self.notes is None:
            return True
        wanted = watch.positions.count(rows)
        if claim.read < wanted:  # a GPU writes readings and tokens beside each other
            self._await(lambda: claim.read >= wanted, time.monotonic() + _PATIENCE)
        stop = min(claim.read, wanted)
        if stop > self._noted:
            positions = selected(watch.positions, rows)[self._noted : stop]
            claim.readings(self._noted, stop).note(self.notes, 0, positions)
            self._noted = stop
        return stop == wanted

    def _await(self, there: Callable[[], bool], until: float) -> bool:
        while not (done := there()) and self.failure is None and time.monotonic() < until:
            time.sleep(1e-5)
        return done

    def _choice(self, reason: FinishReason) -> Choice:
        self._note(self.computed)
        watch = self.plan.watch
        if watch is not None and self._noted < (wanted := watch.positions.count(self.computed)):
            raise RequestFailed(f"{self.name} failed: {wanted - self._noted} of {wanted} readings did not arrive")
        return super()._choice(reason)

    @property
    def failure(self) -> str | None:
        """Why the workers gave it up."""
        region = self.claim.region if self.claim else None
        return None if region is None else region.failure

    @property
    def computed(self) -> int:
        """p + g − 1 rows, and none of what was never started."""
        return len(self.history) - 1 if self.count else 0

    def lacks(self, until: float = 0.0) -> Lack | None:
        """What of a text that has ended is not here. The result of one as long as it may become is written beside its
        last token: that is waited for, until then."""
        claim, plan, count = self.claim, self.plan, self.count
        if claim is None or claim.region is None:
            return None
        if not count or claim.region.failed:  # it may be in the very step that runs now
            return "answer"
        if plan.columns and count <= _LATE:  # the last steps' faults may not have been looked at
            return "answer"
        if plan.watch and claim.read < plan.watch.positions.count(self.computed):
            return "answer"
        if plan.capture is None:
            return None
        wanted, arrived = plan.capture.positions.count(self.computed), claim.arrived()
        if not plan.capture.spec.reduce:
            if arrived >= wanted:
                return None
            return "answer" if plan.columns or claim.left() else "rows"  # its end may hide a fault of the last steps
        if not wanted or plan.columns:
            return "answer"
        until = until if count == plan.sampling.max_tokens else 0.0
        return None if arrived == wanted or self._await(lambda: claim.arrived() == wanted, until) else "answer"

    def ending(self) -> list[Any]:
        assert self.claim is not None
        assert self.claim.region is not None
        return [self.key, self.computed, self.claim.region.offset, bool(self.plan.columns)]

    def _handle(self) -> CaptureHandle | None:
        capture, held = self.plan.capture, self.job.held
        if capture is None or held is None:
            if held is not None:  # there were readings, which have been taken over
                held.release()
            return None
        if self.claim is None or self.claim.region is None:  # cancelled while it waited
            held.release()
            return None
        computed = self.computed
        columns, count, size = self.claim.hand_over(computed)
        held.shrink(size)
        load = functools.partial(captured, self.plan, computed, columns, self.history, self.engine.facts.name)
        return CaptureHandle(self.name, count, load, self.engine.budget, held, self.engine.capture_ttl)


def _logprobs(token: int, told: Any, most: int) -> TokenLogprobs:
    """vLLM gives the sampled token beside the best ones, or among them, each with its rank."""
    ranked = sorted((one.rank, found, one.logprob) for found, one in told.items())
    return TokenLogprobs(token, told[token].logprob, tuple((found, value) for _, found, value in ranked[:most]))


class SamplingParamsOf:
    """vLLM's parameters. Equal ones are one: all that vLLM changes in them is the same for every request to a model."""

    def __init__(self) -> None:
        self._equal = functools.lru_cache(maxsize=64)(_sampling_params)
        # Requests of one call share what they were given: by identity, which stays theirs as long as it is kept.
        self._same: dict[tuple[int, bool], tuple[Sampling, SamplingParams]] = {}

    def __call__(self, sampling: Sampling, reads_cached: bool) -> "SamplingParams":
        name = id(sampling), reads_cached
        if (known := self._same.get(name)) is not None:
            return known[1]
        s, greedy = sampling, sampling.greedy
        made = self._equal(
            max_tokens=s.max_tokens,
            temperature=0.0 if greedy else s.temperature,
            top_p=1.0 if greedy else s.top_p,
            top_k=0 if greedy else s.top_k or 0,
            min_p=0.0 if greedy else s.min_p,
            repetition_penalty=s.repetition_penalty,
            frequency_penalty=s.frequency_penalty,
            presence_penalty=s.presence_penalty,
            seed=None if greedy else s.seed,
            ignore_eos=s.ignore_eos,
            logprobs=s.logprobs,
            skip_reading_prefix_cache=None if reads_cached else True,
        )
        self._same[name] = sampling, made
        if len(self._same) > _KEPT:
            del self._same[next(iter(self._same))]
        return made


def _sampling_params(**fields: Any) -> "SamplingParams":
    """Without the deep copy that vLLM would make of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True, **fields)
