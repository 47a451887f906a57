"""What the taps do in one forward: which flat token has which ops, and which rows are staged for which request.

A forward feeds each row a span of its history, right-aligned in `width` columns; the columns before that are padding
and belong to no request. Tokens are addressed in the flattened batch [rows × tokens].
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steerscope.core.equation import Operands, look_up, settle
from steerscope.core.rows import Reducer, RowBuffer
from steerscope.core.slot_table import Key, SlotTable
from steerscope.engines.hf.sequence import Row, TokenSpan
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
class Gather:
    """Rows of requests that want the same keys in the same way, one after the other, staged for one forward."""

    keys: tuple[Key, ...]
    before_steering: bool = False
    tokens: list[int] = field(default_factory=list)  # flat numbers
    parts: list[RowPart] = field(default_factory=list)
    index: Tensor | None = None  # the tokens, None for all of them
    stage: Tensor = field(init=False)  # [tokens, keys, hidden]
    column: dict[Key, int] = field(init=False)

    def __post_init__(self) -> None:
        self.column = {key: j for j, key in enumerate(self.keys)}

    def add(self, span: TokenSpan, first: int, selected: Positions) -> None:
        """Stage the selected rows of a span; `first` is the flat number of position 0."""
        positions = [position for a, b in selected.within(span.start, span.stop) for position in range(a, b)]
        if positions:
            self.parts.append(RowPart(span.row, positions, len(self.tokens)))
            self.tokens += [first + position for position in positions]

    def allocate(self, n_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.stage = torch.empty(len(self.tokens), len(self.keys), hidden, dtype=dtype, device=device)
        self.index = _numbers(self.tokens, n_tokens, device)

    def take(self, key: Key, flat: Tensor) -> None:
        self.stage[:, self.column[key]] = flat if self.index is None else flat.index_select(0, self.index)


@dataclass(slots=True)
class SteeredTokens:
    """The tokens that have ops, and the operands of these. A batch that goes on unchanged uses the same ones again."""

    index: Tensor | None = None  # flat numbers, None for all tokens
    entries: Tensor | None = None  # [n, K, 3]
    columns: dict[Key, list[Operands]] = field(default_factory=dict)  # looked up at the first visit

    def at(self, key: Key, table: SlotTable) -> list[Operands]:
        if key not in self.columns and self.entries is not None:
            self.columns[key] = [settle(column) for column in look_up(*table.tensors(key), self.entries)]
        return self.columns[key]


@dataclass(slots=True)
class Pass:
    """What one forward must do at the taps."""

    captured: list[Gather] = field(default_factory=list)
    watched: list[Gather] = field(default_factory=list)  # each is read by one reader
    entries: dict[int, list[Entry]] = field(default_factory=dict)  # of every token that has ops
    steered: SteeredTokens | None = None  # the same on the device

    def take(self, key: Key, before_steering: bool, rows: Tensor, rest: Tensor | None) -> None:
        """Stage the rows of a tap, `rest` being the part of the stream that is not in them."""
        for gather in (*self.captured, *self.watched):
            if gather.before_steering is before_steering and key in gather.column:
                gather.take(key, rows if rest is None else rows + rest)


class PassBuilder:
    """Makes the pass of each forward."""

    def __init__(self, table: SlotTable, hidden: int, dtype: torch.dtype) -> None:
        self.table = table
        self.hidden = hidden
        self.dtype = dtype
        self._last_content: object = None
        self._last = SteeredTokens()

    def build(self, spans: Sequence[TokenSpan], width: int) -> Pass:
        now = index_forward(spans, width)
        device = self.table.device
        n_tokens = len(spans) * width
        for gather in (*now.captured, *now.watched):
            gather.allocate(n_tokens, self.hidden, self.dtype, device)
        if not now.entries:
            return now
        # The entries name slots, so a slot that was rewritten must not be mistaken for the one it was.
        content = (self.table.version, n_tokens, now.entries)
        if content == self._last_content:
            now.steered = self._last
            return now
        entries = torch.tensor(list(now.entries.values()), device=device)
        now.steered = SteeredTokens(_numbers(list(now.entries), n_tokens, device), entries)
        if width == 1:  # prompts are never the same twice, and too large to keep
            self._last_content = content
            self._last = now.steered
        return now


def _numbers(tokens: list[int], n_tokens: int, device: torch.device) -> Tensor | None:
    """Return flat token numbers for the taps: None stands for all tokens in order."""
    everything = len(tokens) == n_tokens and tokens == list(range(n_tokens))
    return None if everything else torch.tensor(tokens, device=device)


def index_forward(spans: Sequence[TokenSpan], width: int) -> Pass:
    entries: dict[int, list[Entry]] = {}
    captured: dict[Hashable, Gather] = {}
    watched: dict[Hashable, Gather] = {}
    n_columns = max((len(span.row.leases) for span in spans), default=0)
    for number, span in enumerate(spans):
        row = span.row
        first = number * width + width - span.stop  # flat number of position 0
        _add_entries(entries, span, first, n_columns)
        capture = row.plan.capture
        watch = row.plan.watch
        if capture is not None:
            how = capture.keys, capture.spec.before_steering
            captured.setdefault(how, Gather(*how)).add(span, first, capture.positions)
        if watch is not None and row.seat is not None:
            watched.setdefault(row.seat.group, Gather((watch.key,))).add(span, first, watch.positions)
    staged = ([gather for gather in found.values() if gather.parts] for found in (captured, watched))
    return Pass(*staged, entries=entries)


def _add_entries(entries: dict[int, list[Entry]], span: TokenSpan, first: int, n_columns: int) -> None:
    row = span.row
    for k, (column, lease) in enumerate(zip(row.plan.columns, row.leases, strict=True)):
        entry = (lease.vector_slot, lease.coefficient_slot, row.gate(column.gate))
        for a, b in column.positions.within(span.start, span.stop):
            for position in range(a, b):
                entries.setdefault(first + position, [(0, 0, 0)] * n_columns)[k] = entry


def deliver(captured: Sequence[Gather]) -> None:
    """Copy staged rows to the requests' buffers and reducers after the forward. A request whose rows cannot be kept is
    marked with the reason; the others have theirs."""
    for gather in captured:
        buffered = any(isinstance(part.row.kept, RowBuffer) for part in gather.parts)
        rows = _on_host(gather.stage) if buffered else gather.stage
        for part in gather.parts:
            kept = part.row.kept
            try:
                if isinstance(kept, Reducer):
                    kept.update(part.positions, gather.stage[part.start : part.stop])
                elif kept is not None:
                    kept.write(part.positions[0], rows[part.start : part.stop])
            except Exception as error:
                part.row.fault = RequestFailed(f"{part.row.name} failed: its rows could not be kept: {error}")


def _on_host(stage: Tensor) -> Tensor:
    """Copy rows once for all requests; where there is no memory for that, each request copies its own part."""
    try:
        return stage.cpu()
    except RuntimeError:
        return stage
