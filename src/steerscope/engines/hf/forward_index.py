"""What the taps do in one forward: which flat token has which ops, and which rows are staged for which request.

A forward feeds each row a span of its history, right-aligned in `width` columns; the columns before that are padding
and belong to no request.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from steerscope.core.slot_table import Key, SlotTable
from steerscope.engines.hf.sequence import Row, TokenSpan
from steerscope.engines.hf.taps import Gather, Pass
from steerscope.specs.errors import RequestFailed
from steerscope.specs.tokens import Positions

Entry = tuple[int, int, int]  # vector slot, coefficient slot, gate


@dataclass(slots=True)
class RowPart:
    """A request's part of staged rows: rows [start, stop) of the stage are these positions."""

    row: Row
    positions: list[int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.positions)


@dataclass(slots=True)
class StagedRows:
    """Rows that one `Gather` stages, of requests one after the other."""

    keys: tuple[Key, ...]
    before_steering: bool
    tokens: list[int] = field(default_factory=list)  # flat numbers
    parts: list[RowPart] = field(default_factory=list)

    def add(self, span: TokenSpan, first: int, selected: Positions) -> None:
        """Stage the selected rows of a span; `first` is the flat number of position 0."""
        positions = [position for a, b in selected.within(span.start, span.stop) for position in range(a, b)]
        if positions:
            self.parts.append(RowPart(span.row, positions, len(self.tokens)))
            self.tokens += [first + position for position in positions]

    @property
    def layout(self) -> tuple[tuple[Key, ...], bool, list[int]]:
        return self.keys, self.before_steering, self.tokens


@dataclass(slots=True)
class ForwardIndex:
    entries: dict[int, list[Entry]]  # of every token that has ops
    captured: list[StagedRows]
    watched: list[StagedRows]  # each is read by one reader

    @property
    def staged(self) -> list[StagedRows]:
        return [*self.captured, *self.watched]


class PassBuilder:
    """Makes the pass of each forward; a step that does what the last one did keeps its tensors."""

    def __init__(self, table: SlotTable, hidden: int, dtype: torch.dtype) -> None:
        self.table, self.hidden, self.dtype = table, hidden, dtype
        self._last_content: object = None
        self._last = Pass()

    def build(self, spans: list[TokenSpan], width: int) -> tuple[Pass, ForwardIndex]:
        index = index_forward(spans, width)
        if width > 1:  # prompts: never the same twice, and too large to keep
            return self._make(index, len(spans) * width), index
        # The entries name slots, so a slot that was rewritten must not be mistaken for the one it was.
        content = (self.table.version, len(spans), index.entries, [staged.layout for staged in index.staged])
        if self._last_content != content:
            self._last_content = content
            self._last = self._make(index, len(spans) * width)
        return self._last, index

    def _make(self, index: ForwardIndex, n_tokens: int) -> Pass:
        made, device = Pass(), self.table.device
        if index.entries:
            made.steered = _numbers(list(index.entries), n_tokens, device)
            made.entries = torch.tensor(list(index.entries.values()), device=device)
        for staged in index.staged:
            shape = (len(staged.tokens), len(staged.keys), self.hidden)
            stage = torch.empty(shape, dtype=self.dtype, device=device)
            tokens = _numbers(staged.tokens, n_tokens, device)
            made.gathers.append(Gather(staged.keys, staged.before_steering, tokens, stage))
        return made


def _numbers(tokens: list[int], n_tokens: int, device: torch.device) -> torch.Tensor | None:
    """Return flat token numbers for the taps: None stands for all tokens in order."""
    everything = len(tokens) == n_tokens and tokens == list(range(n_tokens))
    return None if everything else torch.tensor(tokens, device=device)


def index_forward(spans: list[TokenSpan], width: int) -> ForwardIndex:
    entries: dict[int, list[Entry]] = {}
    captured: dict[Hashable, StagedRows] = {}
    watched: dict[Hashable, StagedRows] = {}
    n_columns = max((len(span.row.leases) for span in spans), default=0)
    for number, span in enumerate(spans):
        row = span.row
        first = number * width + width - span.stop  # flat number of position 0
        _add_entries(entries, span, first, n_columns)
        capture, watch = row.plan.capture, row.plan.watch
        if capture is not None:
            how = capture.keys, capture.spec.before_steering
            captured.setdefault(how, StagedRows(*how)).add(span, first, capture.positions)
        if watch is not None and row.seat is not None:
            watched.setdefault(row.seat.group, StagedRows((watch.key,), False)).add(span, first, watch.positions)
    return ForwardIndex(
        entries,
        [staged for staged in captured.values() if staged.parts],
        [staged for staged in watched.values() if staged.parts],
    )


def _add_entries(entries: dict[int, list[Entry]], span: TokenSpan, first: int, n_columns: int) -> None:
    row = span.row
    for k, (column, lease) in enumerate(zip(row.plan.columns, row.leases, strict=True)):
        entry = (lease.vector_slot, lease.coefficient_slot, row.gate(column.gate))
        for a, b in column.positions.within(span.start, span.stop):
            for position in range(a, b):
                entries.setdefault(first + position, [(0, 0, 0)] * n_columns)[k] = entry


def deliver(gathers: list[Gather], captured: list[StagedRows]) -> int:
    """Copy staged rows to the requests' buffers and reducers after the forward. Return the number of rows. A request
    whose rows cannot be kept is marked with the reason; the others have theirs."""
    count = 0
    for gather, staged in zip(gathers, captured, strict=True):
        rows = _on_host(gather.stage) if any(part.row.buffer for part in staged.parts) else gather.stage
        for part in staged.parts:
            try:
                if part.row.reducer is not None:
                    part.row.reducer.update(part.positions, gather.stage[part.start : part.stop])
                elif part.row.buffer is not None:
                    part.row.buffer.write(part.positions[0], rows[part.start : part.stop])
            except Exception as error:
                part.row.fault = RequestFailed(f"{part.row.name} failed: its rows could not be kept: {error}")
                continue
            count += len(part.positions)
    return count


def _on_host(stage: torch.Tensor) -> torch.Tensor:
    """Copy rows once for all requests; where there is no memory for that, each request copies its own part."""
    try:
        return stage.cpu()
    except RuntimeError:
        return stage
