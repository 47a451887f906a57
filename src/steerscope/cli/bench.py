"""`steerscope bench`: what capturing and steering cost. One configuration per process; `suite` runs them all."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from steerscope.bench.workload import Setup
from steerscope.cli import options as o

app = o.command_group(no_args_is_help=True, help="Measure what capturing and steering cost.")


_NAMES = {"tokens": ("--batched-tokens",)}
_LOAD = "model batch prefill decode stagger dtype eager tokens"
Load = Annotated[
    o.Given[Setup], o.Fields(Setup, "model batch prefill decode stagger engine dtype eager tokens", names=_NAMES)
]
SuiteLoad = Annotated[
    o.Given[Setup],
    o.Fields(Setup, _LOAD, names=_NAMES, model="small", batch=8, prefill=64, decode=32, tokens=2048),
]
Iterations = Annotated[int, Option(min=1, help="Timed rounds, after one untimed round.")]
Out = Annotated[Path, Option("--out", "--output", help="The JSON file to write.")]
_MODES = (
    "baseline: no taps; zero-layer: taps without a request; all-layers, or custom ones: every row; generated tokens, "
    "the last prompt token, the mean: of all layers."
)
Mode = Literal["baseline", "zero-layer", "all-layers", "custom", "generated", "last", "mean"]


def _write(out: Path, result: dict[str, Any]) -> None:
    from steerscope.bench.one import write

    write(out, result)
    head = ("", "median", "min", "spread", "drift")
    rows = [
        (name, f"{one['median']:.4f} s", f"{one['min']:.4f} s", f"{one['spread']:.1%}", f"{one['drift']:+.1%}")
        for name, one in result["summary"].items()
        if isinstance(one, dict) and "spread" in one
    ]
    o.table(head, rows)
    o.note(f"written to {out}")


@app.command()
@o.with_fields
def capture(
    out: Out,
    mode: Annotated[Mode, Option(help=_MODES)],
    load: Load,
    layers: Annotated[str | None, Option(help="For custom: 0,5,10 or 4-7.")] = None,
    iterations: Iterations = 10,
) -> None:
    """Time one capture configuration."""
    if (mode == "custom") != (layers is not None):
        raise o.mistake("--layers", "goes with --mode custom", "give both or neither")
    from steerscope.bench.one import measure

    _write(out, measure(load.parse(), f"layers={layers}" if layers else mode, iterations))


@app.command()
@o.with_fields
def steer(
    out: Out,
    load: Load,
    op: Annotated[Literal["add", "cap", "ablate"], Option(help="Steering operation.")] = "add",
    layers: Annotated[Literal["one", "all"], Option(help="The middle layer, or all.")] = "all",
    specs: Annotated[
        Literal["one", "each"], Option(help="One vector for all requests, or one for each request.")
    ] = "each",
    iterations: Iterations = 10,
) -> None:
    """Time one steering configuration."""
    from steerscope.bench.one import measure

    cell = op + (":one" if layers == "one" else "") + (":same" if specs == "one" else "")
    _write(out, measure(load.parse(), cell, iterations))


@app.command()
@o.with_fields
def stream(
    out: Out,
    load: Load,
    iterations: Iterations = 10,
) -> None:
    """Time all requests as streams: to the first token, and tokens per second."""
    from steerscope.bench.one import stream as measure

    _write(out, measure(load.parse(), iterations))


@app.command()
@o.with_fields
def suite(
    out: Out,
    load: SuiteLoad,
    engines: Annotated[str, Option(help="Engines to time, with commas.")] = "hf,vllm",
    cells: Annotated[list[str] | None, Option("--cell", help="Only these cells; repeatable.")] = None,
    repeats: Annotated[int, Option(min=1, help="New processes per cell.")] = 2,
    iterations: Iterations = 5,
) -> None:
    """Time all cells, each in new processes that alternate."""
    from steerscope.bench.one import write
    from steerscope.bench.suite import markdown, run_suite

    result = run_suite(load.parse(), engines.split(","), repeats, iterations, cells or (), o.note)
    write(out, result)
    typer.echo(markdown(result))
