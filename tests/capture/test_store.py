"""A store gives back what was put in, by document and by token, and exists shard by shard or not at all."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.compute as pc
import pytest
import torch
from safetensors.torch import load_file

from capture import stores
from steerscope.capture.shards import DocumentRows, StoreInfo, write_shards, writing_shard
from steerscope.capture.store import ActivationStore, committed, create, finish
from steerscope.specs.errors import BadFile, InvalidRequest
from support.waiting import HUNG_S


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    folder = tmp_path_factory.mktemp("store")
    stores.make(folder)
    return ActivationStore(folder)


def test_documents_come_back_with_their_labels(store: ActivationStore) -> None:
    assert store.complete
    for document in stores.GOOD:
        rows = store.document(document)
        expected, given = stores.rows_of(document), stores.piece(document).labels
        assert given is not None
        for i, key in enumerate(stores.KEYS):
            assert torch.equal(rows[key].float(), expected[:, i])
            assert rows[key].dtype == torch.bfloat16
        assert list(rows.labels) == list(given)
    assert len(store) == sum(map(stores.length, stores.GOOD))


def test_rows_of_a_token_are_found_through_the_index(store: ActivationStore) -> None:
    lines = store.index(pc.field("token_id") == 12)
    found = {(d, p) for d, p in zip(lines["document"].to_pylist(), lines["position"].to_pylist(), strict=True)}
    assert found == {(d, p) for d in stores.GOOD for p in range(stores.length(d)) if p * 3 + d == 12}
    backwards = lines.take(list(range(len(lines)))[::-1])
    for layer, key in ((2, 0), (5, 1)):
        rows = store.take(backwards, layer)
        wanted = zip(backwards["document"].to_pylist(), backwards["position"].to_pylist(), strict=True)
        assert torch.equal(rows.float(), torch.stack([stores.rows_of(d)[p, key] for d, p in wanted]))
    assert store.take(lines).shape == (len(lines), 2, stores.HIDDEN)


def test_bad_documents_are_told_with_file_and_line_and_have_no_rows(store: ActivationStore) -> None:
    assert store.bad().to_pylist() == [{"file": "c.jsonl", "line": 6, "id": None, "error": "not JSON: no"}]
    with pytest.raises(InvalidRequest, match=r"5 has no rows: not JSON: no; correct c\.jsonl:6"):
        store.document(5)
    with pytest.raises(InvalidRequest, match="99 is not in the store"):
        store.document(99)


def test_one_layer_must_be_named_where_there_are_several(store: ActivationStore) -> None:
    with pytest.raises(InvalidRequest, match=r"0 of the store's 2 keys are at layer 3.*name one of 2 resid_post, 5"):
        store.batches(4, layer=3)


def test_other_tools_read_it(store: ActivationStore) -> None:
    """safetensors the rows, pandas and duckdb the index."""
    raw = load_file(store.folder / "rows" / "00000001.safetensors")["rows"]
    assert torch.equal(raw, store.shard(1))
    lines = pd.read_parquet(store.folder / "index")
    assert len(lines) == len(store)
    assert set(lines["role"].dropna()) == {"user", "assistant"}
    query = (
        f"select sum(i.n) from '{store.folder}/index/*.parquet' i join '{store.folder}/documents/*.parquet' d "
        "using (document) where d.labels->>'topic' = 't1' and i.role = 'assistant'"
    )
    (count,) = duckdb.sql(query).fetchall()[0]
    assert count == sum(max(0, stores.length(d) - 5) for d in stores.GOOD if d % 2)


def test_verify_finds_what_was_changed_and_what_is_gone(tmp_path: Path) -> None:
    stores.make(tmp_path)
    assert ActivationStore(tmp_path).verify() == []
    path = tmp_path / "rows" / "00000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    (tmp_path / "index" / "00000002.parquet").unlink()
    changed, gone = ActivationStore(tmp_path).verify()
    assert "rows/00000001.safetensors has changed" in changed
    assert "index/00000002.parquet is missing" in gone


def test_verify_reads_headers_too(tmp_path: Path) -> None:
    stores.make(tmp_path)
    path = tmp_path / "rows" / "00000001.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))
    (told,) = ActivationStore(tmp_path).verify()
    assert "00000001.safetensors holds torch.float16" in told


def test_a_shard_that_is_written_again_loses_its_commit_before_its_files_change(tmp_path: Path) -> None:
    stores.make(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert _killed_at(tmp_path, 1, before=True)
    assert [commit.shard for commit in committed(tmp_path)] == [1, 2]


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path) -> None:
    stores.make(tmp_path)
    path = tmp_path / "rows" / "00000000.safetensors"
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(BadFile, match=r"00000000\.safetensors"):
        ActivationStore(tmp_path).document(0)


@pytest.mark.parametrize("part", ["index", "documents"])
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, part: str) -> None:
    stores.make(tmp_path)
    path = tmp_path / part / "00000000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    store = ActivationStore(tmp_path)
    with pytest.raises(BadFile, match="is not a readable"):
        store.document(0)
    with pytest.raises(BadFile, match="is not a readable"):
        getattr(store, part)()


def test_reductions_carry_how_many_tokens_they_stand_for(tmp_path: Path) -> None:
    info = StoreInfo.parse({**stores.info().model_dump(), "shards": 1, "capture": {"reduce": "mean"}})
    create(tmp_path, info)
    whole = stores.piece(3)
    assert whole.rows is not None
    assert whole.labels is not None
    last = whole.labels.take([len(whole.labels) - 1])  # type: ignore[arg-type]
    list(write_shards(tmp_path, info, [(0, iter([[DocumentRows(whole.entry, whole.rows[:1], last, 13)]]))]))
    assert ActivationStore(tmp_path).index().to_pylist()[0]["n"] == 13


def _killed_at(folder: Path, replace: int, before: bool) -> bool:
    """Write a shard in a child that is killed at its nth rename; whether it was."""
    child = os.fork()
    if child == 0:
        real, count = os.replace, 0

        def counting(source: Path, target: Path) -> None:
            nonlocal count
            count += 1
            if count == replace and before:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)
            if count == replace:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = counting  # type: ignore[assignment]
        with writing_shard(folder, stores.info(), 0) as writer:
            for some in stores.pieces(0):
                writer.add(some)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", [True, False])
def test_a_shard_that_is_killed_anywhere_exists_whole_or_not_at_all(tmp_path: Path, before: bool) -> None:
    expected = stores.make(tmp_path / "whole")
    step = 0
    while True:
        step += 1
        folder = tmp_path / f"killed-{step}"
        create(folder, stores.info())
        if not _killed_at(folder, step, before):
            break
        there = ActivationStore(folder)
        assert there.verify() == []  # what is committed is whole
        assert len(there.commits) == (0 if before else int(step == 4))
        done = {commit.shard for commit in there.commits}
        rest = [shard for shard in range(stores.SHARDS) if shard not in done]
        list(write_shards(folder, stores.info(), ((shard, stores.pieces(shard)) for shard in rest)))
        assert finish(folder, stores.info()) == expected
    assert step == 5  # rows, index, documents, commit


def test_a_shard_whose_rows_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    create(tmp_path, stores.info())

    def broken() -> Iterator[list[DocumentRows]]:
        yield [stores.piece(4)]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(write_shards(tmp_path, stores.info(), [(0, stores.pieces(0)), (1, broken())]))
    assert [commit.shard for commit in committed(tmp_path)] == [0]
    assert not [*tmp_path.glob("*/.steerscope-*")]
    assert finish(tmp_path, stores.info()) is None
    assert not ActivationStore(tmp_path).complete


ENDED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from capture import stores

def submit(self, *work, inner=ThreadPoolExecutor.submit):
    inner(self, *work)
    raise SystemExit(143)  # a signal comes when the thread has work and the other end is not held yet

ThreadPoolExecutor.submit = submit
stores.make(Path(sys.argv[1]))
"""


def test_a_signal_when_a_shard_begins_leaves_nobody_waiting(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path)]
    assert subprocess.run(command, cwd=Path(__file__).parents[1], timeout=HUNG_S, check=False).returncode == 143
    assert not committed(tmp_path)
    assert not [*tmp_path.glob("*/.steerscope-*")]


def test_an_interrupt_at_the_end_of_a_shard_stops_the_writing(tmp_path: Path) -> None:
    create(tmp_path, stores.info())
    told = []

    def interrupted() -> Iterator[list[DocumentRows]]:
        yield from stores.pieces(0)
        raise KeyboardInterrupt

    def run() -> None:
        try:
            list(write_shards(tmp_path, stores.info(), [(0, interrupted())]))
        except KeyboardInterrupt:
            told.append("interrupted")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUNG_S)
    assert told == ["interrupted"]
    assert not committed(tmp_path)
    assert not [*tmp_path.glob("*/.steerscope-*")]


def test_a_disk_that_is_full_stops_the_writing_and_leaves_what_was_whole(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the first shard fits, the second does not."""
    info = stores.info()
    create(tmp_path, info)

    def large() -> Iterator[list[DocumentRows]]:
        whole = stores.piece(4)
        assert whole.rows is not None
        yield from ([whole._replace(rows=whole.rows.clone())] for _ in range(1000))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(BadFile, match=r"cannot write .*rows/00000001\.safetensors"):
            list(write_shards(tmp_path, info, [(0, stores.pieces(0)), (1, large())]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [commit.shard for commit in committed(tmp_path)] == [0]
    assert not [*tmp_path.glob("*/.steerscope-*")]


def test_a_store_without_a_shard_says_so(tmp_path: Path) -> None:
    create(tmp_path, stores.info())
    with pytest.raises(BadFile, match="holds no shard yet"):
        ActivationStore(tmp_path).documents()
    (tmp_path / "store.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(BadFile, match=r"store\.json is not a readable description of a store"):
        ActivationStore(tmp_path)
