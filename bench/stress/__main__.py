"""Send random requests to an engine or a server on this machine, and keep a ledger: `python -m bench.stress`."""

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench.stress.run import Plan, prepare, run
from steerscope.bench.one import write
from steerscope.cli import options as o
from support.targets import check_loopback

app = typer.Typer()


@app.command()
def stress(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where the small model and its lenses are, or are put; a scratch one if left out."),
    ] = None,
    engine_name: Annotated[
        Literal["hf", "vllm"], typer.Option("--engine", help="hf: transformers; vllm: vLLM, where installed.")
    ] = "hf",
    server: Annotated[str | None, typer.Option(help="A server on this machine that runs the folder's model.")] = None,
    requests: Annotated[int, typer.Option(min=0, help="Largest number of requests; 0 only makes the folder.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1, help="No new round after so long.")] = 600.0,
    concurrent: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 32,
    seed: Annotated[int, typer.Option(help="The same seed draws the same requests.")] = 0,
    cached: Annotated[int, typer.Option(min=256, help="vLLM: tokens its cache holds; few mean preemption.")] = 768,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="In bfloat16 only rows are compared.")
    ] = "float32",
    out: Annotated[Path | None, typer.Option(help="A JSON file for the ledger.")] = None,
) -> None:
    """Send random requests and check every token and row against plain transformers."""
    if server is not None and folder is None:
        raise o.mistake("folder", "is missing", "name the folder whose model the server runs")
    if server is not None:
        check_loopback(server)
    with tempfile.TemporaryDirectory() as scratch:
        where = folder or Path(scratch)
        if not requests:
            o.note(f"model and lenses are in {prepare(where)}")
            return
        found = run(where, Plan(requests, seconds, seed, concurrent), engine_name, server, o.note, dtype, cached)
    if out is not None:
        write(out, found)
    _show(found)
    if not found["holds"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    ended = " + ".join(f"{found[name]:,} {name}" for name in ("finished", "cancelled", "refused"))
    rows = " + ".join(f"{found[f'{name}_bytes']:,} {name}" for name in ("delivered", "released"))
    checked = ", ".join(f"{found[name]:,} {name}" for name in ("tokens", "rows", "readings", "firings"))
    lines = [
        ("requests", f"{found['sent']:,} sent = {ended}"),
        ("bytes of rows", f"{found['reserved_bytes']:,} reserved = {rows}"),
        ("checked", checked),
        ("worst row", f"{found['worst_row']:.1e} relative L2"),
        ("undecided", f"{found['ties']} level logits, {found['undecided']} scores on a threshold"),
        ("left over", str(sum(found["left_over"].values()))),
        ("wrong", str(len(found["wrong"]))),
    ]
    o.table(("", f"{found['target']}, {found['seconds']:.0f} s"), lines)
    for line in found["wrong"][:20]:
        typer.echo(line, err=True)


if __name__ == "__main__":
    app()
