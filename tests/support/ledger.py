"""What became of every request and every row, and whether the sums come out."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from steerscope.capture.rows import Rows
from steerscope.engines.results import Generation


@dataclass
class Outcome:
    """One choice as its client saw it, from an engine or from a server."""

    token_ids: list[int]
    reason: str  # finish_reason of the engine
    stop_string: str | None = None
    rule: str | None = None
    logprobs: list[tuple[int, float]] = field(default_factory=list)  # token and its own
    rows: Rows | None = None
    readings: list[tuple[int, list[tuple[str, float]]]] = field(default_factory=list)  # row, concepts and scores
    firings: list[tuple[str, str, int]] = field(default_factory=list)
    streamed: list[int] | None = None  # token ids in the order of the stream

    @classmethod
    def of(cls, done: Generation, fetch: bool = True) -> "list[Outcome]":
        return [
            cls(
                token_ids=choice.token_ids,
                reason=choice.finish_reason,
                stop_string=choice.stop_string,
                rule=choice.rule,
                logprobs=[(one.token_id, one.logprob) for one in choice.logprobs],
                rows=choice.capture.fetch() if choice.capture is not None and fetch else None,
                readings=[(r.position, [(c.id, c.probability) for c in r.concepts]) for r in choice.readings],
                firings=[(f.rule, f.action, f.position) for f in choice.firings],
            )
            for choice in done.choices
        ]


@dataclass
class Ledger:
    sent: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    reserved_bytes: int = 0  # of rows, before a request ran
    delivered_bytes: int = 0  # to clients, as they counted them
    released_bytes: int = 0  # given back without having been delivered
    ends: Counter[str] = field(default_factory=Counter)  # of choices
    kinds: Counter[str] = field(default_factory=Counter)  # of requests
    rows: int = 0  # checked, each at one layer
    tokens: int = 0
    readings: int = 0
    firings: int = 0
    ties: int = 0  # greedy tokens that differ where the two best logits are level
    undecided: int = 0  # requests that differ where a score lies on a rule's threshold
    worst_row: float = 0.0
    worst_logprob: float = 0.0
    worst_score: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What does not come out, beside what single requests had wrong."""
        found = []
        if self.sent != self.finished + self.cancelled + self.refused:
            ended = f"{self.finished} finished + {self.cancelled} cancelled + {self.refused} refused"
            found.append(f"{self.sent} sent, but {ended} ({self.failed} failed)")
        if self.reserved_bytes != self.delivered_bytes + self.released_bytes:
            found.append(
                f"{self.reserved_bytes} bytes reserved, but {self.delivered_bytes} delivered + "
                f"{self.released_bytes} released"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ends": dict(self.ends), "kinds": dict(self.kinds)}
