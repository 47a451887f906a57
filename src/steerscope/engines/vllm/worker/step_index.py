"""The books of the vLLM engine: who asked for what, and what each token of a step must do.

Before every forward the scheduler's own numbers (which requests run, how many tokens, from which position) are turned
into one row of integers per token: where its captured rows go, which group of taps captures it, and its ops. Rows of
tokens nobody claims are zero. Pure numpy, and work only for requests that asked for something.

While requests decode, a step differs from the last one only in where its rows go, and these lie in pages: rows of one
request side by side. Such a step is a comparison and a few sums, whatever the number of requests. Now and then, and
just before a text is as long as it may become, what pages hold is sent.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

import numpy as np

from steerscope.engines.vllm.cuda.prefill_sums import Prompts, Taken
from steerscope.engines.vllm.settings import PAGE
from steerscope.engines.vllm.wire import WireColumn
from steerscope.engines.vllm.worker.decode_fast_path import NEVER, Filled, Steady
from steerscope.engines.vllm.worker.requests import Asker, Looks, Page, Slice, rest_of, sliced
from steerscope.specs.errors import CapacityExceeded
from steerscope.specs.tokens import Interval, Positions

# Columns of the index: the asker's number, the first cell, the group, how many cells further the next row of a decoding
# request lies, and the ops, three numbers each.
ASKER, CELL, GROUP, STRIDE, ENTRIES = range(5)
LAID = 1 << 30  # added to the asker's number: what its ops add lies ready (on a GPU, `laying`)
# Rows leave pages that are not full every so many steps, in a few steps that follow each other: to send those of all
# requests at once would hold up the next step, and to send few at a time takes the host longer.
_PERIOD, _TURNS = 64, 4
_FEW = 4  # askers
_TRIES = 4  # of finding room for a step
_LINE = 16  # an index row fills whole cache lines


class Books:
    def __init__(self, tokens: int, columns: int, page: int = PAGE, shared: int = 0) -> None:
        """Pages have `page` rows, or up to PAGE if those of everybody who asks are no more than `shared` rows."""
        self.columns, self._page, self._shared = columns, page, shared
        width = -(-(ENTRIES + 3 * columns) // _LINE) * _LINE
        self.index = np.zeros((tokens, width), dtype=np.int32)
        self.askers: dict[str, Asker] = {}
        self._dirty = 0  # index rows [0, dirty) may be non-zero
        self._steady: Steady | None = None
        self.proving = False  # a dummy batch is to do what the index says
        self.resting = False  # those who asked have all they wanted

    @property
    def page(self) -> int:
        """Rows of one that is opened now: a small part of the pool, also when few ask."""
        return max(self._page, min(PAGE, self._shared // max(_FEW, len(self.askers))))

    def fill(
        self,
        requests: Sequence[str],
        starts: np.ndarray,
        computed: np.ndarray,
        reserve: Callable[[int], int],
        bring_out: Callable[[list[Slice]], None],
        span: int = 0,
    ) -> Filled:
        """Write the index for a step in which request i feeds tokens [starts[i], starts[i+1]) of the batch, beginning
        at its absolute position computed[i]. `reserve(cells)` gives the first cell of so many in a row, and may close
        every page to make room; `bring_out` takes rows of earlier steps; with `span`, see `summing.Prompts`."""
        if self._steady is not None and self._steady.fits(requests, starts, computed):
            again = self._repeat(self._steady, reserve)
            if again is not None:
                return again
        self.settle()
        filled = Filled()
        self.clear()
        here: list[tuple[int, Asker]] = []
        taken: list[Taken] = []  # of prompts
        rows: list[tuple[Asker, int, int, int]] = []  # who, batch token, positions; of those who feed one token
        looks: list[tuple[Asker, int, int, int]] = []  # the same, of those who are watched
        for i, name in enumerate(requests):
            asker = self.askers.get(name)
            if asker is None:
                continue
            here.append((i, asker))
            first, last, at = int(starts[i]), int(starts[i + 1]), int(computed[i])
            self._dirty = filled.tokens = last
            before, fine = at < asker.reached, not asker.failed
            filled.recomputed += before
            if asker.page is not None and (last - first > 1 or asker.page.start + asker.page.count != at):
                bring_out(self.close(asker))
            asker.reached = max(asker.reached, at + last - first)
            # Also when its rows are void: its keys and values are cached under the salt of its steering.
            if asker.steers and self._steer(asker, first, at, at + last - first, before):
                filled.columns = max(filled.columns, len(asker.wire.columns))
            if asker.group and asker.wire.capture and not asker.failed:
                found = [(asker, first + a - at, a, b) for a, b in _captured(asker, at, at + last - first)]
                if last - first == 1:
                    rows += found
                else:
                    taken += [Taken(*one, again=before) for one in found]
            if asker.watched is not None and not asker.failed:
                looks += [(asker, first + a - at, a, b) for a, b in _read(asker, at, at + last - first)]
            if asker.failed and fine:
                filled.failed.append(asker)
        prompts = Prompts(taken, 0 if filled.columns else span)
        filled.slices += prompts.place(self._make_room(rows, prompts.cells, reserve), self.index, CELL, GROUP)
        filled.runs, filled.summed = prompts.runs(filled.tokens), prompts.summed
        period = self._period
        for i, (asker, token, _, _) in enumerate(rows):
            cell = self._page_row(asker, i % _TURNS, period, filled)
            self.index[token, CELL : STRIDE + 1] = cell, asker.group, asker.width
        if looks:
            filled.looks = Looks(looks)
            for asker, token, a, b in looks:
                self._watch(asker, token, b - a)
        filled.steers, filled.keeps = filled.columns > 0, bool(taken or rows or looks)
        filled.busy = filled.steers or filled.keeps
        self._steady = self._begin(list(requests), here, starts, computed, filled)
        self.resting = len(here) == len(self.askers) and self._steady is not None and not self._steady.wanted()
        return filled

    def admit(self, name: str, asker: Asker) -> None:
        """It may have fed tokens before, of which it asked for nothing."""
        self.settle()  # steps that repeat know who asks
        self.askers[name], self.resting = asker, False

    def _watch(self, asker: Asker, token: int, count: int) -> None:
        """After captures: a token has one group."""
        assert asker.watched is not None
        group = self.index[token : token + count, GROUP]
        group[:] = np.where(group == 0, asker.watched.alone, asker.watched.both)

    def _make_room(self, rows: list[tuple[Asker, int, int, int]], total: int, reserve: Callable[[int], int]) -> int:
        """A page for everybody who feeds one token, and the first of so many cells. Nothing counts before all have
        theirs: whoever closes pages to make room must find rows of earlier steps in them, and no others."""
        cell: int | None = None
        for _ in range(_TRIES):
            for asker, _, position, _ in rows:
                if asker.page is None:
                    assert asker.wire.capture is not None
                    size = min(self.page, asker.wire.capture.most - position)
                    asker.page = Page(reserve(size * asker.width), position, size)
            if cell is None and total:
                cell = reserve(total)
            if all(asker.page is not None for asker, *_ in rows):
                return cell or 0
        raise CapacityExceeded("the rows of one step do not fit the pool")

    def _page_row(self, asker: Asker, turn: int, period: int, filled: Filled) -> int:
        """The cell of one more row; a page that is full with it is complete."""
        page = asker.page
        assert page is not None
        assert asker.wire.capture is not None
        page.count += 1
        if page.count == page.size:
            filled.slices += self.close(asker)
        elif not (more := asker.wire.capture.most - page.start - page.count - 1) or (more - turn) % period == 0:
            filled.slices += self._part(asker, page.count)
        return page.cell + (page.count - 1) * asker.width

    @property
    def _period(self) -> int:
        """Counted from a text's last row, so that few others have to leave with that one."""
        return _PERIOD if self.page > _PERIOD else NEVER

    def _part(self, asker: Asker, count: int) -> list[Slice]:
        """What a page of so many rows holds and was not sent. Reductions take rows in all at once."""
        page, capture = asker.page, asker.wire.capture
        assert page is not None
        if capture is None or capture.reduce is not None or page.sent == count:
            return []
        first, page.sent = page.sent, count
        return [sliced(asker, page.start + first, page.start + count, page.cell + first * asker.width, 0)]

    def close(self, asker: Asker) -> list[Slice]:
        """The rows of its open page, if it has one (there may be none yet); no more will join them."""
        if self._steady is not None and asker.page is not None:
            self.settle()
        page, asker.page = asker.page, None
        return [] if page is None else [rest_of(asker, page, page.count)]

    def _steer(self, asker: Asker, first: int, at: int, stop: int, again: bool) -> bool:
        """Whether any of these tokens is steered. What is computed again is steered as it was the first time."""
        some = False
        for k, (column, lease) in enumerate(zip(asker.wire.columns, asker.leases, strict=True)):
            gate, positions = _switched(asker, k, column, again)
            for a, b in positions.within(at, stop):
                where = slice(first + a - at, first + b - at)
                self.index[where, ASKER] = asker.number
                entry = (lease.vector_slot, lease.coefficient_slot, gate)
                self.index[where, ENTRIES + 3 * k : ENTRIES + 3 * k + 3] = entry
                some = True
        return some

    # --- steps that repeat

    def _begin(
        self, names: list[str], here: list[tuple[int, Asker]], starts: np.ndarray, computed: np.ndarray, filled: Filled
    ) -> Steady | None:
        """What the next steps look like if everybody who asks goes on with one token each; None if not so."""
        for i, asker in here:
            at = int(computed[i])
            if starts[i + 1] - starts[i] != 1 or asker.failed or not _lasts(asker, at):
                return None
        if not here or filled.recomputed:  # a row that comes again has entries of its own
            return None
        request = np.array([i for i, _ in here])
        askers = [asker for _, asker in here]
        rows = [asker.width if asker.group and asker.wire.capture and _captures(asker, int(computed[i])) else 0
                for i, asker in here]  # fmt: skip
        pages = [asker.page for asker in askers]
        capturing = any(rows)
        again = Filled(
            filled.tokens,
            looks=filled.looks,
            columns=filled.columns,
            steers=filled.steers,
            keeps=filled.keeps,
            busy=filled.busy,
            same=not capturing,
            advance=capturing,
        )
        made = Steady(
            names=names,
            askers=askers,
            request=request,
            token=starts[request].astype(np.int64),
            first=computed[request].astype(np.int64) + 1,
            width=np.array(rows),
            cell=np.array([page.cell + page.count * w if page else 0 for page, w in zip(pages, rows, strict=True)]),
            room=np.array([0 if page is None else page.size - page.count for page in pages]),
            most=np.array([asker.wire.capture.most if w and asker.wire.capture else NEVER
                           for asker, w in zip(askers, rows, strict=True)]),
            filled=again,
            everybody=len(here) == len(names),
            alone=int(starts[len(names)]) == len(names),
            turn=np.arange(len(askers)) % _TURNS,
        )  # fmt: skip
        if capturing:
            made.left = int(made.room[made.width > 0].min())
            made.due = made.next_due(self._period)
        return made

    def _repeat(self, now: Steady, reserve: Callable[[int], int]) -> Filled | None:
        if now.filled.same or now.left > 1:
            if now.filled.looks is not None:
                now.filled.looks.moved += 1
            now.steps += 1
            now.lag += 1
            now.left -= 1
            now.due -= 1
            if now.filled.same or now.due:
                return now.filled
            return replace(now.filled, slices=self._parts(now))
        again = replace(now.filled, slices=[])
        now.catch_up()
        if now.left == 0:
            if not self._turn_pages(now, reserve):
                return None
            self.index[now.token, CELL] = now.cell
            again.advance = False
        now.count()
        if again.looks is not None:
            again.looks.moved += 1
        for i in np.flatnonzero((now.room == 0) & (now.width > 0)):
            asker = now.askers[i]
            assert asker.page is not None
            page, asker.page = asker.page, None
            again.slices.append(rest_of(asker, page, page.size))
        now.due -= 1
        if not now.due:
            again.slices += self._parts(now)
        return again

    def _parts(self, now: Steady) -> list[Slice]:
        """What pages that are not full hold with this step, and is to leave."""
        found: list[Slice] = []
        left = now.left_behind
        for i in np.flatnonzero((left >= 0) & (left % self._period == 0)):
            if now.width[i] and (page := now.askers[i].page) is not None:
                found += self._part(now.askers[i], page.size - int(now.room[i]) + now.lag)
        now.due = now.next_due(self._period)
        return found

    def _turn_pages(self, now: Steady, reserve: Callable[[int], int]) -> bool:
        """A new page for everybody whose last one is full; False when these steps do not go on."""
        positions = now.position
        if not (positions < now.most).all():
            return False
        for i in np.flatnonzero((now.room == 0) & (now.width > 0)):
            asker, position = now.askers[i], int(positions[i])
            size = min(self.page, int(now.most[i]) - position)
            asker.page = Page(reserve(size * asker.width), position, size)
            now.cell[i], now.room[i] = asker.page.cell, size
            if self._steady is not now:  # there was no room, and all pages were closed to make some
                return False
        return True

    def settle(self) -> None:
        """Write back to the askers what the arrays know."""
        now, self._steady = self._steady, None
        if now is None:
            return
        now.catch_up()
        arrays = now.position.tolist(), now.width.tolist(), now.room.tolist()
        for asker, position, width, room in zip(now.askers, *arrays, strict=True):
            asker.reached = max(asker.reached, position)
            if asker.watched is not None and asker.wire.watch is not None:
                asker.watched.reach(asker.wire.watch.positions.count(position), position)
            if not width or asker.wire.capture is None:
                continue
            asker.seen = max(asker.seen, asker.wire.capture.positions.count(position))
            if asker.page is not None:
                asker.page.count = asker.page.size - room

    def forget(self, name: str) -> tuple[Asker | None, list[Slice]]:
        """The request is over: who it was, and the rows of its open page."""
        asker = self.askers.get(name)
        if asker is None:
            return None, []
        self.settle()
        del self.askers[name]
        return asker, self.close(asker)

    def called(self, names: Container[str]) -> list[tuple[str, Asker]]:
        """Askers by the names that clients gave them."""
        return [(key, asker) for key, asker in self.askers.items() if asker.wire.name in names]

    @property
    def clean(self) -> bool:
        """The index says "nothing to do" for every token."""
        return self._dirty == 0

    def clear(self) -> None:
        self.settle()
        self.index[: self._dirty] = 0
        self._dirty = 0


def _constant(positions: Positions, at: int, stop: int) -> bool:
    """Either all of [at, stop) or none of it."""
    return list(positions.within(at, stop)) in ([], [(at, stop)])


def _lasts(asker: Asker, at: int) -> bool:
    """What it does at this position it does from then on."""
    capture, stop = asker.wire.capture, at + (1 << 30)
    if capture and at < capture.most:
        if not _constant(capture.positions, at, capture.most):
            return False
        if asker.group and at in capture.positions:
            stop = capture.most  # where its rows end it is looked at again
    watch = asker.wire.watch
    if asker.watched and watch and at < watch.most and not _constant(watch.positions, at, watch.most):
        return False
    return all(_constant(column.positions, at, stop) for column in asker.wire.columns)


def _captures(asker: Asker, at: int) -> bool:
    capture = asker.wire.capture
    return capture is not None and at < capture.most and at in capture.positions


def _captured(asker: Asker, at: int, stop: int) -> Iterator[Interval]:
    """The positions of [at, stop) whose rows are wanted. A gap before them means that rows are missing for good."""
    capture = asker.wire.capture
    assert capture is not None
    for a, b in capture.positions.within(at, min(stop, capture.most)):  # a step too many has rows nobody may see
        if capture.positions.count(a) > asker.seen:
            asker.failed = f"rows before position {a} were never computed"
            return
        asker.seen = max(asker.seen, capture.positions.count(b))
        yield a, b


def _read(asker: Asker, at: int, stop: int) -> Iterator[Interval]:
    """The positions of [at, stop) that lenses read. Rules need every row: a gap before them is an error."""
    watch, watched = asker.wire.watch, asker.watched
    assert watch is not None
    assert watched is not None
    for a, b in watch.positions.within(at, min(stop, watch.most)):
        if watch.positions.count(a) > watched.seen:
            asker.failed = f"watched rows before position {a} were never computed"
            return
        watched.seen = max(watched.seen, watch.positions.count(b))
        yield a, b


def _switched(asker: Asker, k: int, column: WireColumn, again: bool) -> tuple[int, Positions]:
    """The gate of a column, and the positions that have it. The gates stand as they are after the newest row: for rows
    that come again it is known how they stood, and those that were steered are always open."""
    if not column.gate:
        return 0, column.positions
    if asker.watched is None:
        return 0, Positions()
    if again:
        return 0, column.positions & Positions.of(asker.watched.open.get(column.gate, ()))
    return asker.watched.gates[k], column.positions
