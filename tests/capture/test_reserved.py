"""Names of captures: one request holds a name at a time, and `saved` reports its file or the failure."""

import errno
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from capture.test_handle import make, make_rows
from steerscope.capture import reserved
from steerscope.capture.reserved import ReservedFile
from steerscope.capture.rows import RowFile, load_rows
from steerscope.files import lock
from steerscope.specs.errors import InvalidRequest, NameInUse, SaveFailed
from support.waiting import HUNG_S

NAMES = [f"n{i}" for i in range(40)]


def reserve_all(folder: Path, seed: int) -> list[ReservedFile]:
    """Try all names, some of them twice, in a random order."""
    names, found = random.Random(seed).choices(NAMES, k=20) + NAMES, []
    random.Random(seed).shuffle(names)
    for name in names:
        try:
            found.append(ReservedFile(folder / f"{name}.safetensors"))
        except NameInUse:
            continue
    return found


def contend(folder: Path, seed: int, barrier: Any, won: Any) -> None:
    """As one of several servers with three threads each."""
    with ThreadPoolExecutor(3) as threads:
        barrier.wait(HUNG_S)
        found = [file for files in threads.map(lambda i: reserve_all(folder, seed + i), range(3)) for file in files]
        won.put([file.name for file in found])
        barrier.wait(HUNG_S)  # no process releases before all have tried
        for file in found:
            file.write_in(threads, make())
    barrier.wait(HUNG_S)
    won.put([file.name for file in reserve_all(folder, seed)])


def test_each_name_is_given_once_between_threads_and_processes(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, won = spawn.Barrier(3), spawn.Queue()
    servers = [spawn.Process(target=contend, args=(tmp_path, 10 * i, barrier, won)) for i in range(3)]
    for server in servers:
        server.start()
    lists = [won.get(timeout=HUNG_S) for _ in range(6)]
    for server in servers:
        server.join(HUNG_S)
        assert server.exitcode == 0
    assert Counter(name for names in lists for name in names) == Counter(NAMES), "once each, and none when files exist"
    assert sorted(os.listdir(tmp_path)) == sorted(f"{name}.safetensors" for name in NAMES), "and no lock is left"


def hold(path: Path, ready: Any) -> None:
    file = ReservedFile(path)
    ready.put(file.name)
    signal.pause()


def test_a_killed_process_frees_its_names(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    path, ready = tmp_path / "monday.safetensors", spawn.Queue()
    server = spawn.Process(target=hold, args=(path, ready))
    server.start()
    ready.get(timeout=HUNG_S)
    with pytest.raises(NameInUse, match="'monday' is in use: another request"):
        ReservedFile(path)
    server.kill()
    server.join(HUNG_S)
    ReservedFile(path).release()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_its_holder_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ReservedFile(tmp_path / "monday.safetensors")

    def late(handle: int, *, wait: bool) -> None:
        first.release()  # between another's opening of the lock file and its locking
        lock(handle, wait=wait)

    monkeypatch.setattr(reserved, "lock", late)
    second = ReservedFile(first.path)
    with pytest.raises(NameInUse):
        ReservedFile(first.path)
    second.release()
    assert os.listdir(tmp_path) == []


def full(_file: RowFile) -> Iterator[bytes]:
    yield b"half"
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_and_the_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, handle = ReservedFile(tmp_path / "monday.safetensors"), make()
    with monkeypatch.context() as disk, ThreadPoolExecutor(1) as threads:
        disk.setattr(RowFile, "pieces", full)
        file.write_in(threads, handle)
        with pytest.raises(SaveFailed, match="not saved as 'monday': No space left on device") as failure:
            handle.saved(HUNG_S)
    assert str(tmp_path) not in str(failure.value)
    assert handle.fetch().n == make_rows().n
    assert os.listdir(tmp_path) == [], "the name is free again"
    with ThreadPoolExecutor(1) as threads:
        again = ReservedFile(file.path)
        again.write_in(threads, handle)
        assert handle.saved(HUNG_S) == file.path
    assert load_rows(file.path).n == make_rows().n


def test_what_another_program_wrote_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    file, handle = ReservedFile(tmp_path / "monday.safetensors"), make()
    file.path.write_bytes(b"theirs")
    with ThreadPoolExecutor(1) as threads:
        file.write_in(threads, handle)
        with pytest.raises(SaveFailed, match="exists"):
            handle.saved(HUNG_S)
    assert file.path.read_bytes() == b"theirs"
    handle.close()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written: No such file") as refusal:
        ReservedFile(tmp_path / "nowhere" / "monday.safetensors")
    assert not isinstance(refusal.value, NameInUse)
