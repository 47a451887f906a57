"""A capture job on a Ray cluster: Ray Data sends shard numbers to actors, each with its own engine.

Only numbers and commits travel through Ray. Actors write rows to the folder, which all machines must share. An actor
receives its next shard after it has written the last one, so a slow disk slows the engines and fills no memory. Ray
Data restarts a dead actor and repeats its shard, three times at most. A shard that was committed before is not
repeated, so every row is there exactly once.
"""

import logging
from pathlib import Path
from typing import Any

from steerscope.capture.shards import Commit
from steerscope.capture.store import committed, finish, read_commit, read_info
from steerscope.corpus.job import missing
from steerscope.corpus.reader import ShardReader, open_engine
from steerscope.corpus.run import Progress, no_progress, status
from steerscope.specs.errors import InvalidRequest, Problem, RequestFailed, SteerscopeError

_RETRIES = 3  # of a shard whose actor died


class ShardActor:
    """One engine, in one process of the cluster."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.reader = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        (shard,) = map(int, batch["id"])
        try:
            commit = read_commit(self.folder, shard)  # set when an actor died after the commit
            if commit is None:
                if self.reader is None:
                    self.reader = ShardReader(open_engine(read_info(self.folder)), self.folder)
                (commit,) = self.reader.read([shard])
            return {"commit": [commit.to_json()], "error": [""]}
        except SteerscopeError as error:  # e.g. a full disk: reported to the driver, not retried
            return {"commit": [""], "error": [str(error)]}


def run_on_ray(folder: Path, address: str, workers: int, progress: Progress = no_progress) -> str | None:
    """Run a job on Ray. `address` is that of `ray.init`: `auto`, `ray://host:10001`, or `local` for this machine."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise InvalidRequest([Problem("ray", "Ray is not installed", "pip install 'steerscope[ray]'")]) from None
    info = read_info(folder)
    folder = folder.resolve()
    left = missing(folder, info)
    if left:
        started = not ray.is_initialized()
        if started:
            cpus = workers if address == "local" else None
            ray.init(address=address, num_cpus=cpus, log_to_driver=False, logging_level=logging.WARNING)
        try:
            _run(left, folder, workers, progress)
        finally:
            if started:
                ray.shutdown()
    return finish(folder, info)


def _run(left: list[int], folder: Path, workers: int, progress: Progress) -> None:
    import ray
    import ray.data
    from ray.exceptions import RayError

    info = read_info(folder)
    done = committed(folder)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    shards = ray.data.from_items([{"id": shard} for shard in left], override_num_blocks=len(left))
    commits = shards.map_batches(
        ShardActor,
        fn_constructor_args=(str(folder),),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2),
        num_gpus=gpus,
        num_cpus=1,
        max_task_retries=_RETRIES,
    )
    progress(status(info, done))
    try:
        for line in commits.iter_rows():
            if line["error"]:
                raise RequestFailed(line["error"])
            done.append(Commit.from_json(line["commit"]))
            progress(status(info, done))
    except RayError as error:
        why = f"an actor died {_RETRIES + 1} times over the same shard: {str(error).strip().splitlines()[0]}"
        raise RequestFailed(why) from error
