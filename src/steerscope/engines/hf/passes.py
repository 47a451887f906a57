"""The books of one forward: which flat token belongs to which request and position, which ops it has, where its row
goes. A forward feeds each row a slice of its history, right-aligned in `width` columns; the columns before that are
padding and belong to nobody."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from steerscope.core.slot_table import Key, SlotTable
from steerscope.engines.hf.lenses import Look, looks_of
from steerscope.engines.hf.sequence import Row, TokenSpan
from steerscope.engines.hf.taps import Gather, Pass
from steerscope.specs.errors import RequestFailed

Entry = tuple[int, int, int]  # vector slot, coefficient slot, gate


@dataclass(slots=True)
class Share:
    """A request's part of a gather: rows [start, stop) of its stage are these positions."""

    row: Row
    positions: list[int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.positions)


@dataclass(slots=True)
class Books:
    """One forward in plain numbers: the entries of every token that has ops, and who captures which tokens how."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)
    captures: list[tuple[tuple[Key, ...], bool, list[int]]] = field(default_factory=list)
    shares: list[list[Share]] = field(default_factory=list)  # one list per capture
    looks: list[Look] = field(default_factory=list)  # what lenses read

    @property
    def gathers(self) -> list[tuple[tuple[Key, ...], bool, list[int]]]:
        """All that is staged: captures first."""
        return [*self.captures, *(look.gather for look in self.looks)]


class Passes:
    """Makes the pass of each forward; a step that does what the last one did keeps its tensors."""

    def __init__(self, table: SlotTable, hidden: int, dtype: torch.dtype) -> None:
        self.table, self.hidden, self.dtype = table, hidden, dtype
        self._last: tuple[object, Pass] = (None, Pass())

    def build(self, slices: list[TokenSpan], width: int) -> tuple[Pass, Books]:
        books = keep_books(slices, width)
        books.looks = looks_of(slices, width)
        if width > 1:  # prompts: never the same twice, and too large to keep
            return self._make(books, len(slices) * width), books
        # The entries name slots, so a slot that was rewritten must not be mistaken for the one it was.
        same = (self.table.version, len(slices), books.entries, books.gathers)
        if self._last[0] != same:
            self._last = same, self._make(books, len(slices) * width)
        return self._last[1], books

    def _make(self, books: Books, tokens: int) -> Pass:
        made, device = Pass(), self.table.device
        if books.entries:
            made.steered = _index(list(books.entries), tokens, device)
            made.entries = torch.tensor(list(books.entries.values()), device=device)
        for keys, before, index in books.gathers:
            stage = torch.empty(len(index), len(keys), self.hidden, dtype=self.dtype, device=device)
            made.gathers.append(Gather(keys, before, _index(index, tokens, device), stage))
        return made


def _index(numbers: list[int], tokens: int, device: torch.device) -> torch.Tensor | None:
    """None when it would be all tokens in order."""
    everything = len(numbers) == tokens and numbers == list(range(tokens))
    return None if everything else torch.tensor(numbers, device=device)


def keep_books(slices: list[TokenSpan], width: int) -> Books:
    books = Books()
    most = max((len(one.row.leases) for one in slices), default=0)
    groups: dict[tuple[tuple[Key, ...], bool], list[tuple[int, TokenSpan]]] = defaultdict(list)
    for number, one in enumerate(slices):
        row, start, stop = one.row, one.start, one.stop
        offset = number * width + width - stop  # flat number of position 0
        for k, (column, lease) in enumerate(zip(row.plan.columns, row.leases, strict=True)):
            for a, b in column.positions.within(start, stop):
                for position in range(a, b):
                    entry = books.entries.setdefault(offset + position, [(0, 0, 0)] * most)
                    entry[k] = (lease.vector_slot, lease.coefficient_slot, row.gate(column.gate))
        if row.plan.capture is not None:
            groups[row.plan.capture.keys, row.plan.capture.spec.before_steering].append((offset, one))
    for (keys, before), members in groups.items():
        index: list[int] = []
        shares: list[Share] = []
        for offset, one in members:
            row = one.row
            assert row.plan.capture is not None
            within = row.plan.capture.positions.within(one.start, one.stop)
            positions = [position for a, b in within for position in range(a, b)]
            if positions:
                shares.append(Share(row, positions, len(index)))
                index += [offset + position for position in positions]
        if shares:
            books.captures.append((keys, before, index))
            books.shares.append(shares)
    return books


def deliver(gathers: list[Gather], all_shares: list[list[Share]]) -> int:
    """After the forward: staged rows to the requests' buffers and reducers. Returns how many rows. A request whose rows
    cannot be kept is marked with the reason; the others have theirs."""
    count = 0
    for gather, shares in zip(gathers, all_shares, strict=True):
        rows = _on_host(gather.stage) if any(share.row.buffer for share in shares) else gather.stage
        for share in shares:
            try:
                if share.row.reducer is not None:
                    share.row.reducer.update(share.positions, gather.stage[share.start : share.stop])
                elif share.row.buffer is not None:
                    share.row.buffer.write(share.positions[0], rows[share.start : share.stop])
            except Exception as error:
                share.row.fault = RequestFailed(f"{share.row.name} failed: its rows could not be kept: {error}")
                continue
            count += len(share.positions)
    return count


def _on_host(stage: torch.Tensor) -> torch.Tensor:
    """One copy for all requests; where there is no memory for that, each copies its own part."""
    try:
        return stage.cpu()
    except RuntimeError:
        return stage
