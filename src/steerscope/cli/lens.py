"""`steerscope lens`: train lenses on concepts, and look at what a pack holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerscope.cli import options as o
from steerscope.cli.progress import Steps

if TYPE_CHECKING:
    from steerscope.lenses import Pack

app = typer.Typer(
    no_args_is_help=True, help="Train lenses for concepts, look at packs of them, and watch a model with them."
)


@app.command()
def fit(
    out: Annotated[Path, typer.Option(help="The folder of the pack; rows are kept beside it in OUT.work.")],
    layers: Annotated[
        str,
        typer.Option("--layers", "--layer", help="12, or candidates (8-16 or 8,12,16): validation texts choose one."),
    ],
    model: o.ModelName = "smollm2-135m",
    concepts: Annotated[Path | None, typer.Option(help="Concepts with texts (.jsonl); default: those shipped.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same lenses from the same rows.")] = 0,
    linear: Annotated[bool, typer.Option("--linear", help="Linear probes instead of two hidden layers.")] = False,
    epochs: Annotated[int | None, typer.Option(help="Most epochs; each lens stops when it is at its best.")] = None,
    generate: Annotated[int, typer.Option(help="Train also on this many texts per concept that the model writes.")] = 0,
    fold: Annotated[int, typer.Option(help="Which forms of text are held out, 0–3.")] = 0,
    shuffled_control: Annotated[
        bool, typer.Option("--shuffled-control", help="Fit once more with labels exchanged: must end near 0.5.")
    ] = False,
    work: Annotated[Path | None, typer.Option(help="Where rows are kept; default: OUT.work.")] = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    engine_name: o.EngineName = "hf",
    max_batch: o.MaxBatch = None,
) -> None:
    """Train a lens for every concept and write a pack. What was interrupted goes on where it stopped.

    Example: steerscope lens fit --layers 16 --out pack
    """
    from steerscope.training.concepts import load_concepts
    from steerscope.training.lenses import LensSettings, fit_pack

    given = {"seed": seed, "generate": generate, "fold": fold, "control": shuffled_control}
    given |= {"name": out.name, "device": device}
    asked = {**({"widths": ()} if linear else {}), **({"epochs": epochs} if epochs is not None else {})}
    known, settings = o.together(
        lambda: load_concepts(concepts),
        lambda: LensSettings.parse({**given, "layers": _layers(layers), "fit": asked}),
    )
    with o.open_engine(model, device, dtype, engine_name, max_batch) as engine, Steps() as steps:
        done = fit_pack(engine, known, out, settings, work=work, progress=steps)
    o.table(("", ""), [(name, value) for name, value in _facts(done.pack)])
    typer.echo(f"{out}: {done.pack}")


@app.command()
def show(
    pack: Annotated[Path, typer.Argument(help="A folder that lens fit wrote.")],
    level: Annotated[int | None, typer.Option(help="Show the tree down to this level; default: all.")] = None,
) -> None:
    """Show the concepts of a pack as a tree, with their held-out measures."""
    from rich.console import Console

    from steerscope.lenses import Pack

    found = Pack.load(pack)
    o.table((str(pack), ""), _facts(found))
    Console(width=None if typer.get_text_stream("stdout").isatty() else 200).print(_tree(found, level))


def _layers(text: str) -> list[int]:
    from steerscope.specs.steering import checked_layers

    layers = checked_layers(text, "--layers")
    if layers == "all":
        raise o.mistake("--layers", "all is too many to keep rows of", "name some: 8-16, or 8,12,16")
    return list(layers)


def _facts(pack: "Pack") -> list[tuple[str, str]]:
    info, notes = pack.info, pack.info.training
    widths = ", ".join(map(str, info.architecture.widths)) or "none (linear)"
    facts = {"model": info.model, "layer": f"{info.layer} {info.site}", "lenses": len(pack), "hidden layers": widths}
    named = {
        "median_auroc": "held-out AUROC per token, median",
        "median_text_auroc": "held-out AUROC per text, median",
        "control_median_auroc": "… with shuffled labels, per token",
        "control_median_text_auroc": "… with shuffled labels, per text",
    }
    found = {title: f"{value:.3f}" for key, title in named.items() if isinstance(value := notes.get(key), float)}
    return [(name, str(value)) for name, value in {**facts, **found}.items()]


def _tree(pack: "Pack", deepest: int | None) -> object:
    from rich.markup import escape
    from rich.tree import Tree

    shown = {"auroc": "AUROC", "text_auroc": "per text", "f1": "F1"}
    root = Tree(escape(pack.info.name))
    places = {}
    for i, concept in enumerate(pack.concepts):
        if deepest is not None and concept.level > deepest:
            continue
        measured = ", ".join(
            f"{title} {concept.metrics[key]:.3f}" for key, title in shown.items() if key in concept.metrics
        )
        trail = pack.hierarchy.parents[i]
        label = escape(concept.name) + (f" [dim]{measured}[/dim]" if measured else "")
        places[i] = (places[trail[0]] if trail else root).add(label)
    return root
