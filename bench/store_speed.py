"""What a store costs beside the bare disk: one million rows written and read, raw and through the store, in turns.

    python -m bench.store_speed --out bench/results/store.json

Raw is one file written in pieces and synced, and read in pieces with nothing of it in memory. The store writes the same
rows as documents with labels into shards, with checksums and commits, each synced; it is read shard by shard through
the mapping, and once more as shuffled batches. Files leave the page cache before each reading.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from bench.machine import commit, machine
from steerscope.capture.shards import DocumentEntry, DocumentRows, StoreInfo, write_shards
from steerscope.capture.store import ActivationStore, create, finish
from steerscope.core.rows import Labels

ROWS, HIDDEN = 1_000_000, 2048
DOCUMENT = 1250  # rows
SHARD = 62_500  # rows, 256 MB
_PIECE = 8 << 20


def write_raw(path: Path, rows: torch.Tensor) -> None:
    data = memoryview(rows.view(torch.uint8).numpy().reshape(-1))  # pyright: ignore[reportArgumentType]
    with path.open("wb", buffering=0) as file:
        for _ in range(ROWS // SHARD):
            for at in range(0, len(data), _PIECE):
                file.write(data[at : at + _PIECE])
        os.fsync(file.fileno())


def write_store(folder: Path, rows: torch.Tensor) -> None:
    info = StoreInfo(model="synthetic", hidden=HIDDEN, keys=((0, "resid_post"),), shards=ROWS // SHARD)
    create(folder, info)
    position, none = np.arange(DOCUMENT), np.zeros(DOCUMENT, bool)

    def documents(shard: int) -> Iterator[list[DocumentRows]]:
        for i, part in enumerate(rows.split(DOCUMENT)):
            number = shard * SHARD // DOCUMENT + i
            labels = Labels("", position, (position * 7919 + i) % 50_000, none, np.full(DOCUMENT, -1))
            yield [DocumentRows(DocumentEntry(number, "synthetic.jsonl", number + 1, tokens=DOCUMENT), part, labels)]

    for _ in write_shards(folder, info, ((shard, documents(shard)) for shard in range(info.shards))):
        pass
    finish(folder, info)


def read_raw(path: Path) -> int:
    piece, total = bytearray(_PIECE), 0
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(piece):
            total += got
    return total


def read_store(folder: Path) -> int:
    """Every row, copied out of the mapping into private memory."""
    store, total = ActivationStore(folder), 0
    piece = torch.empty(_PIECE // store.info.row_bytes, 1, HIDDEN, dtype=torch.bfloat16)
    assert store.complete
    for shard in store.commits:
        for part in store.shard(shard.shard).split(len(piece)):
            total += piece[: len(part)].copy_(part).nbytes
    assert total == ROWS * HIDDEN * 2
    return total


def read_shuffled(folder: Path) -> int:
    total = sum(batch.nbytes for batch in ActivationStore(folder).batches(4096))
    assert total == ROWS * HIDDEN * 2
    return total


def forget(*paths: Path) -> None:
    """Out of the page cache."""
    for path in paths:
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            with closing(os.fdopen(os.open(file, os.O_RDONLY))) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], object]) -> float:
    """Bytes per second."""
    began = time.perf_counter()
    work()
    return ROWS * HIDDEN * 2 / (time.perf_counter() - began)


def rounds(folder: Path, count: int) -> Iterator[dict[str, float]]:
    """Each side writes where the other has just been removed: a disk that was left alone is quicker, or slower."""
    rows = torch.randn(SHARD, 1, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    raw, store = folder / "raw", folder / "store"
    bare = {"raw_write": lambda: write_raw(raw, rows), "raw_read": lambda: read_raw(raw)}
    ours = {"store_write": lambda: write_store(store, rows), "store_read": lambda: read_store(store)}
    ours["shuffled_read"] = lambda: read_shuffled(store)
    write_raw(raw, rows)
    for i in range(count):
        found = {}
        for side in (bare, ours) if i % 2 == 0 else (ours, bare):
            shutil.rmtree(store, ignore_errors=True)
            raw.unlink(missing_ok=True)
            for name, cell in side.items():
                os.sync()
                forget(*[path for path in (raw, store) if path.exists()])
                found[name] = timed(cell)
        yield found
    shutil.rmtree(store, ignore_errors=True)
    raw.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("bench-store"), help="on the disk that is measured")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    console = Console(stderr=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    measured = []
    for one in rounds(args.folder, args.rounds):
        console.print_json(data={name: f"{value / 1e9:.2f} GB/s" for name, value in one.items()})
        measured.append(one)
    pairs = {"write": ("store_write", "raw_write"), "read": ("store_read", "raw_read")}
    pairs |= {"shuffled": ("shuffled_read", "raw_read")}
    ratios = {name: statistics.median(one[a] / one[b] for one in measured) for name, (a, b) in pairs.items()}
    size = {"rows": ROWS, "hidden": HIDDEN, "bytes": ROWS * HIDDEN * 2, "shards": ROWS // SHARD}
    result = {"commit": commit(), "machine": machine(), **size, "rounds": measured, "ratios": ratios}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print_json(data=ratios)


if __name__ == "__main__":
    main()
