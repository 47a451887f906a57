"""`steerscope capture`: rows of a corpus, on disk."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.corpus.run import Status

app = o.command_group(no_args_is_help=True, help="Save the rows of a corpus on disk, and show a saved store.")


@app.command()
@o.with_fields
def run(
    engine: o.Engine,
    data: Annotated[list[Path], Option(help=".jsonl or .parquet with text, messages or token_ids; repeatable.")],
    out: Annotated[Path, Option(help="Folder of the store.")],
    layers: Annotated[str, Option(help="Layers to capture: 12, 10-14, 4,8 or all.")],
    model: o.ModelName = "smollm2-135m",
    sites: Annotated[str, Option(help="Sites to capture, with commas.")] = "resid_post",
    tokens: Annotated[str, Option(help="Tokens to capture, e.g. role=assistant, or !positions=[0].")] = "all",
    reduce: Annotated[Literal["mean", "last"] | None, Option(help="Keep one row per document.")] = None,
    rows: Annotated[Literal["bfloat16", "float16", "float32"], Option(help="Type of stored rows.")] = "bfloat16",
    max_tokens: Annotated[
        int | None, Option(help="Cut longer documents; default: reject those too long for the model.")
    ] = None,
    batch: Annotated[int | None, Option(help="Documents read together; default: 32, with vLLM 256.")] = None,
    shard_documents: Annotated[int | None, Option(help="Documents per shard; default: about 256 MiB.")] = None,
    workers: Annotated[int, Option(help="Processes, one per GPU; with --ray: actors.")] = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="A Ray cluster: auto, ray://…, local.")] = None,
    resume: o.Resume = False,
) -> None:
    """Read every document once and save its rows; --resume continues an interrupted run.

    Example: steerscope capture run --data corpus.jsonl --layers 12,20 --out rows
    """
    from steerscope.capture.store import committed, read_info
    from steerscope.corpus.job import CorpusJob, alone, begin
    from steerscope.corpus.run import status
    from steerscope.corpus.source import check_paths
    from steerscope.specs.errors import BadFile

    asked = {"layers": layers, "sites": sites.split(","), "tokens": tokens, "reduce": reduce}
    kind = engine.values["engine"]
    device = engine.values.get("device")
    batch = batch or (256 if kind == "vllm" else 32)
    given = {"batch": batch, "max_tokens": max_tokens, "shard_documents": shard_documents}
    given |= {"model": model, "engine": kind, "dtype": engine.values.get("dtype")}
    capture, job, *_ = o.together(
        lambda: ss.Capture.parse(asked),
        lambda: CorpusJob.parse(given),
        lambda: _check_workers(workers, ray, device),
        lambda: check_paths(data),
    )
    with alone(out) as lock:
        begin(out, data, job, capture, rows, resume)
        try:
            with CorpusProgress(elsewhere=workers > 1 or ray is not None) as bar:
                whole = _run(out, workers, ray, device, bar, lock)
            if whole is None:
                raise BadFile(f"the run has ended, and commits of {out} are missing or not of this corpus")
        except BaseException:
            now = status(read_info(out), committed(out))
            o.note(f"{now.shards} of {now.of} shards ({now.rows:,} rows) are in {out}; go on with --resume")
            raise
    _summary(out)


def _check_workers(workers: int, ray: str | None, device: str | None) -> None:
    if workers < 1:
        raise o.mistake("--workers", f"is {workers}", "give at least 1")
    if device is not None and (ray is not None or workers > 1):
        raise o.mistake("--device", "every worker takes a GPU of its own", "leave it out, or set CUDA_VISIBLE_DEVICES")


def _run(out: Path, workers: int, ray: str | None, device: str | None, bar: "CorpusProgress", lock: int) -> str | None:
    from steerscope.corpus.run import run_here, run_workers

    if ray is not None:
        from steerscope.corpus.cluster import run_on_ray

        return run_on_ray(out, ray, workers, bar)
    if workers > 1:
        return run_workers(out, workers, bar, lock)
    return run_here(out, bar, device)


@app.command()
def show(
    store: Annotated[Path, Argument(help="A folder that capture run wrote.")],
    verify: Annotated[bool, Option("--verify", help="Read everything and compare checksums.")] = False,
) -> None:
    """Show what a store holds, and which documents could not be read."""
    from steerscope.capture.store import ActivationStore
    from steerscope.specs.errors import Problem

    _summary(store)
    wrong = ActivationStore(store).verify() if verify else []
    if wrong:
        remedy = "remove its commit, and read it again with --resume"
        raise ss.InvalidRequest([Problem("", line, remedy) for line in wrong])
    if verify:
        typer.echo("all checksums hold")


def _summary(folder: Path) -> None:
    from steerscope.capture.budget import human
    from steerscope.capture.store import ActivationStore

    store = ActivationStore(folder)
    info = store.info
    commits = store.commits
    bad = sum(c.bad for c in commits)
    cut = sum(c.cut for c in commits)
    facts = {
        "model": info.model,
        "keys": ", ".join(f"{layer} {site}" for layer, site in info.keys),
        "tokens": f"{info.capture.tokens}{f', {info.capture.reduce}' if info.capture.reduce else ''}",
        "shards": f"{len(commits)} of {info.shards}",
        "documents": f"{sum(c.documents for c in commits):,}, {bad:,} of them bad, {cut:,} cut",
        "rows": f"{len(store):,} × {len(info.keys)} × {info.hidden} {info.dtype}, {human(len(store) * info.row_bytes)}",
        "checksum": store.checksum,
    }
    o.facts(str(folder), facts)
    if bad:
        lines = store.bad().slice(0, 10).to_pylist()
        o.table(("bad document", "why"), ((f"{line['file']}:{line['line']}", line["error"]) for line in lines))
        if bad > len(lines):
            o.note(f"and {bad - len(lines):,} more: documents/*.parquet, where error is not null")


class CorpusProgress(Progress):
    """A progress bar with the rows and bytes per second of this run, and the time left.

    Loading a model does not count: the clock starts with the first status of an engine in this process, or with the
    first finished shard where engines run `elsewhere`.
    """

    def __init__(self, elsewhere: bool) -> None:
        rate = TextColumn("shards {task.fields[rate]}")
        columns = BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn()
        # by default rich estimates from the last 30 s, and a shard may take longer
        super().__init__(*columns, console=Console(stderr=True), speed_estimate_period=math.inf)
        self._shards = self.add_task("", total=None, rate="")
        self._first: Status | None = None
        self._began = 0.0
        self._wait = elsewhere

    def __call__(self, now: "Status") -> None:
        first = self._first
        if first is None or (self._wait and now.shards > first.shards):
            self._wait = self._wait and first is None
            self._first = first = now
            self._began = time.monotonic()
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = f"{(now.rows - first.rows) / seconds:,.0f} rows/s {(now.bytes - first.bytes) / seconds / 1e9:.3f} GB/s"
        self.update(self._shards, total=now.of, completed=now.shards, rate=f"{rate}, {now.bad} bad")
