"""Every row once, shuffled, for any number of workers and ranks; documents stay on their side of the split."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from capture import stores
from steerscope.capture.store import ActivationStore, Part, ShuffledRows, in_test
from steerscope.specs.errors import InvalidRequest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    folder = tmp_path_factory.mktemp("store")
    stores.make(folder)
    return ActivationStore(folder)


def small(found: ShuffledRows, run: int = 4, buffer: int = 24) -> ShuffledRows:
    """Runs and a buffer that this small store does not fit in."""
    found.run, found.buffer = run, buffer
    return found


def names(batches: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(int(row[0]), int(row[1])) for batch in batches for row in batch]


ALL = Counter((d, p) for d in stores.GOOD for p in range(stores.length(d)))


def test_every_row_comes_once_in_batches_of_the_asked_size(store: ActivationStore) -> None:
    batches = list(small(store.batches(6, layer=5)))
    assert Counter(names(batches)) == ALL
    assert all(batch.shape[1:] == (stores.HIDDEN,) and (batch[:, 2] == 1).all() for batch in batches)
    assert all(len(batch) == 6 for batch in batches[:-1])
    assert store.batches(6).__iter__().__next__().shape == (6, 2, stores.HIDDEN)


def test_only_the_seed_decides_the_order(store: ActivationStore) -> None:
    one, same, other = (names(list(small(store.batches(6, 2, seed=seed)))) for seed in (1, 1, 2))
    assert one == same != other
    assert one != sorted(one)


def test_a_batch_holds_rows_of_many_documents(store: ActivationStore) -> None:
    batches = list(store.batches(12, 2))
    assert np.mean([len({document for document, _ in names([batch])}) for batch in batches[:-1]]) > 5


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_ranks_share_the_rows_and_none_is_read_twice(store: ActivationStore, workers: int) -> None:
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(3):
        rows = small(store.batches(4, 2, rank=rank, world=3))
        share = names(list(DataLoader(rows, batch_size=None, num_workers=workers, multiprocessing_context=None)))
        assert share
        found += Counter(share)
    assert found == ALL


def test_train_and_test_part_the_documents(store: ActivationStore) -> None:
    parts: list[Part] = ["train", "test"]
    train, test = (names(list(small(store.batches(5, 2, part=part, test=0.4)))) for part in parts)
    assert Counter(train) + Counter(test) == ALL
    assert train
    assert test
    held_out = {document for document in stores.GOOD if in_test(np.array([document]), 0.4)[0]}
    assert {document for document, _ in test} == held_out
    assert not {document for document, _ in train} & held_out


def test_the_share_held_out_is_the_asked_one() -> None:
    assert abs(in_test(np.arange(100_000), 0.2).mean() - 0.2) < 0.005  # four standard deviations


def test_all_that_is_wrong_is_told_at_once(store: ActivationStore) -> None:
    with pytest.raises(InvalidRequest) as told:
        store.batches(0, part="dev", test=1.5, rank=2, world=2)  # type: ignore[arg-type]
    assert [problem.field for problem in told.value.problems] == ["size", "part", "test", "rank"]


def test_a_store_of_nothing_gives_no_batch(tmp_path: Path) -> None:
    from steerscope.capture.store import create

    create(tmp_path, stores.info())
    assert list(ActivationStore(tmp_path).batches(4)) == []
