"""`steerscope train`: learn a steering vector by gradient descent; `train sweep`: many, over rates, layers and sets."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from steerscope.cli import options as o
from steerscope.progress import ProgressBars
from steerscope.training.settings import TrainResult, TrainSettings

if TYPE_CHECKING:
    from steerscope.training.sweep import SweepOutcome, SweepRun
    from steerscope.training.vectors import Line

app = o.command_group(invoke_without_command=True)

_DATA = "A shipped set (nostalgic), or a .jsonl file of chats, texts, or pairs."
_LAYERS = "12, or several that learn together: 10-14, 4,8."
_PROMPTED = "Instruction of the prompted baseline; default: that of a shipped set. Repeatable."
_SHARED = "schedule epochs batch target_tokens val_tokens patience init site tokens rank gradient_checkpointing seed"
_NAMES = {"learning_rate": ("--lr",), "patience": ("--early-stop-patience",)}
Prompted = Annotated[list[str] | None, Option(help=_PROMPTED)]
DtypeOnly = Annotated[o.Given[o.EngineOptions], o.Fields(o.EngineOptions, "dtype", panel=o.ENGINE_PANEL)]


@app.callback()
@o.with_fields
def train(
    context: typer.Context,
    engine: o.LocalEngine,
    *,
    data: Annotated[str | None, Option(help=_DATA)] = None,
    out: Annotated[Path | None, Option(help="Folder of the run; an interrupted run continues.")] = None,
    layers: Annotated[str | None, Option("--layers", "--layer", help=_LAYERS)] = None,
    model: o.ModelName = "smollm2-135m",
    asked: Annotated[o.Given[TrainSettings], o.Fields(TrainSettings, f"learning_rate {_SHARED}", names=_NAMES)],
    prompted: Prompted = None,
    as_json: o.AsJson = False,
) -> None:
    """Learn a steering vector from texts by gradient descent; the model itself stays as it is.

    Example: steerscope train --data nostalgic --layers 18 --epochs 3 --out run
    """
    if context.invoked_subcommand is not None:
        return
    from steerscope.training.texts import load_training_set
    from steerscope.training.vectors import train as run

    known, settings, folder = o.together(
        lambda: load_training_set(_needed("--data", data)),
        lambda: asked.parse(layers=_needed("--layers", layers)),
        lambda: _needed("--out", out),
    )
    with o.open_engine(model, engine) as loaded, ProgressBars() as bars:
        show = partial(_show_line, bars, settings.epochs)
        done = run(loaded, known, folder, settings, prompts=tuple(prompted or ()) or None, told=show)
    if as_json:
        typer.echo(done.result.to_json())
        return
    o.table((str(folder), "validation perplexity"), _rows(done.result))
    file = folder / "vector.safetensors"
    typer.echo(f"{file} ({file.stat().st_size} bytes): {done.vector}")
    where = "" if settings.tokens == "all" else f";tokens={settings.tokens}"
    typer.echo(f"try --steer '{file}{where}'")


@app.command()
@o.with_fields
def sweep(
    data: Annotated[list[str], Option(help=f"{_DATA} Repeatable.")],
    out: Annotated[Path, Option(help="Runs go to OUT/MODEL/SET/RUN; finished runs are skipped.")],
    layers: Annotated[list[str], Option("--layers", "--layer", help=f"{_LAYERS} Repeat it for more runs.")],
    lr: Annotated[str, Option(help="Learning rates: 0.03,0.1,0.3.")],
    asked: Annotated[o.Given[TrainSettings], o.Fields(TrainSettings, _SHARED, names=_NAMES)],
    engine: DtypeOnly,
    model: o.ModelName = "smollm2-135m",
    prompted: Prompted = None,
    devices: Annotated[str | None, Option(help="cuda:0,cuda:1; default: all GPUs, or the CPU.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Train with every rate at every layer on every set, with one loaded model per device."""
    from steerscope.training import sweep as s
    from steerscope.training.texts import load_training_set

    rates, *known = o.together(
        lambda: o.numbers("--lr", lr, "0.03,0.1,0.3"), *(partial(load_training_set, one) for one in data)
    )
    settings = o.together(*(partial(asked.parse, learning_rate=rate, layers=one) for one in layers for rate in rates))
    runs = s.plan(out, model, known, settings)
    with ProgressBars() as bars:
        done = s.sweep(
            runs,
            lambda device: o.open_engine(model, engine, device=device),
            devices.split(",") if devices else _all_devices(),
            prompts=tuple(prompted or ()) or None,
            told=lambda run, line, most: _show_line(bars, settings[0].epochs, line, most, run),
        )
    root = runs[0].folder.parent.parent
    if as_json:
        typer.echo((root / "sweep.json").read_text(encoding="utf-8"), nl=False)
    else:
        o.table(("run", "steered", "best epoch", "norm"), (_run_cells(one) for one in done))
        typer.echo(f"{root / 'sweep.svg'}")
    if any(one.error is not None for one in done):
        raise typer.Exit(1)


def _needed(name: str, value: Any) -> Any:
    """Refuse a missing option; options of a command with subcommands cannot be declared as required."""
    if value is None:
        raise o.mistake(name, "is missing", "give it; steerscope train --help lists all options")
    return value


def _all_devices() -> list[str | None]:
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or [None]


def _show_line(bars: ProgressBars, epochs: int, line: "Line", n_steps: int, run: "SweepRun | None" = None) -> None:
    from steerscope.training.passes import perplexity

    name = f"{run.name}: " if run else ""
    words = f"{name}epoch {line['epoch']}/{epochs}, loss {line['loss']:.3f}"
    if "validation" in line:
        words += f", validation perplexity {perplexity(line['validation']):.2f}"
    bars(run.name if run else "training", int(line["step"]), n_steps, words, log="validation" in line)


def _rows(result: TrainResult) -> list[tuple[str, str]]:
    rows = [("unsteered", f"{result.unsteered:.2f}")]
    if result.prompted is not None:
        rows.append((f"prompted: {result.prompt}", f"{result.prompted:.2f}"))
    return [*rows, (f"steered, epoch {result.best_epoch} of {result.epochs}", f"{result.steered:.2f}")]


def _run_cells(done: "SweepOutcome") -> tuple[str, str, str, str]:
    if done.result is None:
        return done.run.name, f"failed: {done.error}", "", ""
    result = done.result
    norms = ", ".join(f"{norm:.2f}" for norm in result.norms.values())
    return done.run.name, f"{result.steered:.2f}", f"{result.best_epoch} of {result.epochs}", norms
