"""The books of one forward: which flat token belongs to which request and position, which ops it has, where its row
goes. A forward feeds each row its history from `fed` on, right-aligned in `width` columns; the columns before that are
padding and belong to nobody."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from steerscope.engines.hf.sequence import Row
from steerscope.engines.hf.taps import Gather, Pass
from steerscope.residual.table import Key


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
class PassPlan:
    now: Pass = field(default_factory=Pass)
    shares: list[list[Share]] = field(default_factory=list)  # one list per gather


def _fed_now(row: Row) -> tuple[int, int]:
    return row.fed, len(row.history)


def build_pass(rows: list[Row], width: int, hidden: int, model: PreTrainedModel) -> PassPlan:
    plan = PassPlan()
    _steer(plan, rows, width, model.device)
    groups: dict[tuple[tuple[Key, ...], bool], list[tuple[int, Row]]] = defaultdict(list)
    for number, row in enumerate(rows):
        capture = row.plan.capture
        if capture is not None:
            groups[capture.keys, capture.spec.before_steering].append((number, row))
    for (keys, before), members in groups.items():
        index: list[int] = []
        shares: list[Share] = []
        for number, row in members:
            start, stop = _fed_now(row)
            capture = row.plan.capture
            assert capture is not None
            positions = [p for a, b in capture.positions.within(start, stop) for p in range(a, b)]
            if positions:
                shares.append(Share(row, positions, len(index)))
                offset = number * width + width - stop  # flat number of position 0
                index += [offset + position for position in positions]
        if not shares:
            continue
        everything = len(index) == len(rows) * width
        numbers = None if everything else torch.tensor(index, device=model.device)
        stage = torch.empty(len(index), len(keys), hidden, dtype=model.dtype, device=model.device)
        plan.now.gathers.append(Gather(keys, before, numbers, stage))
        plan.shares.append(shares)
    return plan


def _steer(plan: PassPlan, rows: list[Row], width: int, device: torch.device) -> None:
    most = max((len(row.leases) for row in rows), default=0)
    tokens: dict[int, list[tuple[int, int, int]]] = {}
    for number, row in enumerate(rows):
        start, stop = _fed_now(row)
        offset = number * width + width - stop
        for k, (column, lease) in enumerate(zip(row.plan.columns, row.leases, strict=True)):
            for a, b in column.positions.within(start, stop):
                for position in range(a, b):
                    entry = tokens.setdefault(offset + position, [(0, 0, 0)] * most)
                    entry[k] = (lease.vector_slot, lease.coefficient_slot, column.gate)
    if tokens:
        plan.now.steered = torch.tensor(list(tokens), device=device)
        plan.now.entries = torch.tensor(list(tokens.values()), device=device)


def deliver(plan: PassPlan) -> int:
    """After the forward: staged rows to the requests' buffers and reducers. Returns how many rows."""
    count = 0
    for gather, shares in zip(plan.now.gathers, plan.shares, strict=True):
        on_host = gather.stage.cpu() if any(share.row.buffer for share in shares) else gather.stage
        for share in shares:
            if share.row.reducer is not None:
                share.row.reducer.update(share.positions, gather.stage[share.start : share.stop])
            elif share.row.buffer is not None:
                share.row.buffer.write(share.positions[0], on_host[share.start : share.stop])
            count += len(share.positions)
    return count
