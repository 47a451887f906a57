"""One running sequence, whatever runs it: told about each token, it makes text of them and says when it is over."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels, selected
from steerscope.core.slot_table import Key
from steerscope.engines.columns import tap_of
from steerscope.engines.detokenizer import Decoder, Detokenizer, StopStrings
from steerscope.engines.packs import Load
from steerscope.engines.plan import Plan
from steerscope.engines.results import Choice, FinishReason, Job, RuleEvent, Timings, TokenEvent, TokenLogprobs
from steerscope.specs.errors import RequestFailed


class RunningText(ABC):
    def __init__(self, job: Job, decoder: Decoder, eos: frozenset[int]) -> None:
        plan = job.plan
        self.job, self.plan = job, plan
        self.name = plan.request_id
        self.prompt_length = len(plan.prompt.token_ids)
        self.history = list(plan.prompt.token_ids)  # prompt and generated ids
        self.over = False  # reported; a sequence ends once
        self.load: Load | None = None  # of its pack, which it waits for
        self.notes = plan.watch.notes(self.prompt_length) if plan.watch else None
        self._eos = frozenset() if plan.sampling.ignore_eos else eos
        self._detokenizer, self._stops = Detokenizer(decoder), StopStrings(plan.sampling.stop)
        # Nobody looks at the text before its end: it is decoded then, at once.
        self._decode = None if job.stream or plan.sampling.stop else decoder.decode
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._born = time.perf_counter()
        self._admitted = self._first = 0.0

    @abstractmethod
    def _release(self) -> None:
        """Give back what it holds in the engine; may be called more than once."""

    @abstractmethod
    def _handle(self) -> CaptureHandle | None:
        """Its rows, if it captured any. Raises RequestFailed when some are missing."""

    @property
    def generated(self) -> list[int]:
        return self.history[self.prompt_length :]

    @property
    def count(self) -> int:
        """How many tokens were generated."""
        return len(self.history) - self.prompt_length

    @property
    @abstractmethod
    def needs_slot(self) -> bool:
        """Whether it needs something of which running requests may have left none."""

    @property
    def waited(self) -> float:
        """Seconds since it reached the engine."""
        return time.perf_counter() - self._born

    def started(self) -> None:
        self._admitted = time.perf_counter()

    @property
    def quiet(self) -> bool:
        """Nobody looks at its tokens before the end."""
        return self._decode is not None

    def accept_all(self, tokens: Sequence[int]) -> FinishReason | None:
        """Take what a quiet one has sampled, at once; the reason if that was the end."""
        if not self._first and tokens:
            self._first = time.perf_counter()
        if not self._eos.isdisjoint(tokens):
            tokens = tokens[: 1 + next(i for i, token in enumerate(tokens) if token in self._eos)]
        kept = self.notes.kept if self.notes else None
        if kept is not None and self.count + len(tokens) >= kept:
            self.history += tokens[: max(0, kept - self.count)]
            return "rule"
        self.history += tokens
        if self.count >= self.plan.sampling.max_tokens:
            return "stop" if tokens and tokens[-1] in self._eos else "length"
        return "stop" if tokens and tokens[-1] in self._eos else None

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> FinishReason | None:
        """Take a sampled token; the reason if it was the last one."""
        self.history.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        count = self.count
        if count == 1:
            self._first = time.perf_counter()
        reason: FinishReason | None = None
        if token in self._eos:
            reason = "stop"
        elif count >= self.plan.sampling.max_tokens:
            reason = "length"
        if self.notes is not None and self.notes.kept is not None and count >= self.notes.kept:
            reason = "rule"
        if self.quiet:
            return reason
        text = self._stops.push(self._detokenizer.push(token))
        if reason and self._stops.found is None:
            text += self._stops.push(self._detokenizer.flush())
        if self._stops.found is not None:
            reason = "stop_string"
        elif reason:
            text += self._stops.flush()
        self._pieces.append(text)
        if self.job.stream:
            self._tell(count - 1, token, text, logprobs)
        return reason

    def _tell(self, index: int, token: int, text: str, logprobs: TokenLogprobs | None) -> None:
        if self.notes is None:
            self.job.report(TokenEvent(self.plan.choice, index, token, text, logprobs=logprobs))
            return
        readings, firings = self.notes.news(self.history)
        for firing in firings:
            self.job.report(RuleEvent(self.plan.choice, firing))
        row = len(self.history) - 2
        here = readings[-1] if len(readings) and readings.positions[-1] == row else None
        self.job.report(TokenEvent(self.plan.choice, index, token, text, here, readings, logprobs))

    def end(self, reason: FinishReason) -> None:
        if self.over:
            return
        try:
            choice = self._choice(reason)
        except Exception as error:  # of this text alone, whatever it is: who waits for it hears of it
            told = f"{self.name} failed: {type(error).__name__}: {error}"
            self.fail(error if isinstance(error, RequestFailed) else RequestFailed(told))
            return
        self.over = True
        self.job.report(choice)

    def _choice(self, reason: FinishReason) -> Choice:
        """All there is to say of it. Raises RequestFailed when something is missing."""
        self._release()
        tokens = self.generated
        if self._decode is not None:
            try:
                self._pieces = [self._decode(tokens)]
            except Exception as error:  # of a tokenizer that does not know an id
                raise RequestFailed(f"{self.name} cannot be decoded: {type(error).__name__}: {error}") from error
        elif reason == "cancelled":
            self._pieces.append(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
        now = time.perf_counter()
        admitted, first = self._admitted or now, self._first or now
        # The last sampled token has no row: what an engine saw beyond that does not belong to this text.
        readings, firings = self.notes.finish(len(self.history) - 1, self.history) if self.notes else ((), ())
        stopped = self.notes.stopped if self.notes and reason == "rule" else None
        return Choice(
            index=self.plan.choice,
            text="".join(self._pieces),
            token_ids=tokens,
            finish_reason=reason,
            stop_string=self._stops.found,
            seed=self.plan.sampling.seed or 0,
            timings=Timings(admitted - self._born, first - self._born, now - self._born),
            capture=self._handle(),
            readings=readings,
            firings=firings,
            rule=stopped.rule if stopped else None,
            logprobs=tuple(self._logprobs),
        )

    def fail(self, error: RequestFailed) -> None:
        if not self.over:
            self.over = True
            self._release()
            self.job.fail(error)


def captured(
    plan: Plan, computed: int, taken: Callable[[], Mapping[Key, torch.Tensor]], history: list[int], model: str
) -> Rows:
    """What was taken of so many rows at each tap, labelled and named as asked."""
    columns = taken()
    assert plan.capture is not None
    index = selected(plan.capture.positions, computed)
    prompt, reduce = plan.prompt, plan.capture.spec.reduce
    labels = make_labels(plan.request_id, index, history, len(prompt.token_ids), prompt.messages, prompt.open_message)
    tensors = {key: columns[tap_of(*key)] for key in plan.capture.asked}
    return Rows(tensors, labels, model, reduce, prompt.messages)
