"""Run folders: one writer at a time, each item once, results on the disk as they arrive."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from steerscope.extraction.runs import Ledger, Record, groups, store_missing
from steerscope.files import lock_folder
from steerscope.specs.errors import BadFile


def test_a_folder_has_one_writer_until_it_is_done(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "run"),
        pytest.raises(BadFile, match="another run is writing to"),
        lock_folder(tmp_path / "run"),
    ):
        pytest.fail("both write")
    with lock_folder(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_items_are_done_once_in_batches_and_stored_as_they_are_yielded(tmp_path: Path) -> None:
    items = {str(i): i for i in range(5)}
    path = tmp_path / "done.jsonl"
    Ledger(path).append([{"id": "1"}])
    seen: list[Sequence[int]] = []

    def work(batch: Sequence[int]) -> Iterator[list[Record]]:
        seen.append(batch)
        for item in batch:
            yield [{"id": str(item)}]
            assert str(item) in Ledger(path).records
            if item == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(store_missing(items, Ledger(path), 2, work))
    assert seen == [[0, 2], [3, 4]]
    sizes = list(store_missing(items, Ledger(path), 2, lambda batch: [[{"id": str(one)} for one in batch]]))
    assert sizes == [4, 1]


def test_a_list_of_results_is_one_group_and_an_iterator_gives_one_each() -> None:
    assert list(groups(["a", "b"])) == [[(0, "a"), (1, "b")]]
    assert list(groups(iter([(1, "b"), (0, "a")]))) == [[(1, "b")], [(0, "a")]]
