"""The same job on a local Ray cluster of two workers, one of them killed mid-run."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from steerscope.capture.store import ActivationStore, committed
from steerscope.corpus.cluster import run_on_ray
from steerscope.corpus.job import Job, begin
from steerscope.corpus.run import run_here
from steerscope.specs import Capture

pytest.importorskip("ray")


@pytest.mark.slow
def test_it_equals_the_local_run_row_for_row_though_a_worker_is_killed(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    stores = tmp_path / "local", tmp_path / "ray"
    for folder in stores:
        job = Job.parse({"model": model, "batch": 4, "shard_documents": 3})
        begin(folder, [corpus], job, Capture(layers="1,3"), "bfloat16", False)
    assert run_here(stores[0]) is not None
    killed: list[int] = []

    def kill() -> None:
        while not committed(stores[1]):
            time.sleep(0.01)
        for child in psutil.Process().children(recursive=True):
            if child.name().startswith("ray::MapWorker"):
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)
                return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    told = []
    checksum = run_on_ray(stores[1], "local", 2, told.append)
    killer.join()
    assert killed
    one, other = map(ActivationStore, stores)
    assert checksum == one.checksum
    assert one.index().equals(other.index())
    assert all(one.shard(c.shard).equal(other.shard(c.shard)) for c in one.commits)
    assert told[-1].shards == one.info.shards
    assert other.verify() == []
