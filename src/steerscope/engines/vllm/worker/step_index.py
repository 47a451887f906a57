"""The step index: what each token of a step must do.

Before every forward the scheduler's numbers (which requests run, how many tokens, from which position) become one row
of integers per token: the cell of its captured row, its capture group and its ops. Rows of untracked tokens are zero.
Pure numpy; the work grows with the number of tracked requests, not with the batch.

Rows of a decoding request lie side by side in a page, so a repeated step costs one comparison and a few sums
(`decode_fast_path`). Pages are flushed when they are full.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from steerscope.engines.vllm.settings import PAGE
from steerscope.engines.vllm.worker.decode_fast_path import NEVER, DecodeFastPath, StepPlan
from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, FLAG, GROUP, STRIDE
from steerscope.engines.vllm.worker.requests import (
    Page,
    RowSlice,
    TrackedRequest,
    WatchedRows,
    make_slice,
    slice_of_page,
)
from steerscope.specs.errors import CapacityExceeded

_FEW_REQUESTS = 4
_MAX_TRIES = 4  # to find room for a step
_LINE = 16  # integers: an index row fills whole cache lines

ReserveCells = Callable[[int], int]  # returns the first of n adjacent cells; may close every page to make room
FlushRows = Callable[[list[RowSlice]], None]


@dataclass(slots=True)
class _BatchPart:
    """Tokens of one tracked request in a batch."""

    request: TrackedRequest
    number: int  # of the request in the batch
    first: int  # token in the batch
    position: int
    count: int  # tokens

    def token_of(self, position: int) -> int:
        return self.first + position - self.position


@dataclass(slots=True)
class _StepRows:
    """Rows of a step that are captured or read."""

    prompts: list[tuple[TrackedRequest, int, int, int]] = field(default_factory=list)  # request, token, start, stop
    decoded: list[tuple[TrackedRequest, int, int]] = field(default_factory=list)  # request, token, position
    watched: list[tuple[TrackedRequest, int, int, int]] = field(default_factory=list)  # request, token, start, stop


class StepIndex:
    def __init__(self, n_tokens: int, n_columns: int, page_rows: int = PAGE, shared_rows: int = 0) -> None:
        """Make an index for steps of up to `n_tokens`. Pages have `page_rows` rows, or up to PAGE while the pages of
        all tracked requests together have at most `shared_rows`."""
        self.columns = n_columns
        self._page_rows = page_rows
        self._shared_rows = shared_rows
        width = -(-(ENTRIES + 3 * n_columns) // _LINE) * _LINE
        self.index = np.zeros((n_tokens, width), dtype=np.int32)
        self.requests: dict[str, TrackedRequest] = {}
        self._dirty = 0  # index rows [0, dirty) may be non-zero
        self._fast: DecodeFastPath | None = None
        self.proving = False  # a dummy batch runs with the index as it is
        self.resting = False  # no tracked request has work left

    @property
    def page(self) -> int:
        """Return the rows of a page that is opened now: a small part of the pool, also with few requests."""
        return max(self._page_rows, min(PAGE, self._shared_rows // max(_FEW_REQUESTS, len(self.requests))))

    def plan(
        self,
        names: Sequence[str],
        starts: np.ndarray,
        computed: np.ndarray,
        reserve: ReserveCells,
        flush: FlushRows,
    ) -> StepPlan:
        """Write the index for a step in which request i computes tokens [starts[i], starts[i+1]) of the batch, from
        position computed[i] on, and return the plan. `flush` takes rows of earlier steps."""
        if self._fast is not None and self._fast.matches(names, starts, computed):
            repeated = self._repeat(self._fast, reserve)
            if repeated is not None:
                return repeated
        self.clear()
        plan = StepPlan()
        rows = _StepRows()
        parts = list[_BatchPart]()
        for number, name in enumerate(names):
            request = self.requests.get(name)
            if request is not None:
                first = int(starts[number])
                stop = int(starts[number + 1])
                part = _BatchPart(request, number, first, int(computed[number]), stop - first)
                parts.append(part)
                self._dirty = plan.tokens = stop
                self._plan_request(part, plan, rows, flush)
        self._place_rows(rows, plan, reserve)
        plan.keeps = bool(rows.prompts or rows.decoded or rows.watched)
        self._fast = self._fast_path_after(list(names), parts, starts, computed, plan)
        self.resting = len(parts) == len(self.requests) and self._fast is not None and not self._fast.has_work()
        return plan

    def admit(self, name: str, request: TrackedRequest) -> None:
        """Track a request, which may have computed tokens before."""
        self.leave_fast_path()
        self.requests[name], self.resting = request, False

    def forget(self, name: str) -> tuple[TrackedRequest | None, list[RowSlice]]:
        """Stop tracking a request; return it and the rows of its open page."""
        request = self.requests.get(name)
        if request is None:
            return None, []
        self.leave_fast_path()
        del self.requests[name]
        return request, self.close_page(request)

    def by_client_name(self, names: Container[str]) -> list[tuple[str, TrackedRequest]]:
        """Return requests by the names that their clients gave them."""
        return [(key, request) for key, request in self.requests.items() if request.wire.name in names]

    @property
    def clean(self) -> bool:
        """Return whether the index is zero for every token."""
        return self._dirty == 0

    def clear(self) -> None:
        self.leave_fast_path()
        self.index[: self._dirty] = 0
        self._dirty = 0

    def close_page(self, request: TrackedRequest) -> list[RowSlice]:
        """Return the rows of a request's open page, if it has one; no more are added to it."""
        if self._fast is not None and request.page is not None:
            self.leave_fast_path()
        page = request.page
        request.page = None
        return [] if page is None else [slice_of_page(request, page, page.count)]

    # --- one request of a step

    def _plan_request(self, part: _BatchPart, plan: StepPlan, rows: _StepRows, flush: FlushRows) -> None:
        request = part.request
        stop = part.position + part.count
        was_fine = not request.failed
        recomputed = part.position < request.next_position
        plan.recomputed += recomputed
        page = request.page
        if page is not None and (part.count > 1 or page.start + page.count != part.position):
            flush(self.close_page(request))
        request.next_position = max(request.next_position, stop)
        # A failed request is steered too: its keys and values are cached under the salt of its steering.
        if request.steers and self._write_ops(part, recomputed):
            plan.columns = max(plan.columns, len(request.wire.columns))
        if request.group and not request.failed:
            for start, end in request.rows_to_capture(part.position, stop):
                if part.count == 1:
                    rows.decoded.append((request, part.first, start))
                else:
                    rows.prompts.append((request, part.token_of(start), start, end))
        if request.watched is not None and not request.failed:
            for start, end in request.rows_to_read(part.position, stop):
                rows.watched.append((request, part.token_of(start), start, end))
        if request.failed and was_fine:
            plan.failed.append(request)

    def _write_ops(self, part: _BatchPart, recomputed: bool) -> bool:
        """Write the ops of a request's tokens; return whether there are any. Recomputed tokens are steered as they were
        the first time."""
        steered = False
        request = part.request
        for k, lease in enumerate(request.leases):
            gate, positions = request.gated(k, recomputed)
            for start, end in positions.within(part.position, part.position + part.count):
                tokens = slice(part.token_of(start), part.token_of(end))
                self.index[tokens, FLAG] = request.flag
                entry = (lease.vector_slot, lease.coefficient_slot, gate)
                self.index[tokens, ENTRIES + 3 * k : ENTRIES + 3 * k + 3] = entry
                steered = True
        return steered

    # --- where rows go

    def _place_rows(self, rows: _StepRows, plan: StepPlan, reserve: ReserveCells) -> None:
        n_cells = sum((stop - start) * request.width for request, _, start, stop in rows.prompts)
        cell = self._reserve_all(rows.decoded, n_cells, reserve)
        for request, token, start, stop in rows.prompts:
            behind = cell + (stop - start) * request.width
            plan.slices.append(make_slice(request, start, stop, cell, behind - cell))
            tokens = slice(token, token + stop - start)
            self.index[tokens, CELL] = np.arange(cell, behind, request.width)
            self.index[tokens, GROUP] = request.group
            cell = behind
        for request, token, _ in rows.decoded:
            cell = self._add_to_page(request, plan)
            self.index[token, CELL : STRIDE + 1] = cell, request.group, request.width
        for request, token, start, stop in rows.watched:
            self._write_watch_group(request, token, stop - start)
        if rows.watched:
            plan.watched_rows = WatchedRows(rows.watched)

    def _write_watch_group(self, request: TrackedRequest, token: int, count: int) -> None:
        """Write the group of watched tokens, after that of captures: a token has one group."""
        assert request.watched is not None
        group = self.index[token : token + count, GROUP]
        group[:] = np.where(group == 0, request.watched.read_group, request.watched.both_group)

    def _reserve_all(self, decoded: list[tuple[TrackedRequest, int, int]], n_cells: int, reserve: ReserveCells) -> int:
        """Open a page for every decoding request without one; return the first of `n_cells` cells for prompts.

        `reserve` may close pages to make room and flush their rows, so rows of this step are only added once every
        page is there."""
        cell: int | None = None
        for _ in range(_MAX_TRIES):
            for request, _, position in decoded:
                if request.page is None:
                    size = min(self.page, request.capture.most - position)
                    request.page = Page(reserve(size * request.width), position, size)
            if cell is None and n_cells:
                cell = reserve(n_cells)
            if all(request.page is not None for request, *_ in decoded):
                return cell or 0
        raise CapacityExceeded("the rows of one step do not fit the pool")

    def _add_to_page(self, request: TrackedRequest, plan: StepPlan) -> int:
        """Return the cell of one more row; flush the page when it is full."""
        page = request.page
        assert page is not None
        page.count += 1
        if page.count == page.size:
            plan.slices += self.close_page(request)
        return page.cell + (page.count - 1) * request.width

    # --- repeated decoding steps

    def _fast_path_after(
        self, names: list[str], parts: list[_BatchPart], starts: np.ndarray, computed: np.ndarray, plan: StepPlan
    ) -> DecodeFastPath | None:
        """Return the fast path for steps in which every tracked request computes one more token; None where the next
        step may differ in more than that."""
        if not parts or plan.recomputed:  # recomputed rows have ops of their own
            return None
        if any(part.count != 1 or part.request.failed or not part.request.stays_equal(part.position)
               for part in parts):  # fmt: skip
            return None
        requests = [part.request for part in parts]
        batch_row = np.array([part.number for part in parts])
        width = [part.request.width if part.request.captures(part.position) else 0 for part in parts]
        pages = [request.page for request in requests]
        capturing = any(width)
        repeated = StepPlan(
            plan.tokens, watched_rows=plan.watched_rows, columns=plan.columns, keeps=plan.keeps, same=not capturing,
            advance=capturing,
        )  # fmt: skip
        fast = DecodeFastPath(
            names=names,
            requests=requests,
            batch_row=batch_row,
            token=starts[batch_row].astype(np.int64),
            first=computed[batch_row].astype(np.int64) + 1,
            width=np.array(width),
            cell=np.array([page.cell + page.count * w if page else 0 for page, w in zip(pages, width, strict=True)]),
            room=np.array([0 if page is None else page.size - page.count for page in pages]),
            most=np.array([part.request.capture.most if w else NEVER for part, w in zip(parts, width, strict=True)]),
            plan=repeated,
            all_tracked=len(parts) == len(names),
            only_decodes=int(starts[len(names)]) == len(names),
        )
        if capturing:
            fast.left = int(fast.room[fast.width > 0].min())
        return fast

    def _repeat(self, fast: DecodeFastPath, reserve: ReserveCells) -> StepPlan | None:
        """Plan the last step again, one token later; None if its rows no longer fit the open pages."""
        if fast.plan.same or fast.left > 1:
            if fast.plan.watched_rows is not None:
                fast.plan.watched_rows.offset += 1
            fast.steps += 1
            fast.lag += 1
            fast.left -= 1
            return fast.plan
        plan = replace(fast.plan, slices=[])
        fast.catch_up()
        if fast.left == 0:
            if not self._open_pages(fast, reserve):
                return None
            self.index[fast.token, CELL] = fast.cell
            plan.advance = False
        fast.add_row()
        if plan.watched_rows is not None:
            plan.watched_rows.offset += 1
        for i in np.flatnonzero((fast.room == 0) & (fast.width > 0)):
            request = fast.requests[i]
            page = request.page
            request.page = None
            assert page is not None
            plan.slices.append(slice_of_page(request, page, page.size))
        return plan

    def _open_pages(self, fast: DecodeFastPath, reserve: ReserveCells) -> bool:
        """Open a page for every request whose last one is full; return False when the fast path has ended."""
        positions = fast.position
        if not (positions < fast.most).all():
            return False
        for i in np.flatnonzero((fast.room == 0) & (fast.width > 0)):
            request = fast.requests[i]
            position = int(positions[i])
            size = min(self.page, int(fast.most[i]) - position)
            request.page = Page(reserve(size * request.width), position, size)
            fast.cell[i], fast.room[i] = request.page.cell, size
            if self._fast is not fast:  # `reserve` closed every page to make room
                return False
        return True

    def leave_fast_path(self) -> None:
        """Write what the arrays of the fast path hold back to the requests."""
        fast = self._fast
        self._fast = None
        if fast is None:
            return
        fast.catch_up()
        arrays = fast.position.tolist(), fast.width.tolist(), fast.room.tolist()
        for request, position, width, room in zip(fast.requests, *arrays, strict=True):
            request.next_position = max(request.next_position, position)
            if request.watched is not None:
                request.watched.advance(position)
            if width:
                request.seen = max(request.seen, request.capture.positions.count(position))
                if request.page is not None:
                    request.page.count = request.page.size - room
