"""Documents are found by number, whatever the file is like; errors name their line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import conftest
from steerscope.corpus.source import Corpus, check_paths, scan
from steerscope.specs.errors import BadFile, InvalidRequest


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
def test_shards_hold_every_line_once_and_in_order(corpus: Path, size: int) -> None:
    whole = Corpus((scan(corpus, size),), size)
    assert sum(file.lines for file in whole.files) == conftest.LINES
    found = [document for shard in range(whole.shards) for document in whole.documents(shard)]
    assert [document.entry.document for document in found] == [i for i in range(conftest.LINES) if i != 30]
    assert all(document.entry.line == document.entry.document + 1 for document in found)
    assert found[3].entry.labels == {"topic": "t0"}
    assert found[3].content == json.loads(conftest.line(3))["text"]
    read_later = (21, 37, 39)  # only an engine can tell
    bad = {document.entry.document: document.entry.error for document in found if document.entry.error}
    assert set(bad) == set(conftest.BAD) - set(read_later)
    assert all(conftest.BAD[i] in why for i, why in bad.items())


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.sampled_from(["", " ", "{}", "x", '{"text": "a\\nb"}', "é" * 50]), max_size=12),
       end=st.sampled_from(["", "\n", "\n\n"]), size=st.integers(1, 5))  # fmt: skip
def test_numbers_are_those_of_the_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "c.jsonl"
    path.write_bytes(("\n".join(lines) + end).encode())
    plain = path.read_bytes().split(b"\n")
    whole = Corpus((scan(path, size),), size)
    found = [document.entry.document for shard in range(whole.shards) for document in whole.documents(shard)]
    assert found == [i for i, text in enumerate(plain) if text.strip()]


def test_parquet_is_read_by_row_groups_and_missing_values_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    texts = [f"text {i}" if i % 4 else None for i in range(25)]
    pq.write_table(pa.table({"text": texts, "lang": ["en"] * 25, "when": [None] * 25}), path, row_group_size=4)
    whole = Corpus((scan(path, 7),), 7)
    assert whole.shards == 4
    found = [document for shard in range(4) for document in whole.documents(shard)]
    assert [document.content for document in found] == texts
    assert found[5].entry.labels == {"lang": "en"}
    assert found[4].entry.error == "has no content; give one of text, messages, token_ids"


def test_a_parquet_file_is_decoded_once_though_its_shards_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.parquet"
    texts = [f"text {i}" for i in range(3000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=2900)
    whole, decoded, real = Corpus((scan(path, 7),), 7), [], pq.ParquetFile.iter_batches

    def counting(*given, **named):  # type: ignore[no-untyped-def]
        for batch in real(*given, **named):
            decoded.append(len(batch))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    found = [document.content for shard in range(whole.shards) for document in whole.documents(shard)]
    assert found == texts
    assert sum(decoded) == 3000
    assert max(decoded) < 300  # a row group may not fit in memory
    shards = [420, 3, 414, 0, 428]
    found = [document.content for shard in shards for document in whole.documents(shard)]
    assert found == [text for shard in shards for text in texts[shard * 7 : shard * 7 + 7]]


def test_fields_that_a_struct_only_has_for_others_are_not_given(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    pq.write_table(pa.table({"messages": [chat]}), tmp_path / "c.parquet")
    (found,) = Corpus((scan(tmp_path / "c.parquet", 7),), 7).documents(0)
    assert found.content == chat


def test_a_link_is_read_as_what_it_is_called(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "blob")
    (tmp_path / "c.parquet").symlink_to("blob")
    found = Corpus((scan(tmp_path / "c.parquet", 7),), 7).documents(0)
    assert [document.content for document in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("edit", "shard", "told"),
    [
        (lambda data: data[:-15], 4, "1 lines are where 2 were"),
        (lambda data: data[:10], 4, "0 lines are where 2 were"),
        (lambda data: data[:10], 2, "its lines have other lengths"),
        (lambda data: data.replace(b"t1", b"t"), 0, "its lines have other lengths"),
        (None, 1, "it does not exist"),
    ],
)
def test_a_file_that_changed_since_it_was_scanned_is_told(tmp_path: Path, edit: Any, shard: int, told: str) -> None:
    path = tmp_path / "c.jsonl"
    data = b"".join(json.dumps({"text": f"t{i}"}).encode() + b"\n" for i in range(10))
    path.write_bytes(data)
    whole = Corpus((scan(path, 2),), 2)
    path.write_bytes(edit(data)) if edit else path.unlink()
    with pytest.raises(BadFile, match=rf"c\.jsonl .*{told}"):
        list(whole.documents(shard))


def test_several_files_are_one_corpus(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path, count in zip(paths, (3, 2), strict=True):
        path.write_text("".join(json.dumps({"text": f"{path.stem}{i}"}) + "\n" for i in range(count)))
    whole = Corpus(tuple(scan(path, 2) for path in paths), 2)
    found = [[document.content for document in whole.documents(shard)] for shard in range(whole.shards)]
    assert found == [["a0", "a1"], ["a2"], ["b0", "b1"]]
    assert [document.entry.document for document in whole.documents(2)] == [3, 4]


def test_files_that_are_not_there_are_all_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as told:
        check_paths([tmp_path / "a.jsonl", tmp_path / "b.csv"])
    assert len(told.value.problems) == 2
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(BadFile, match=r"c\.parquet is not a readable corpus"):
        scan(tmp_path / "c.parquet", 4)
