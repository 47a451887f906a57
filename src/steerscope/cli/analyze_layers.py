"""`steerscope analyze mlp` and `attention`: directions through the layers of one checkpoint, or of two."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steerscope.cli import options as o
from steerscope.cli.analyze import Against, Base, Device, Out, Seed, Vectors, finish
from steerscope.cli.progress import Steps

if TYPE_CHECKING:
    from steerscope.analysis.checkpoint import Checkpoint
    from steerscope.analysis.directions import Directions

Tuned = Annotated[str | None, typer.Option(help="The same model after training, to compare with.")]
Layer = Annotated[int | None, typer.Option(help="Take the directions of this layer everywhere.")]
Random = Annotated[int, typer.Option(help="Random directions to compare with.")]


def register(app: typer.Typer) -> None:
    app.command()(mlp)
    app.command()(attention)


def mlp(
    base: Base,
    vectors: Vectors,
    out: Out,
    tuned: Tuned = None,
    layer: Layer = None,
    against: Against = None,
    random: Random = 1024,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: o.AsJson = False,
) -> None:
    """See what the MLP of every layer makes of directions; with --tuned, how that changed."""
    from steerscope.analysis.mlp import mlp_pass

    first, second, named, others = _opened(base, tuned, vectors, against, device)
    with Steps() as steps:
        asked = {"layer": layer, "random": random, "seed": seed, "device": device}
        result = mlp_pass(first, named, second, against=others, progress=steps, **asked)
    shown = {"measure": "", "rank": "", "name": "", "group": "", "mean": ".4g", "std": ".3g", "max": ".4g"}
    rows = [row for row in result.tables["ranking"].to_pylist() if row["rank"] <= 5]
    finish([result], out, as_json, rows, {**shown, "max_layer": ""})


def attention(
    base: Base,
    vectors: Vectors,
    out: Out,
    tuned: Tuned = None,
    layer: Layer = None,
    distance: Annotated[int, typer.Option(help="Positions between query and key; 0 is without RoPE.")] = 0,
    against: Against = None,
    random: Random = 1024,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: o.AsJson = False,
) -> None:
    """See which directions look at which in every layer and head; with --tuned, how that changed."""
    from steerscope.analysis.attention import attention_pass
    from steerscope.analysis.report import self_significance

    first, second, named, others = _opened(base, tuned, vectors, against, device)
    with Steps() as steps:
        asked = {"layer": layer, "distance": distance, "random": random, "seed": seed, "device": device}
        result = attention_pass(first, named, second, against=others, progress=steps, **asked)
    if said := self_significance(result):
        o.note(said)
    by = "z_change" if tuned else "z"
    value = "change" if tuned else "affinity"
    rows = [row for row in result.tables["top"].to_pylist() if row["by"] == by][:10]
    finish([result], out, as_json, rows, {"layer": "", "head": "", "query": "", "key": "", value: "+.3f", by: "+.1f"})


def _opened(
    base: str, tuned: str | None, vectors: list[Path], against: list[Path] | None, device: str
) -> "tuple[Checkpoint, Checkpoint | None, Directions, Directions | None]":
    from steerscope.analysis.checkpoint import Checkpoint
    from steerscope.analysis.directions import load_directions

    first, second, named, others, _ = o.together(
        lambda: Checkpoint(base),
        lambda: Checkpoint(tuned) if tuned else None,
        lambda: load_directions(vectors, o.note),
        lambda: load_directions(against, o.note) if against else None,
        lambda: o.check_device(device),
    )
    return first, second, named, others
