"""Write many shards: rows are made in the caller's thread and written in others.

A queue of one item lies between them. So engine and disk work at the same time, and a slow disk stops the engine
instead of filling memory. The end of a shard (index, sync, commit) overlaps with the start of the next.
"""

import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from steerscope.capture.index import DocumentEntry
from steerscope.capture.shards import Commit, StoreInfo, writing_shard
from steerscope.core.rows import Labels

_LOOK_S = 0.2


class DocumentRows(NamedTuple):
    """A document with its rows [rows, keys, hidden] and their labels; without rows, one that could not be read."""

    entry: DocumentEntry
    rows: Tensor | None = None
    labels: Labels | None = None
    n: int = 1  # tokens per row: more than 1 for a reduction


class _Shard:
    """The queue to the thread that writes one shard. A signal that ends the main thread could leave a `queue.Queue`
    locked, and both sides would wait for ever; a SimpleQueue has no such state."""

    def __init__(self) -> None:
        self.pieces: queue.SimpleQueue[list[DocumentRows] | BaseException | None] = queue.SimpleQueue()
        self.room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.room.put(None)

    def put(self, some: list[DocumentRows], writing: Future[Commit]) -> None:
        while True:
            try:
                self.room.get(timeout=_LOOK_S)
                return self.pieces.put(some)
            except queue.Empty:
                if writing.done():
                    writing.result()  # raises its error
                    return None

    def end(self, error: BaseException | None) -> None:
        self.pieces.put(error)

    def __iter__(self) -> Iterator[DocumentRows]:
        while (some := self.pieces.get()) is not None:
            self.room.put(None)
            if isinstance(some, BaseException):
                raise some
            yield from some


def write_shards(
    folder: Path, info: StoreInfo, shards: Iterable[tuple[int, Iterator[list[DocumentRows]]]]
) -> Iterator[Commit]:
    """Write each shard from its documents, and yield its commit when it is on disk."""
    running: deque[Future[Commit]] = deque()
    with ThreadPoolExecutor(2, "steerscope-disk") as disk:
        for number, made in shards:
            shard = _Shard()
            try:
                running.append(disk.submit(_write, folder, info, number, shard))
                for some in made:
                    shard.put(some, running[-1])
                shard.end(None)
            except BaseException as error:
                shard.end(error)
                raise
            while len(running) > 1:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _write(folder: Path, info: StoreInfo, number: int, shard: _Shard) -> Commit:
    with writing_shard(folder, info, number) as writer:
        for piece in shard:
            writer.add(*piece)
    return writer.commit
