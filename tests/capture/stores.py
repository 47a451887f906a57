"""Small stores made from nothing, and what they must hold."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from steerscope.capture.shards import DocumentEntry, DocumentRows, StoreInfo, write_shards
from steerscope.capture.store import create, finish
from steerscope.core.rows import Labels

HIDDEN, KEYS, SHARDS, DOCUMENTS = 16, ((2, "resid_post"), (5, "mlp_out")), 3, 4  # documents of a shard


def info() -> StoreInfo:
    return StoreInfo(model="synthetic", hidden=HIDDEN, keys=KEYS, shards=SHARDS)


def length(document: int) -> int:
    return 3 + document * 7 % 11


def rows_of(document: int) -> torch.Tensor:
    """Every number tells its document, position and key; small enough to be exact in bfloat16."""
    position, key = torch.arange(length(document)).view(-1, 1, 1), torch.arange(2).view(1, -1, 1)
    lane = torch.tensor([float(document), 0.0, 0.0] + [0.0] * (HIDDEN - 3)).view(1, 1, -1)
    second, third = torch.zeros(HIDDEN), torch.zeros(HIDDEN)
    second[1], third[2] = 1, 1
    return lane + position * second + key * third


def piece(document: int) -> DocumentRows:
    n = length(document)
    if document == 5:
        return DocumentRows(DocumentEntry(5, "c.jsonl", 6, error="not JSON: no"))
    position = np.arange(n)
    message = np.where(position < 2, -1, (position > 4).astype(int))
    labels = Labels(f"d{document}", position, position * 3 + document, position < 0, message, ("user", "assistant"))
    entry = DocumentEntry(document, "c.jsonl", document + 1, f"d{document}", n, labels={"topic": f"t{document % 2}"})
    return DocumentRows(entry, rows_of(document), labels)


def pieces(shard: int) -> Iterator[list[DocumentRows]]:
    for document in range(shard * DOCUMENTS, (shard + 1) * DOCUMENTS):
        yield [piece(document)]


def make(folder: Path) -> str:
    create(folder, info())
    list(write_shards(folder, info(), ((shard, pieces(shard)) for shard in range(SHARDS))))
    checksum = finish(folder, info())
    assert checksum is not None
    return checksum


GOOD = [document for document in range(SHARDS * DOCUMENTS) if document != 5]
