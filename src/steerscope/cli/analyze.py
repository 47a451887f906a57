"""`steerscope analyze`: how directions meet weights. Commands write results into a folder, `report` makes its page."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerscope.cli import options as o
from steerscope.cli.progress import Steps

if TYPE_CHECKING:
    from steerscope.analysis.results import AnalysisResult

app = typer.Typer(
    no_args_is_help=True, help="See how directions meet weights: components, susceptibility, MLPs, attention."
)

Vectors = Annotated[list[Path], typer.Argument(metavar="VECTORS…", help="Vector files, or folders of them.")]
Out = Annotated[Path, typer.Option(help="Folder for the results (Parquet and JSON), and for the page of report.")]
Base = Annotated[str, typer.Argument(help="smollm2-135m, a model directory, or a hub id.")]
Tuned = Annotated[str, typer.Argument(help="The same model after training.")]
Against = Annotated[list[Path] | None, typer.Option(help="Vectors to compare with besides random ones.")]
Seed = Annotated[int, typer.Option(help="Seed of the random directions.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def finish(
    results: "Iterable[AnalysisResult]", out: Path, as_json: bool, rows: list[dict], shown: Mapping[str, str]
) -> None:
    """What every command ends with: files, and its main rows as a table (`shown`: column → how it is written)."""
    written = [path for result in results for path in result.save(out)]
    o.note(f"written: {', '.join(map(str, written))}; for a page: steerscope analyze report {out}")
    if as_json:
        typer.echo(json.dumps({"out": str(out), "rows": rows}))
        return
    o.table(shown, ([_cell(row[name], form) for name, form in shown.items()] for row in rows))


def _cell(value: object, form: str) -> str:
    return "—" if value is None else format(value, form)


@app.command()
def directions(
    vectors: Vectors,
    out: Out,
    components: Annotated[int, typer.Option(help="How many principal components.")] = 5,
    positive: Annotated[str | None, typer.Option(help="A vector that is to lie on the positive side of all.")] = None,
    project: Annotated[list[Path] | None, typer.Option(help="Vectors to explain by the others.")] = None,
    random: Annotated[int, typer.Option(help="Random sets to compare with.")] = 20,
    seed: Seed = 0,
    as_json: o.AsJson = False,
) -> None:
    """Find the principal components of a set of vectors, to look at and to steer with; project others on them."""
    from steerscope.analysis import directions as d
    from steerscope.analysis import projections
    from steerscope.analysis.report import extremes
    from steerscope.vectors.files import save

    named, others = o.together(
        lambda: d.load_directions(vectors, o.note), lambda: d.load_directions(project, o.note) if project else None
    )
    found = d.components(named, components, positive=positive, draws=random, seed=seed)
    results = [found.result(), *([projections.project(others, named)] if others else [])]
    folder = out / "components"
    folder.mkdir(parents=True, exist_ok=True)
    for name, vector in found.vectors().items():
        save(vector, folder / f"{name}.safetensors")
    shown = {"layer": "", "component": "", "variance": ".1%", "chance_high": ".1%", "lowest": "", "highest": ""}
    finish(results, out, as_json, extremes(results[0]), shown)


@app.command()
def susceptibility(
    base: Base,
    tuned: Tuned,
    vectors: Vectors,
    out: Out,
    layer: Annotated[int | None, typer.Option(help="Take the directions of this layer everywhere.")] = None,
    against: Against = None,
    random: Annotated[int, typer.Option(help="Random directions to compare with.")] = 200,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: o.AsJson = False,
) -> None:
    """Measure how far the weights of each layer changed along directions, between two checkpoints of one model.

    Example: steerscope analyze susceptibility base/ tuned/ happy.safetensors --out report
    """
    from steerscope.analysis import susceptibility as s
    from steerscope.analysis.checkpoint import Checkpoint
    from steerscope.analysis.directions import load_directions
    from steerscope.analysis.report import strongest

    first, second, named, others, _ = o.together(
        lambda: Checkpoint(base),
        lambda: Checkpoint(tuned),
        lambda: load_directions(vectors, o.note),
        lambda: load_directions(against, o.note) if against else None,
        lambda: o.check_device(device),
    )
    with Steps() as steps:
        asked = {"layer": layer, "random": random, "seed": seed, "device": device}
        result = s.susceptibility(first, second, named, against=others, progress=steps, **asked)
    shown = {"direction": "", "layer": "", "matrix": "", "side": "", "alignment": ".3f", "chance": ".3f", "z": "+.1f"}
    finish([result], out, as_json, strongest(result), {**shown, "p": ".3f"})


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Where results of the other commands are.")],
) -> None:
    """Write one page, index.html in the same folder, about all results there."""
    from steerscope.analysis.report import analysis_page
    from steerscope.analysis.results import load_results
    from steerscope.files import atomic_path

    made = analysis_page(load_results(folder))
    with atomic_path(folder / "index.html") as page:
        page.write_text(made, encoding="utf-8")
    typer.echo(folder / "index.html")
