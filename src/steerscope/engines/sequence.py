"""One running text, whatever engine runs it: it takes each sampled token, makes text of them and decides the end."""

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from steerscope.capture.budget import ByteBudget, Reservation
from steerscope.capture.handle import CaptureHandle
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels, selected
from steerscope.core.sites import tap_of
from steerscope.core.slot_table import Key
from steerscope.engines.detokenizer import Decoder, Detokenizer, StopStrings
from steerscope.engines.packs import Load
from steerscope.engines.plan import Facts, Plan
from steerscope.engines.results import Choice, EngineJob, FinishReason, RuleEvent, Timings, TokenEvent, TokenLogprobs
from steerscope.specs.errors import RequestFailed


@dataclass(frozen=True, slots=True)
class TextContext:
    """What the texts of one engine share."""

    facts: Facts
    decoder: Decoder
    eos: frozenset[int]  # tokens that end a text
    budget: ByteBudget
    capture_ttl: float


class RunningText(ABC):
    def __init__(self, job: EngineJob, context: TextContext) -> None:
        plan = job.plan
        self.job = job
        self.plan = plan
        self._shared = context
        self.name = plan.request_id
        self.prompt_length = len(plan.prompt.token_ids)
        self.history = list(plan.prompt.token_ids)  # prompt and generated ids
        self.over = False  # reported; a sequence ends once
        self.load: Load | None = None  # of its pack, which it waits for
        self.notes = plan.watch.notes(self.prompt_length) if plan.watch else None
        self._eos = frozenset() if plan.sampling.ignore_eos else context.eos
        self._detokenizer = Detokenizer(context.decoder)
        self._stops = StopStrings(plan.sampling.stop)
        self.quiet = not (job.stream or plan.sampling.stop)  # its tokens are decoded at its end, at once
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._born = time.perf_counter()
        self._admitted = self._first = 0.0

    @abstractmethod
    def _release(self) -> None:
        """Give back what it holds in the engine; may be called more than once."""

    @abstractmethod
    def _handle(self) -> CaptureHandle | None:
        """Return its rows, if it captured any. Raises RequestFailed when some are missing."""

    def handle_of(
        self, columns: Callable[[], Mapping[Key, torch.Tensor]], computed: int, count: int, held: Reservation
    ) -> CaptureHandle:
        """Return the handle of captured rows: `count` of `computed`, which `columns` makes."""
        shared = self._shared
        load = functools.partial(captured, self.plan, computed, columns, self.history, shared.facts.name)
        return CaptureHandle(self.name, count, load, shared.budget, held, shared.capture_ttl)

    @property
    def generated(self) -> list[int]:
        return self.history[self.prompt_length :]

    @property
    def count(self) -> int:
        """Return the number of generated tokens."""
        return len(self.history) - self.prompt_length

    @property
    @abstractmethod
    def needs_slot(self) -> bool:
        """Return whether it needs something that running requests may have used up."""

    @property
    def waited(self) -> float:
        """Return the seconds since it reached the engine."""
        return time.perf_counter() - self._born

    def started(self) -> None:
        self._admitted = time.perf_counter()

    def accept_all(self, tokens: Sequence[int]) -> FinishReason | None:
        """Take several tokens of a quiet text at once. Return the reason if the text is over."""
        if not self._first and tokens:
            self._first = time.perf_counter()
        if not self._eos.isdisjoint(tokens):
            tokens = tokens[: 1 + next(i for i, token in enumerate(tokens) if token in self._eos)]
        kept = self.notes.kept if self.notes else None
        if kept is not None and self.count + len(tokens) >= kept:
            self.history += tokens[: max(0, kept - self.count)]
            return "rule"
        self.history += tokens
        if tokens and tokens[-1] in self._eos:
            return "stop"
        return "length" if self.count >= self.plan.sampling.max_tokens else None

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> FinishReason | None:
        """Take a sampled token. Return the reason if it was the last one."""
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
        except RequestFailed as error:
            self.fail(error)
            return
        except Exception as error:  # it concerns this text alone
            self.fail(RequestFailed(f"{self.name} failed: {type(error).__name__}: {error}"))
            return
        self.over = True
        self.job.report(choice)

    def _choice(self, reason: FinishReason) -> Choice:
        """Return the finished choice. Raises RequestFailed when something is missing."""
        self._release()
        tokens = self.generated
        if self.quiet:
            try:
                self._pieces = [self._shared.decoder.decode(tokens)]
            except Exception as error:  # of a tokenizer that does not know an id
                raise RequestFailed(f"{self.name} cannot be decoded: {type(error).__name__}: {error}") from error
        elif reason == "cancelled":
            self._pieces.append(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
        now = time.perf_counter()
        admitted = self._admitted or now
        first = self._first or now
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
    """Return captured rows, labelled and named as asked, of a text with `computed` rows. `taken` gives those of each
    tap."""
    columns = taken()
    assert plan.capture is not None
    index = selected(plan.capture.positions, computed)
    prompt = plan.prompt
    reduce = plan.capture.spec.reduce
    labels = make_labels(plan.request_id, index, history, len(prompt.token_ids), prompt.messages, prompt.open_message)
    tensors = {key: columns[tap_of(*key)] for key in plan.capture.asked}
    return Rows(tensors, labels, model, reduce, prompt.messages)
