"""A capture job on one machine: in this process, or in one process per GPU.

Worker w of N (`python -m steerscope.corpus.run DIR w N PARENT`) reads shards w, w+N, …, with its own engine and files;
workers share only the folder. A dead worker is restarted and continues with the first of its missing shards.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from steerscope.capture.shards import Commit, StoreInfo
from steerscope.capture.store import committed, finish, read_info
from steerscope.corpus.job import missing
from steerscope.corpus.reader import ShardReader, open_engine
from steerscope.engines.sync import SyncEngine
from steerscope.specs.errors import BadFile, RequestFailed, SteerscopeError

_POSIX = hasattr(os, "killpg")
_RESTARTS = 3  # of a worker that commits nothing
_POLL_S = 0.5
_CLOSING_S = 30.0  # for an engine to close
REFUSED = 3  # exit code of a worker for errors that a restart would repeat


class Status(NamedTuple):
    """The progress of a run."""

    of: int
    shards: int = 0
    rows: int = 0
    documents: int = 0
    bad: int = 0
    bytes: int = 0


Progress = Callable[[Status], None]


def no_progress(_: Status) -> None:
    """Show nothing."""


def status(info: StoreInfo, commits: Collection[Commit]) -> Status:
    rows, documents, bad = (sum(getattr(one, name) for one in commits) for name in ("rows", "documents", "bad"))
    return Status(info.shards, len(commits), rows, documents, bad, rows * info.row_bytes)


def run_here(folder: Path, progress: Progress = no_progress, device: str | None = None) -> str | None:
    """Read all missing shards in this process, and return the checksum of the store when it is complete."""
    info = read_info(folder)
    left = missing(folder, info)
    if left:
        with open_engine(info, device) as engine:
            read_shards(engine, folder, left, progress)
    return finish(folder, info)


def read_shards(engine: SyncEngine, folder: Path, shards: list[int], progress: Progress = no_progress) -> None:
    reader = ShardReader(engine, folder)
    commits = committed(folder)
    progress(status(reader.info, commits))
    for commit in reader.read(shards):
        commits.append(commit)
        progress(status(reader.info, commits))


def run_workers(folder: Path, workers: int, progress: Progress = no_progress, lock: int | None = None) -> str | None:
    """Do the same as `run_here` in several processes, which hold the folder's `lock` too, each with its own GPU if
    any."""
    info = read_info(folder)
    running: dict[int, subprocess.Popen[bytes]] = {}
    starts = dict.fromkeys(range(workers), 0)
    known: dict[int, Commit] = {}
    try:
        while left := missing(folder, info):
            commits = committed(folder, known)
            if len(commits) > len(known) or not running:
                for shard in {c.shard for c in commits} - set(known):
                    starts[shard % workers] = min(starts[shard % workers], 1)
                known = {c.shard: c for c in commits}
                progress(status(info, commits))
            for worker in {shard % workers for shard in left}:
                process = running.get(worker)
                if process is None or process.poll() is not None:
                    if process is not None:
                        _end(process)
                        _judge(folder, worker, process, starts[worker])
                    running[worker] = _start(folder, worker, workers, lock)
                    starts[worker] += 1
            time.sleep(_POLL_S)
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSING_S)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            _end(process)
    progress(status(info, committed(folder)))
    return finish(folder, info)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a worker and all processes that its engine started."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSING_S)
    if _POSIX:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _start(folder: Path, worker: int, workers: int, lock: int | None) -> "subprocess.Popen[bytes]":
    import torch

    gpus = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(gpus)]
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": names[worker % gpus]} if gpus else {})}
    numbers = map(str, (worker, workers, os.getpid()))
    command = [sys.executable, "-m", "steerscope.corpus.run", str(folder), *numbers]
    held = (lock,) if _POSIX and lock is not None else ()
    with _log(folder, worker).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=held, start_new_session=_POSIX
        )


def _judge(folder: Path, worker: int, process: "subprocess.Popen[bytes]", starts: int) -> None:
    """Raise the error of a worker that ended and must not be restarted."""
    last = _log(folder, worker).read_text(errors="replace").strip().splitlines()[-1:]
    why = last[0] if last else f"exit code {process.returncode}"
    if process.returncode == REFUSED:
        raise BadFile(why)
    if process.returncode > 0 or starts > _RESTARTS:
        raise RequestFailed(f"worker {worker} ended with code {process.returncode}: {why} (see {_log(folder, worker)})")


def _log(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.log"


def work(folder: Path, worker: int, workers: int, parent: int) -> int:
    """Be one worker, and return the exit code."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    info = read_info(folder)
    try:
        with open_engine(info) as engine:
            read_shards(engine, folder, [s for s in missing(folder, info) if s % workers == worker])
    except SteerscopeError as error:
        sys.stderr.write(f"{str(error).replace(chr(10), ' ')}\n")
        return REFUSED
    return 0


def _follow(parent: int) -> None:
    """End this worker when its parent has died, perhaps before the worker began."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and the processes of its engine
    os._exit(1)


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), *map(int, sys.argv[2:5])))
