"""The same job on a local Ray cluster of two workers, one of them killed mid-run."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from steerscope.capture.store import ActivationStore, committed, read_info
from steerscope.corpus import cluster
from steerscope.corpus.cluster import ShardActor, run_on_ray
from steerscope.corpus.job import CorpusJob, begin
from steerscope.corpus.run import run_here
from steerscope.specs import Capture
from steerscope.specs.errors import RequestFailed

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.long
def test_it_equals_the_local_run_row_for_row_though_a_worker_is_killed(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    stores = tmp_path / "local", tmp_path / "ray"
    for folder in stores:
        job = CorpusJob.parse({"model": model, "batch": 4, "shard_documents": 3})
        begin(folder, [corpus], job, Capture(layers="1,3"), "bfloat16", False)
    assert run_here(stores[0]) is not None
    killed: list[int] = []
    at_the_kill: list[tuple[int, int]] = []

    def kill() -> None:
        while not committed(stores[1]) or not (half := len([*stores[1].glob("rows/.steerscope-*")])):
            time.sleep(0.001)
        at_the_kill.append((len(committed(stores[1])), half))
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
    ((done, half),) = at_the_kill
    assert done < read_info(stores[1]).shards
    assert half
    one, other = map(ActivationStore, stores)
    assert checksum == one.checksum
    assert one.index().equals(other.index())
    assert all(one.shard(c.shard).equal(other.shard(c.shard)) for c in one.commits)
    assert told[-1].shards == one.info.shards
    assert other.verify() == []


def test_a_shard_that_was_committed_before_its_actor_died_is_not_read_again(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    begin(
        tmp_path,
        [corpus],
        CorpusJob.parse({"model": model, "shard_documents": 30}),
        Capture(layers=1),
        "bfloat16",
        False,
    )
    run_here(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    told = ShardActor(str(tmp_path))({"id": [1]})
    assert told == {"commit": [committed(tmp_path)[1].to_json()], "error": [""]}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == before


@pytest.mark.slow
@pytest.mark.long
def test_a_shard_that_always_kills_its_actor_ends_the_run(
    tmp_path: Path, model: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(
        tmp_path,
        [corpus],
        CorpusJob.parse({"model": model, "shard_documents": 60}),
        Capture(layers=1),
        "bfloat16",
        False,
    )

    class Deadly(ShardActor):
        def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
            with (tmp_path / "deaths").open("a") as deaths:
                deaths.write("." * len(batch["id"]))
            os._exit(1)

    monkeypatch.setattr(cluster, "ShardActor", Deadly)
    with pytest.raises(RequestFailed, match="an actor died 4 times over the same shard"):
        run_on_ray(tmp_path, "local", 1)
    assert (tmp_path / "deaths").read_text() == "...."
