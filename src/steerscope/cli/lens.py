"""`steerscope lens`: train lenses for concepts, show packs, and watch a model with a pack."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from steerscope.cli import lens_watch
from steerscope.cli import options as o
from steerscope.cli.fields import with_fields
from steerscope.progress import ProgressBars

if TYPE_CHECKING:
    from steerscope.lenses import Pack

app = o.command_group(no_args_is_help=True, help="Train lenses for concepts, show packs, and watch a model with one.")


@app.command()
@with_fields
def fit(
    engine: o.BatchEngine,
    out: Annotated[Path, Option(help="Folder of the pack; rows are kept beside it in OUT.work.")],
    layers: Annotated[
        str,
        Option("--layers", "--layer", help="12, or candidates (8-16 or 8,12,16): the validation texts choose."),
    ],
    model: o.ModelName = "smollm2-135m",
    concepts: Annotated[Path | None, Option(help="Concepts with texts (.jsonl); default: those shipped.")] = None,
    seed: Annotated[int, Option(help="The same seed and rows give the same lenses.")] = 0,
    linear: Annotated[bool, Option("--linear", help="Linear probes instead of two hidden layers.")] = False,
    epochs: Annotated[int | None, Option(help="Maximum number of epochs; the best one is kept.")] = None,
    generate: Annotated[int, Option(help="Texts per concept that the model writes for training.")] = 0,
    fold: Annotated[int, Option(help="Which forms of text are held out, 0–3.")] = 0,
    shuffled_control: Annotated[
        bool, Option("--shuffled-control", help="Fit once more with shuffled labels: expect AUROC near 0.5.")
    ] = False,
    work: Annotated[Path | None, Option(help="Folder of the rows; default: OUT.work.")] = None,
) -> None:
    """Train a lens for every concept and write a pack; an interrupted fit continues.

    Example: steerscope lens fit --layers 16 --out pack
    """
    from steerscope.training.concepts import load_concepts
    from steerscope.training.lenses import LensSettings, fit_pack

    given = {"seed": seed, "generate": generate, "fold": fold, "control": shuffled_control}
    given |= {"name": out.name, "device": engine.values.get("device")}
    asked = {**({"widths": ()} if linear else {}), **({"epochs": epochs} if epochs is not None else {})}
    known, settings = o.together(
        lambda: load_concepts(concepts),
        lambda: LensSettings.parse({**given, "layers": _layers(layers), "fit": asked}),
    )
    with o.open_engine(model, engine) as loaded, ProgressBars() as bars:
        done = fit_pack(loaded, known, out, settings, work=work, progress=bars)
    o.table(("", ""), _facts(done.pack))
    typer.echo(f"{out}: {done.pack}")


@app.command()
def show(
    pack: Annotated[Path, Argument(help="Folder of a pack.")],
    level: Annotated[int | None, Option(help="Deepest level of the tree; default: all.")] = None,
) -> None:
    """Show the concepts of a pack as a tree, with their measures on held-out texts."""
    from rich.console import Console

    from steerscope.lenses import Pack

    found = Pack.load(pack)
    o.table((str(pack), ""), _facts(found))
    Console(width=None if typer.get_text_stream("stdout").isatty() else 200).print(_tree(found, level))


for _command in (lens_watch.watch, lens_watch.report):
    app.command()(_command)


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
