"""Many shards, one after the other: rows are made in the caller's thread and written in others.

A queue of one piece lies between them: an engine works while the disk does, and a disk that is slow stops the engine
instead of filling memory. The end of a shard (index, sync, commit) goes on while the next one is written.
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
from steerscope.residual.rows import Labels

_LOOK_S = 0.2


class Piece(NamedTuple):
    """A document with its rows [rows, keys, hidden] and their labels; without rows, one that could not be read."""

    entry: DocumentEntry
    rows: Tensor | None = None
    labels: Labels | None = None
    n: int = 1  # tokens that each row stands for


Pieces = queue.Queue[list[Piece] | BaseException | None]  # the end is None, or what went wrong


def write_shards(
    folder: Path, info: StoreInfo, shards: Iterable[tuple[int, Iterator[list[Piece]]]]
) -> Iterator[Commit]:
    """Write each shard from its pieces; its commit comes when it is on disk."""
    running: deque[Future[Commit]] = deque()
    with ThreadPoolExecutor(2, "steerscope-disk") as disk:
        for shard, made in shards:
            pieces: Pieces = queue.Queue(1)
            running.append(disk.submit(_write, folder, info, shard, pieces))
            try:
                for some in made:
                    _put(pieces, some, running[-1])
                _put(pieces, None, running[-1])
            except BaseException as error:
                _put(pieces, error, running[-1])
                raise
            while len(running) > 1:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _put(pieces: Pieces, item: list[Piece] | BaseException | None, writing: Future[Commit]) -> None:
    while True:
        try:
            return pieces.put(item, timeout=_LOOK_S)
        except queue.Full:
            if writing.done():
                writing.result()  # raises what stopped it
                return None


def _write(folder: Path, info: StoreInfo, shard: int, pieces: Pieces) -> Commit:
    with writing_shard(folder, info, shard) as writer:
        while (some := pieces.get()) is not None:
            if isinstance(some, BaseException):
                raise some
            for piece in some:
                writer.add(*piece)
    return writer.commit
