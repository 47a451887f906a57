"""`steerscope capture`: rows of a corpus, on disk."""

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.progress import ProgressBars

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
            with ProgressBars() as bars:
                whole = _run(out, workers, ray, device, CorpusProgress(bars), lock)
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


class CorpusProgress:
    """Shows the rows per second of this run, and the time left.

    Loading a model does not count: the clock starts with the first shard of this run.
    """

    def __init__(self, bars: ProgressBars) -> None:
        self._bars = bars
        self._shards_before: int | None = None
        self._first: tuple[Status, float] | None = None

    def __call__(self, now: "Status") -> None:
        words = f"{now.bad} bad"
        if self._first is not None and now.shards > self._first[0].shards:
            first, began = self._first
            seconds = time.monotonic() - began
            left = timedelta(seconds=round(seconds / (now.shards - first.shards) * (now.of - now.shards)))
            words = f"{(now.rows - first.rows) / seconds:,.0f} rows/s, {left} left, {words}"
        elif self._shards_before is not None and now.shards > self._shards_before:
            self._first = now, time.monotonic()
        self._shards_before = now.shards
        self._bars("shards", now.shards, now.of, f"shards: {words}")
