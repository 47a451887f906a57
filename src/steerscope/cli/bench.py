"""`steerscope bench`: what capturing and steering cost. One configuration per process; `suite` runs them all."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.bench.workload import Setup

app = typer.Typer(no_args_is_help=True, help="Measure what capturing and steering cost.")

_SHAPES = "A directory, smollm2-135m, or a shape with made-up weights: qwen2.5-3b, llama-8b, llama-1b, small, tiny."
Model = Annotated[str, typer.Option(help=_SHAPES)]
Batch = Annotated[int, typer.Option(min=1, help="Requests that run together.")]
Prefill = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
Decode = Annotated[int, typer.Option(min=2, help="Tokens each request generates.")]
Iterations = Annotated[int, typer.Option(min=1, help="Timed rounds, after one that is not.")]
Stagger = Annotated[int, typer.Option(min=0, help="So many tokens before the longest text the shortest ends.")]
Dtype = Annotated[str, typer.Option(help="auto: bfloat16 on a GPU, float32 elsewhere.")]
Eager = Annotated[bool, typer.Option("--eager", help="vLLM without compilation and graphs.")]
BatchedTokens = Annotated[int, typer.Option("--batched-tokens", help="vLLM's max_num_batched_tokens.")]
Out = Annotated[Path, typer.Option("--out", "--output", help="The JSON to write.")]
_MODES = (
    "baseline: nothing of ours; zero-layer: on, but nothing is asked; all-layers, or custom ones: every row; "
    "generated tokens, the last prompt token, the mean: of all layers."
)
Mode = Literal["baseline", "zero-layer", "all-layers", "custom", "generated", "last", "mean"]


def _setup(given: dict[str, Any]) -> "Setup":
    from dataclasses import fields

    from steerscope.bench.workload import Setup

    names = {field.name for field in fields(Setup)}
    return Setup(**{name: value for name, value in given.items() if name in names})


def _done(out: Path, result: dict[str, Any]) -> None:
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
def capture(
    out: Out,
    mode: Annotated[Mode, typer.Option(help=_MODES)],
    layers: Annotated[str | None, typer.Option(help="For custom: 0,5,10 or 4-7.")] = None,
    model: Model = "tiny",
    batch: Batch = 32,
    prefill: Prefill = 512,
    decode: Decode = 128,
    stagger: Stagger = 0,
    iterations: Iterations = 10,
    engine: o.EngineName = "hf",
    dtype: Dtype = "auto",
    eager: Eager = False,
    tokens: BatchedTokens = 16384,
    profile: Annotated[bool, typer.Option("--profile", help="Instead: name the top costs of a fetch.")] = False,
) -> None:
    """Time one capture configuration."""
    given = dict(locals())
    if (mode == "custom") != (layers is not None):
        raise o.mistake("--layers", "goes with --mode custom", "give both or neither")
    from steerscope.bench.one import measure, top_costs, write

    cell = f"layers={layers}" if layers else mode
    if profile:
        found = top_costs(_setup(given), cell)
        write(out, found)
        costs = found["top_costs"][:10]
        rows = [(one["function"], one["file"][-50:], str(one["calls"]), f"{one['own_us']:.0f}") for one in costs]
        o.table(("function", "where", "calls", "own µs"), rows)
        return
    _done(out, measure(_setup(given), cell, iterations))


@app.command()
def steer(
    out: Out,
    op: Annotated[Literal["add", "cap", "ablate"], typer.Option(help="What is done to the stream.")] = "add",
    layers: Annotated[Literal["one", "all"], typer.Option(help="The middle layer, or all.")] = "all",
    specs: Annotated[Literal["one", "each"], typer.Option(help="One for all requests, or another for each.")] = "each",
    model: Model = "tiny",
    batch: Batch = 32,
    prefill: Prefill = 512,
    decode: Decode = 128,
    stagger: Stagger = 0,
    iterations: Iterations = 10,
    engine: o.EngineName = "hf",
    dtype: Dtype = "auto",
    eager: Eager = False,
    tokens: BatchedTokens = 16384,
) -> None:
    """Time one steering configuration."""
    given = dict(locals())
    from steerscope.bench.one import measure

    cell = op + (":one" if layers == "one" else "") + (":same" if specs == "one" else "")
    _done(out, measure(_setup(given), cell, iterations))


@app.command()
def stream(
    out: Out,
    model: Model = "tiny",
    batch: Batch = 32,
    prefill: Prefill = 512,
    decode: Decode = 128,
    stagger: Stagger = 0,
    iterations: Iterations = 10,
    engine: o.EngineName = "hf",
    dtype: Dtype = "auto",
    eager: Eager = False,
    tokens: BatchedTokens = 16384,
    http: Annotated[bool, typer.Option("--http", help="Take turns with the same streams over HTTP.")] = False,
    cell: Annotated[str, typer.Option(help="With --http, what streams ask: zero-layer, add, …")] = "zero-layer",
) -> None:
    """Time all requests as streams: to the first token, and tokens per second."""
    given = dict(locals())
    if http:
        from steerscope.bench.served import served

        result = served(_setup(given), iterations, cell)
        _done(out, result)
        found = result["summary"]
        for name, what in (("ratio", "time"), ("cpu_ratio", "processor time")):
            low, high = found[name]["interval"]
            o.note(f"server / engine, {what}: {found[name]['median']:.3f} ({low:.3f} to {high:.3f})")
        o.note(f"server's thread: {found['loop_us_per_token']:.1f} µs per token")
        return
    from steerscope.bench.one import stream as measure

    _done(out, measure(_setup(given), iterations))


@app.command()
def suite(
    out: Out,
    report: Annotated[Path | None, typer.Option(help="Folder for report.html and report.md.")] = None,
    engines: Annotated[str, typer.Option(help="Engines to time, with commas.")] = "hf,vllm",
    cells: Annotated[list[str] | None, typer.Option("--cell", help="Only these; may be given again.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes per cell.")] = 2,
    model: Model = "small",
    batch: Batch = 8,
    prefill: Prefill = 64,
    decode: Decode = 32,
    stagger: Stagger = 0,
    iterations: Iterations = 5,
    dtype: Dtype = "auto",
    eager: Eager = False,
    tokens: BatchedTokens = 2048,
) -> None:
    """Time everything, each cell in fresh processes that take turns."""
    given = dict(locals())
    from steerscope.bench.one import write
    from steerscope.bench.report import html_report
    from steerscope.bench.suite import markdown, run_suite

    result = run_suite(_setup(given), engines.split(","), repeats, iterations, cells or (), o.note)
    write(out, result)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        (report / "report.html").write_text(html_report(result), encoding="utf-8")
        (report / "report.md").write_text(markdown(result) + "\n", encoding="utf-8")
        o.note(f"report in {report}")
    typer.echo(markdown(json.loads(out.read_text())))
