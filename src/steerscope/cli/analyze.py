"""`steerscope analyze`: directions and weights. Commands write results into a folder, `report` makes a page of them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field
from typer import Argument, Option

from steerscope.cli import options as o
from steerscope.progress import ProgressBars
from steerscope.specs.base import Spec

if TYPE_CHECKING:
    from steerscope.analysis.checkpoint import Checkpoint
    from steerscope.analysis.directions import Directions
    from steerscope.analysis.results import AnalysisResult

app = o.command_group(
    no_args_is_help=True, help="Analyze directions in weights: components, susceptibility, MLPs, attention."
)


class DirectionOptions(Spec):
    """Options of all analyses that compare directions with random ones."""

    layer: int | None = Field(default=None, description="Use the directions of this layer at every layer.")
    random: int = Field(default=1024, description="Number of random directions to compare with.")
    seed: int = Field(default=0, description="Seed of the random directions.")
    device: str = Field(default="cpu", description="cpu or cuda.")
    against: tuple[Path, ...] = Field(
        default=(), description="Vectors to compare with, besides random ones; repeatable."
    )


Compared = Annotated[o.Given[DirectionOptions], o.Fields(DirectionOptions)]
Vectors = Annotated[list[Path], Argument(metavar="VECTORS…", help="Vector files, or folders of them.")]
Out = Annotated[Path, Option(help="Folder for the results (Parquet and JSON) and their page.")]
Base = Annotated[str, Argument(help="smollm2-135m, a model directory, or a hub id.")]
Tuned = Annotated[str | None, Option(help="The same model after training, to compare with.")]


def finish(
    results: "Iterable[AnalysisResult]", out: Path, as_json: bool, rows: list[dict], shown: Mapping[str, str]
) -> None:
    """Save results and print their main rows as a table; `shown` maps a column to its format."""
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
    components: Annotated[int, Option(help="Number of principal components.")] = 5,
    positive: Annotated[str | None, Option(help="Vector on the positive side of the components.")] = None,
    project: Annotated[list[Path] | None, Option(help="Vectors to project on the components.")] = None,
    random: Annotated[int, Option(help="Number of random sets to compare with.")] = 20,
    seed: Annotated[int, Option(help="Seed of the random sets.")] = 0,
    as_json: o.AsJson = False,
) -> None:
    """Find the principal components of a set of vectors, save them as vectors, and project other vectors on them."""
    from steerscope.analysis import directions as d
    from steerscope.analysis.report import extremes
    from steerscope.vectors.files import save

    named, others = o.together(
        lambda: d.load_directions(vectors, o.note), lambda: d.load_directions(project, o.note) if project else None
    )
    found = d.components(named, components, positive=positive, draws=random, seed=seed)
    results = [found.result(), *([d.project(others, named)] if others else [])]
    folder = out / "components"
    folder.mkdir(parents=True, exist_ok=True)
    for name, vector in found.vectors().items():
        save(vector, folder / f"{name}.safetensors")
    shown = {"layer": "", "component": "", "variance": ".1%", "chance_high": ".1%", "lowest": "", "highest": ""}
    finish(results, out, as_json, extremes(results[0]), shown)


@app.command()
@o.with_fields
def susceptibility(
    base: Base,
    tuned: Annotated[str, Argument(help="The same model after training.")],
    vectors: Vectors,
    out: Out,
    options: Annotated[o.Given[DirectionOptions], o.Fields(DirectionOptions, random=200)],
    as_json: o.AsJson = False,
) -> None:
    """Measure how far the weights of each layer changed along directions, between two checkpoints of one model.

    Example: steerscope analyze susceptibility base/ tuned/ happy.safetensors --out report
    """
    from steerscope.analysis import susceptibility as s
    from steerscope.analysis.report import strongest

    first, second, named, settings = _opened(base, tuned, vectors, options)
    assert second is not None
    with ProgressBars() as bars:
        result = s.susceptibility(first, second, named, progress=bars, **settings)
    shown = {"direction": "", "layer": "", "matrix": "", "side": "", "alignment": ".3f", "chance": ".3f", "z": "+.1f"}
    finish([result], out, as_json, strongest(result), {**shown, "p": ".3f"})


@app.command()
def report(
    folder: Annotated[Path, Argument(help="Folder of results.")],
) -> None:
    """Write a page about all results of a folder, index.html in it."""
    from steerscope.analysis.report import analysis_page
    from steerscope.analysis.results import load_results
    from steerscope.files import write_text

    write_text(folder / "index.html", analysis_page(load_results(folder)))
    typer.echo(folder / "index.html")


@app.command()
@o.with_fields
def mlp(
    base: Base,
    vectors: Vectors,
    out: Out,
    options: Compared,
    tuned: Tuned = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure what the MLP of every layer does to directions; with --tuned, how that changed."""
    from steerscope.analysis.layerwise import mlp_pass

    first, second, named, settings = _opened(base, tuned, vectors, options)
    with ProgressBars() as bars:
        result = mlp_pass(first, named, second, progress=bars, **settings)
    shown = {"measure": "", "rank": "", "name": "", "group": "", "mean": ".4g", "std": ".3g", "max": ".4g"}
    rows = [row for row in result.tables["ranking"].to_pylist() if row["rank"] <= 5]
    finish([result], out, as_json, rows, {**shown, "max_layer": ""})


@app.command()
@o.with_fields
def attention(
    base: Base,
    vectors: Vectors,
    out: Out,
    options: Compared,
    tuned: Tuned = None,
    distance: Annotated[int, Option(help="Positions between query and key; 0 ignores RoPE.")] = 0,
    as_json: o.AsJson = False,
) -> None:
    """Measure which directions attend to which in every layer and head; with --tuned, how that changed."""
    from steerscope.analysis.attention import attention_pass

    first, second, named, settings = _opened(base, tuned, vectors, options)
    with ProgressBars() as bars:
        result = attention_pass(first, named, second, distance=distance, progress=bars, **settings)
    by = "z_change" if tuned else "z"
    value = "change" if tuned else "affinity"
    rows = [row for row in result.tables["top"].to_pylist() if row["by"] == by][:10]
    finish([result], out, as_json, rows, {"layer": "", "head": "", "query": "", "key": "", value: "+.3f", by: "+.1f"})


def _opened(
    base: str, tuned: str | None, vectors: list[Path], options: o.Given[DirectionOptions]
) -> "tuple[Checkpoint, Checkpoint | None, Directions, dict[str, Any]]":
    """Return both checkpoints, the directions, and the settings of an analysis."""
    from steerscope.analysis.checkpoint import Checkpoint
    from steerscope.analysis.directions import load_directions

    against = options.values.get("against")
    first, second, named, others, _ = o.together(
        lambda: Checkpoint(base),
        lambda: Checkpoint(tuned) if tuned else None,
        lambda: load_directions(vectors, o.note),
        lambda: load_directions(against, o.note) if against else None,
        lambda: o.check_device(options.values["device"]),
    )
    return first, second, named, {**options.values, "against": others}
