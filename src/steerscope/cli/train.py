"""`steerscope train`: learn a steering vector by gradient descent; `train sweep`: many, over rates, layers and sets."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from steerscope.cli import options as o
from steerscope.cli.progress import Steps

if TYPE_CHECKING:
    from steerscope.training.settings import TrainResult, TrainSettings
    from steerscope.training.sweep import SweepRun
    from steerscope.training.vectors import Line

app = typer.Typer(invoke_without_command=True)

_DATA = "A shipped set (nostalgic), or a .jsonl file of chats, texts, or pairs."
_INIT = "zero, mean-diff (of pairs), or a vector file to begin with."
_PROMPTED = "What the prompted baseline is told; default: what a shipped set brings. May be repeated."
_LAYERS = "12, or several that learn together: 10-14, 4,8."
Site = Annotated[
    Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"], typer.Option(help="Where it is added.")
]
TokensOption = Annotated[str, typer.Option(help="Which tokens are steered: all, generated, prompt, …")]
Rank = Annotated[int, typer.Option(help="Learn also this many directions to scale, beside the one that is added.")]
Schedule = Annotated[Literal["cosine", "constant"], typer.Option(help="What the rate does over the steps.")]
Epochs = Annotated[int, typer.Option(help="Most times each text is seen.")]
Batch = Annotated[int, typer.Option(help="Texts per step.")]
TargetTokens = Annotated[int | None, typer.Option(help="Learn from this many tokens; default: all.")]
ValTokens = Annotated[int | None, typer.Option(help="Judge on this many tokens; default: the set's, or a tenth.")]
Patience = Annotated[
    int | None, typer.Option("--early-stop-patience", help="Stop after so many epochs without a better.")
]
Checkpointing = Annotated[bool, typer.Option("--gradient-checkpointing", help="Less memory for more time.")]
Init = Annotated[str, typer.Option(help=_INIT)]
Prompted = Annotated[list[str] | None, typer.Option(help=_PROMPTED)]
Bf16 = Annotated[bool, typer.Option("--bf16", help="The same as --dtype bfloat16.")]
Seed = Annotated[int, typer.Option(help="Of the order of texts, and of what is held out.")]


@app.callback()
def train(
    context: typer.Context,
    data: Annotated[str | None, typer.Option(help=_DATA)] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; an interrupted one goes on.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", "--layer", help=_LAYERS)] = None,
    model: o.ModelName = "smollm2-135m",
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1.0,
    schedule: Schedule = "cosine",
    epochs: Epochs = 6,
    batch: Batch = 8,
    target_tokens: TargetTokens = None,
    val_tokens: ValTokens = None,
    patience: Patience = None,
    init: Init = "zero",
    site: Site = "resid_post",
    tokens: TokensOption = "all",
    rank: Rank = 0,
    prompted: Prompted = None,
    gradient_checkpointing: Checkpointing = False,
    dtype: o.Dtype = None,
    bf16: Bf16 = False,
    seed: Seed = 0,
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Learn a steering vector from texts by gradient descent; the model itself stays as it is.

    Example: steerscope train --data nostalgic --layers 18 --epochs 3 --out run
    """
    dtype = "bfloat16" if bf16 else dtype
    given = locals()
    if context.invoked_subcommand is not None:
        return
    from steerscope.training.texts import load_training_set
    from steerscope.training.vectors import train as run

    known, settings, folder = o.together(
        lambda: load_training_set(_needed("--data", data)),
        lambda: _settings(given, learning_rate=lr, layers=_needed("--layers", layers)),
        lambda: _needed("--out", out),
    )
    with o.open_engine(model, device, dtype) as engine, Steps() as steps:
        told = tuple(prompted) if prompted else None
        done = run(
            engine, known, folder, settings, prompts=told, told=lambda line, most: _tell(steps, line, most, epochs)
        )
    if as_json:
        typer.echo(done.result.to_json())
        return
    o.table((str(folder), "validation perplexity"), _rows(done.result))
    size = (folder / "vector.safetensors").stat().st_size
    typer.echo(f"{folder / 'vector.safetensors'} ({size} bytes): {done.vector}")
    where = "" if tokens == "all" else f";tokens={tokens}"
    typer.echo(f"try --steer '{folder / 'vector.safetensors'}{where}'")


@app.command()
def sweep(
    data: Annotated[list[str], typer.Option(help=f"{_DATA} May be repeated.")],
    out: Annotated[Path, typer.Option(help="Runs go to OUT/MODEL/SET/RUN; what is finished there is skipped.")],
    layers: Annotated[
        list[str], typer.Option("--layers", "--layer", help=f"{_LAYERS} Each time it is given is a run.")
    ],
    lr: Annotated[str, typer.Option(help="Learning rates: 0.03,0.1,0.3.")],
    model: o.ModelName = "smollm2-135m",
    schedule: Schedule = "cosine",
    epochs: Epochs = 6,
    batch: Batch = 8,
    target_tokens: TargetTokens = None,
    val_tokens: ValTokens = None,
    patience: Patience = None,
    init: Init = "zero",
    site: Site = "resid_post",
    tokens: TokensOption = "all",
    rank: Rank = 0,
    prompted: Prompted = None,
    gradient_checkpointing: Checkpointing = False,
    dtype: o.Dtype = None,
    bf16: Bf16 = False,
    seed: Seed = 0,
    devices: Annotated[str | None, typer.Option(help="cuda:0,cuda:1; default: all GPUs, or the CPU.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Train with every rate at every layer on every set, with one loaded model per device."""
    dtype = "bfloat16" if bf16 else dtype
    given = locals()
    from steerscope.training import sweep as s
    from steerscope.training.texts import load_training_set

    rates, *known = o.together(lambda: _rates(lr), *(partial(load_training_set, one) for one in data))
    settings = o.together(
        *(partial(_settings, given, learning_rate=rate, layers=one) for one in layers for rate in rates)
    )
    runs = s.plan(out, model, known, settings)
    told = tuple(prompted) if prompted else None
    with Steps() as steps:
        done = s.sweep(
            runs,
            lambda device: o.open_engine(model, device, dtype),
            devices.split(",") if devices else _all_devices(),
            prompts=told,
            told=lambda run, line, most: _tell(steps, line, most, epochs, run),
        )
    failed = [one for one in done if one.error is not None]
    if as_json:
        typer.echo((runs[0].folder.parent.parent / "sweep.json").read_text(encoding="utf-8"), nl=False)
    else:
        cells = [
            (one.run.name, *(_cells(one.result) if one.result else (f"failed: {one.error}", "", ""))) for one in done
        ]
        o.table(("run", "steered", "best epoch", "norm"), cells)
        typer.echo(f"{runs[0].folder.parent.parent / 'sweep.svg'}")
    if failed:
        raise typer.Exit(1)


T = TypeVar("T")


def _needed(name: str, value: T | None) -> T:
    """The options of a command that has a command below it cannot be required ones."""
    if value is None:
        raise o.mistake(name, "is missing", "give it; steerscope train --help tells all")
    return value


def _settings(given: Mapping[str, Any], **more: object) -> "TrainSettings":
    """From the options of a command, which are named like the fields."""
    from steerscope.training.settings import TrainSettings

    return TrainSettings.parse({name: given[name] for name in TrainSettings.model_fields if name in given} | more)


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise o.mistake("--lr", f"cannot read {text!r}", "write 0.03,0.1,0.3") from None


def _all_devices() -> list[str | None]:
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or [None]


def _tell(steps: Steps, line: "Line", most: int, epochs: int, run: "SweepRun | None" = None) -> None:
    from steerscope.training.learnable import perplexity

    name = f"{run.name}: " if run else ""
    words = f"{name}epoch {line['epoch']}/{epochs}, loss {line['loss']:.3f}"
    if "validation" in line:
        words += f", validation perplexity {perplexity(line['validation']):.2f}"
        if not sys.stderr.isatty():
            o.note(words)
    steps(run.name if run else "training", int(line["step"]), most, words)


def _rows(result: "TrainResult") -> list[tuple[str, str]]:
    rows = [("unsteered", f"{result.unsteered:.2f}")]
    if result.prompted is not None:
        rows.append((f"prompted: {result.prompt}", f"{result.prompted:.2f}"))
    return [*rows, (f"steered, epoch {result.best_epoch} of {result.epochs}", f"{result.steered:.2f}")]


def _cells(result: "TrainResult") -> tuple[str, str, str]:
    norms = ", ".join(f"{norm:.2f}" for norm in result.norms.values())
    return f"{result.steered:.2f}", f"{result.best_epoch} of {result.epochs}", norms
