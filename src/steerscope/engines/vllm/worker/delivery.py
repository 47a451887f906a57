"""Rows of one worker on their way to the clients that asked for them, and what else those clients are told: how many
rows are there, that a request failed and why, and that nothing will be written any more.

A region of shared memory belongs to one request. Its counters say whose it is; nothing is written where they name
another, and nothing after this worker has left it.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from steerscope.capture.transport import ALIGN, HEADER, LEFT, MET, OWNER, READ, ROWS, TAKEN, Arena
from steerscope.engines.vllm.wire import Wire, WireCapture
from steerscope.engines.vllm.worker.pool import Pool
from steerscope.engines.vllm.worker.reductions import make_reductions
from steerscope.engines.vllm.worker.requests import Asker, Slice
from steerscope.lenses.monitor import HostStepReadings

log = logging.getLogger("steerscope")


class Delivery:
    def __init__(self, pool: Pool, hidden: int, dtype: torch.dtype, stage: int, writes: bool) -> None:
        self.pool, self.hidden, self._cell = pool, hidden, hidden * dtype.itemsize
        self.stage, self.writes = stage, writes  # which pipeline stage this is; whether it is the rank that speaks
        self.arena: Arena | None = None  # of the client that attached one
        self.arenas: dict[str, Arena] = {}  # those that requests name
        self.reductions = make_reductions(pool.cells)
        self.reducing: dict[str, tuple[Asker, Any]] = {}  # with what they keep
        self._open: list[Asker] = []  # of these, such as were left before their clients took what was foretold
        self.counts = {"rows": 0, "row_bytes": 0}
        self.when_read: Callable[[], torch.cuda.Event] | None = None  # on a GPU: when all readings asked for are there
        self._finishing: set[str] = set()  # requests whose regions the client keeps for us, left or not

    # --- where rows go

    def attach(self, path: str, size: int) -> None:
        self.arena = Arena(Path(path), size, create=False)
        self.pool.pin(self.arena)

    def detach(self) -> None:
        if self.arena is not None:
            self.pool.unpin(self.arena)
            self.arena = None

    def meet(self, asker: Asker) -> None:
        """Find its region. Say that we have met it, then look whether the region is still its own: a client that
        withdrew a request does these in the other order, so that one of us sees the other. What was withdrawn but runs
        is steered all the same (its keys are cached as such), and captures nothing."""
        asker.arena = self._arena_of(asker.wire)
        if asker.arena is None or not self._owned(asker):
            self._part(asker)
            return
        self._set(asker, MET + self.stage, 1)
        if not self._owned(asker):
            self._part(asker)

    def _arena_of(self, wire: Wire) -> Arena | None:
        if wire.arena is None:
            return self.arena
        path, size = wire.arena
        if path not in self.arenas:
            self.arenas[path] = Arena(Path(path), size, create=False)
            self.pool.pin(self.arenas[path])
        return self.arenas[path]

    def _owned(self, asker: Asker) -> bool:
        return self._word(asker, OWNER) == asker.wire.owner

    def _word(self, asker: Asker, counter: int) -> int:
        assert asker.arena is not None
        return asker.arena.ints[(asker.wire.offset + ALIGN * counter) // 8]

    def _part(self, asker: Asker) -> None:
        asker.arena, asker.left = None, True
        asker.wire = msgspec.structs.replace(asker.wire, capture=None, watch=None)

    # --- rows

    def bring_out(self, parts: list[Slice]) -> None:
        reduced: list[tuple[Any, Slice]] = []
        last = False
        for part in parts:
            capture, held = part.asker.wire.capture, self.reducing.get(part.asker.wire.name)
            over = capture is not None and capture.reduce and held is None  # its result has been written
            last |= capture is not None and part.stop == capture.most
            if part.asker.failed is not None or part.start == part.stop or capture is None or over:
                self.drop(part)
            elif held is not None:
                reduced.append((held[1], part))
            else:
                try:
                    self._send(part, capture)
                except Exception as error:  # one request's rows are void, the step goes on
                    self.drop(part)
                    self.fail(part.asker, f"{type(error).__name__}: {error}")
        if reduced:
            self._reduce(reduced)
        if last:  # of a text as long as it may become: it is about to end
            self.pool.hasten()

    def drop(self, *parts: Slice) -> None:
        """Their rows go nowhere: their cells are free, if need be when what was sent of them before has arrived."""
        for part in parts:
            if part.before:
                self.pool.afterwards(part.asker, functools.partial(self.pool.give, *part.room))
            else:
                self.pool.give(*part.room)

    def _reduce(self, parts: list[tuple[Any, Slice]]) -> None:
        try:
            self.reductions.push(parts)
            whole = [(held, part.asker) for held, part in parts if part.asker.complete and self._speaks(part.asker)]
            counter = ALIGN * (ROWS + self.stage)
            self.reductions.foretell([(h, a.most, *self._result(a), a.wire.offset + counter) for h, a in whole])
        except Exception as error:
            for _, part in parts:
                self.fail(part.asker, f"{type(error).__name__}: {error}")
        for _, part in parts:
            self.pool.give(*part.room)

    def _send(self, part: Slice, capture: WireCapture) -> None:
        asker, count = part.asker, part.stop - part.start
        if not self.writes or asker.arena is None or asker.left:
            self.drop(part)
            return
        used = count * asker.width
        offset = asker.place + capture.positions.count(part.start) * asker.width * self._cell
        note = functools.partial(self._set, asker, ROWS + self.stage, part.reached)
        self.counts["rows"] += count
        self.counts["row_bytes"] += used * self._cell
        self.pool.move(part, used, offset, note)

    def _set(self, asker: Asker, counter: int, value: int) -> None:
        """Tell the client; never again after the region was left."""
        if self.writes and asker.arena is not None and not asker.left:
            asker.left = counter == LEFT + self.stage
            asker.arena.ints[(asker.wire.offset + ALIGN * counter) // 8] = value

    def fail(self, asker: Asker, why: str) -> None:
        asker.failed = why
        mine = asker.arena is not None and (not asker.left or asker.wire.name in self._finishing)
        if mine and self._owned(asker):
            assert asker.arena is not None
            asker.arena.fail(asker.wire.offset, why)
        else:
            log.error("%s: %s", asker.wire.name, why)

    def leave(self, asker: Asker) -> None:
        """No more rows: when those under way have arrived, its memory belongs to the client alone."""
        if self.writes:
            if (fence := self.reductions.fence()) is not None:
                self.pool.afterwards(asker, _nothing, fence)
            event = self.when_read() if self.when_read is not None and asker.wire.watch else None
            self.pool.afterwards(asker, functools.partial(self._left, asker), event)
        else:
            asker.left = True

    def _left(self, asker: Asker) -> None:
        over = asker.arena is not None and self._word(asker, TAKEN)
        self._set(asker, LEFT + self.stage, 1)
        if asker.wire.name not in self.reducing:
            return
        if over:  # its client has what was foretold, and will not ask
            self.reductions.release(self.reducing.pop(asker.wire.name)[1])
        else:
            self._open.append(asker)

    def _look_again(self) -> None:
        """At those whose clients may have taken what was foretold since, or are gone."""
        waiting, self._open = self._open, []
        for asker in waiting:
            if (known := self.reducing.get(asker.wire.name)) is None or known[0] is not asker:
                continue
            if asker.arena is None or self._word(asker, TAKEN) or not self._owned(asker):
                self.reductions.release(self.reducing.pop(asker.wire.name)[1])
            else:
                self._open.append(asker)

    # --- readings

    def tell(self, asker: Asker, seen: HostStepReadings, start: int, first: int, count: int) -> None:
        """Readings of a request, from position `first` on. Those of rows that came again are there already, and rows
        beyond the longest text are nobody's."""
        watch, watched = asker.wire.watch, asker.watched
        assert watch is not None
        assert watched is not None
        number = watched.told if first >= watched.until else watch.positions.count(first)
        skip, stop = max(0, watched.told - number), min(number + count, watched.most)
        if number + skip >= stop:
            return
        here = slice(start + skip, start + stop - number)
        watched.told, watched.until = stop, first + count
        if not self.writes or asker.arena is None or asker.left:
            return
        size = 4 * watch.words
        at = asker.wire.offset + HEADER + watch.place + (number + skip) * size
        out = asker.arena.bytes[at : at + (stop - number - skip) * size].view(np.int32).reshape(-1, watch.words)
        k, found = watch.kept, min(watch.kept, seen.values.shape[1])
        if found < k:
            out[:, found:k], out[:, k + found : 2 * k] = 0, -1
        out[:, :found].view(np.float32)[:] = seen.values[here, :found]
        out[:, k : k + found] = seen.indices[here, :found]
        if watch.compiled.rules:
            assert seen.on is not None
            assert seen.off is not None
            assert seen.scores is not None
            bits = 1 << np.arange(seen.on.shape[1])
            out[:, 2 * k], out[:, 2 * k + 1] = seen.on[here] @ bits, seen.off[here] @ bits
            out[:, 2 * k + 2 :].view(np.float32)[:] = seen.scores[here, : len(watch.compiled.terms)]
        self._set(asker, READ, stop)

    # --- reductions, and the end of requests

    def expect(self, asker: Asker) -> None:
        """It captures: find the place of its rows of this stage, behind those of earlier ones."""
        capture = asker.wire.capture
        assert capture is not None
        asker.most = capture.positions.count(capture.most)
        before = 0 if capture.reduce else asker.most * asker.before
        asker.place = asker.wire.offset + HEADER + before * self._cell
        if capture.reduce is None or not self.writes:
            return
        if self._open:
            self._look_again()
        self.reducing[asker.wire.name] = asker, self.reductions.start(capture, asker.width)

    def hold(self, names: set[str]) -> None:
        """From now on, until `complete`, the client keeps the regions of these for us."""
        self._finishing = names

    def complete(self, requests: list, askers: Sequence[Asker] = ()) -> None:
        """[name, rows, offset, …] each: their rows are brought out, reductions written, regions left. Some of them may
        be known here until the next step says that they are gone."""
        self.pool.drain(self._finishing)
        counted: list[tuple[Asker, int]] = []
        for name, rows, *_ in requests:
            held = self.reducing.pop(name, None)
            if held is not None and rows and (n := self._reduced(*held, rows)) is not None:
                counted.append((held[0], n))
        self.reductions.flush()
        for asker, n in counted:
            assert asker.arena is not None
            asker.arena.ints[(asker.wire.offset + ALIGN * (ROWS + self.stage)) // 8] = n
        if self.writes and self.arena is not None:
            for _, _, offset, *_ in requests:  # also those that never came here
                self.arena.ints[(offset + ALIGN * (LEFT + self.stage)) // 8] = 1
        for asker in askers:
            asker.left = True
        self._finishing = set()

    def _speaks(self, asker: Asker) -> bool:
        """A result of it is to be written, and by this rank."""
        return asker.failed is None and asker.arena is not None and self.writes

    def _result(self, asker: Asker) -> tuple[Arena, int]:
        """Where its result belongs."""
        assert asker.arena is not None
        return asker.arena, asker.wire.offset + HEADER + asker.before * self.hidden * 4

    def _reduced(self, asker: Asker, held: Any, rows: int) -> int | None:
        """Its result is on its way to its region; of how many rows."""
        capture = asker.wire.capture
        if capture is None or not self._speaks(asker):
            return None
        try:
            return self.reductions.finish(held, rows, capture.positions.count(rows), *self._result(asker))
        except Exception as error:
            self.fail(asker, f"{type(error).__name__}: {error}")
            return None


def _nothing() -> None: ...
