"""What a process and all it has started hold on to."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_SHARED = Path("/dev/shm")


class Seen(NamedTuple):
    memory_mib: float  # what is shared between them counts once
    handles: int
    threads: int
    shared: int  # files in shared memory that they have mapped
    processor_s: float


def look(process: int) -> Seen:
    """Processes that end meanwhile are left out."""
    top = psutil.Process(process)
    family = [top, *top.children(recursive=True)]
    memory, handles, threads, spent = 0, 0, 0, 0.0
    for one in family:
        with contextlib.suppress(psutil.Error, OSError):
            memory += _proportional_kib(one.pid)
            handles += one.num_fds()
            threads += one.num_threads()
            spent += sum(one.cpu_times()[:2])
    return Seen(memory / 1024, handles, threads, len(_mapped(one.pid for one in family)), spent)


def orphans() -> set[str]:
    """Files in shared memory that no process has mapped."""
    there = {str(path) for path in _SHARED.iterdir()} if _SHARED.is_dir() else set()
    return there - _mapped(psutil.pids())


def _mapped(processes: Iterable[int]) -> set[str]:
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if f" {_SHARED}/" in line}
    return found


def _proportional_kib(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0
