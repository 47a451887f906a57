"""`steerscope vectors`: make vectors from contrast data; show, convert, compare and combine vector files."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.specs.steering import Site

if TYPE_CHECKING:
    import numpy as np

    from steerscope.analysis.compare import Comparison
    from steerscope.extraction import Examples

app = o.command_group(no_args_is_help=True, help="Make steering vectors; show, convert, compare and combine them.")
_MOST_PAIRED = 4  # more vectors are shown as one matrix


@app.command()
def show(file: Annotated[Path, Argument(help="A vector in any known format, or a capping config.")]) -> None:
    """Show the layers, norms and origin of a vector, or the experiments of a capping config."""
    from steerscope.specs.errors import BadFile
    from steerscope.vectors.legacy import load_capping

    try:
        vector = ss.load_vector(file)
    except BadFile as error:
        try:
            experiments = load_capping(file)
        except BadFile:
            raise error from None
        return o.table(("experiment", "caps", "layers"), ((name, *_caps(caps)) for name, caps in experiments.items()))
    facts = {"site": vector.site, "hidden": vector.hidden, "model": vector.model, "method": vector.method}
    origin = {f"provenance: {key}": json.dumps(value) for key, value in vector.provenance.items()}
    o.facts(str(file), {**facts, **origin})
    norms = ((_layer(k), f"{norm:.6g}", str(vector.directions[k].dtype)) for k, norm in vector.norms().items())
    return o.table(("layer", "norm", "dtype"), norms)


def _caps(steering: "ss.Steering") -> tuple[str, str]:
    from steerscope.specs import VectorData

    vectors = [op.vector for op in steering.ops if isinstance(op.vector, VectorData)]
    return str(len(steering.ops)), ", ".join(str(layer) for vector in vectors for layer in vector.per_layer)


def _layer(layer: int | None) -> str:
    return "shared" if layer is None else str(layer)


@app.command()
@o.with_fields
def extract(
    engine: o.BatchEngine,
    data: Annotated[str, Option(help="A shipped set (happy_sad, calm_angry, hot_cold) or a .jsonl file.")],
    out: Annotated[Path, Option(help="File of the vector: .safetensors or .gguf.")],
    model: o.ModelName = "smollm2-135m",
    heldout: Annotated[
        Path | None, Option(help="A .jsonl file to measure on; default: a shipped set's own, or folds.")
    ] = None,
    strategy: Annotated[
        str, Option(help="mean_difference, paired_pca, centred_pca, logistic_probe or whitened.")
    ] = "mean_difference",
    tokens: Annotated[str, Option(help="last, last=3, all, response, marker=TEXT or position=-2.")] = "last=3",
    layers: Annotated[str, Option(help="12, 10-14, 4,8 or all.")] = "all",
    site: Annotated[Site, Option(help="Site of the rows.")] = "resid_post",
    as_json: o.AsJson = False,
) -> None:
    """Make a vector from contrasting texts, and measure its quality at each layer.

    Example: steerscope vectors extract --data happy_sad --out happy.safetensors
    """
    from steerscope.extraction import extract as run
    from steerscope.extraction import load_examples
    from steerscope.extraction.reading import parse_choice
    from steerscope.extraction.strategies import strategy as strategy_of
    from steerscope.specs.steering import checked_layers
    from steerscope.vectors.files import check_target

    (examples, apart), other, *_, wanted = o.together(
        lambda: _examples(data),
        lambda: load_examples(heldout) if heldout else None,
        lambda: strategy_of(strategy),
        lambda: parse_choice(tokens),
        lambda: checked_layers(layers),
    )
    check_target(out, wanted, site)
    with o.open_engine(model, engine) as loaded:
        asked = {"strategy": strategy, "tokens": tokens, "layers": layers, "name": Path(data).stem}
        found = run(loaded, examples, heldout=other or apart, site=site, **asked)
    ss.save_vector(found.vector, out)
    if as_json:
        best = {"file": str(out), "layer": found.layer, "scale": found.scale}
        typer.echo(json.dumps({**best, "quality": [asdict(one) for one in found.quality]}))
        return
    head = ("layer", "AUROC", "effect", "halves", "shuffled", "random")
    o.table(head, ((str(one.layer), *(f"{x:.3f}" for x in astuple(one)[1:])) for one in found.quality))
    typer.echo(f"{out}: {found.vector}")
    typer.echo(f"try --steer {out}@{found.layer}:{found.scale:.3g}, and :-{found.scale:.3g} for the opposite")


def _examples(data: str) -> "tuple[Examples, Examples | None]":
    """Return the examples of a shipped set and its held-out ones, or those of a file."""
    from steerscope.extraction import Examples, load_contrast_set, load_examples
    from steerscope.extraction.data import shipped_sets

    if data in shipped_sets():
        found = load_contrast_set(data)
        return Examples.of_pairs(found.extraction), Examples.of_pairs(found.heldout)
    if not Path(data).is_file():
        raise o.mistake(data, "is no file and no shipped set", f"sets are {', '.join(shipped_sets())}")
    return load_examples(data), None


@app.command()
def convert(
    source: Annotated[Path, Argument(metavar="IN", help="A vector in any known format.")],
    target: Annotated[Path, Argument(metavar="OUT", help=".safetensors, or .gguf for llama.cpp.")],
    key: Annotated[str | None, Option(help="Key in a persona file, or a difference of two: pos_3-default_1.")] = None,
    default: Annotated[Path | None, Option(help="The default_vectors.pt that belongs to a persona file.")] = None,
) -> None:
    """Write a vector in another format."""
    from steerscope.vectors.legacy import load_persona

    vector = ss.load_vector(source) if key is None and default is None else load_persona(source, key, default)
    ss.save_vector(vector, target)
    typer.echo(f"{target}: {vector}")


@app.command()
def compare(
    paths: Annotated[list[Path], Argument(metavar="A B… | DIR…", help="Vectors, or folders of them.")],
    out: Annotated[Path | None, Option(help="A folder for index.html and the numbers as Parquet.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Compare vectors layer by layer; with --out also norms, clusters and a page."""
    from steerscope.analysis import compare as c

    found = _compared(paths)
    if out:
        from steerscope.analysis.report import comparison_page
        from steerscope.files import write_text

        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "index.html", comparison_page(found))
        written = [out / "index.html", *c.save_tables(found, out)]
        o.note(f"written: {', '.join(map(str, written))}")
    if as_json:
        matrices = {_layer(k): _plain(matrix) for k, matrix in zip(found.layers, found.cosine, strict=True)}
        typer.echo(json.dumps({"files": found.names, "cosine": matrices, "clusters": found.clusters}))
    elif len(found.names) > _MOST_PAIRED:
        o.table(("mean cosine", *map(str, range(len(found.order)))), _matrix(found.names, found.mean, found.order))
    else:
        pairs = list(combinations(range(len(found.names)), 2))
        rows = (
            (_layer(k), *(_signed(cosine[pair]) for pair in pairs))
            for k, cosine in zip(found.layers, found.cosine, strict=True)
        )
        o.table(("layer", *(f"{found.names[i]} · {found.names[j]}" for i, j in pairs)), rows)


def _compared(paths: list[Path]) -> "Comparison":
    """Compare the vectors of all files; files of folders without a vector are skipped with a note."""
    from steerscope.analysis import compare as c

    asked = c.vector_files(paths)
    loaded = o.together(*(partial(c.load_found, file, named) for file, named in asked))
    left_out = [str(vector) for vector in loaded if isinstance(vector, ss.SteerscopeError)]
    if left_out:
        more = f", and {len(left_out) - 1} more files" if len(left_out) > 1 else ""
        o.note(f"left out, as no vector was found in it: {left_out[0]}{more}")
    vectors = {i: vector for i, vector in enumerate(loaded) if isinstance(vector, ss.SteeringVector)}
    return c.compare([str(asked[i][0]) for i in vectors], list(vectors.values()))


def _matrix(names: Sequence[str], mean: "np.ndarray", order: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for number, i in enumerate(order):
        yield f"{number}  {names[i]}", *(_signed(mean[i, j]) for j in order)


def _signed(cosine: float) -> str:
    return "—" if math.isnan(cosine) else f"{cosine:+.4f}"


def _plain(matrix: "np.ndarray") -> list[list[float | None]]:
    return [[None if math.isnan(x) else x for x in row] for row in matrix.tolist()]


@app.command(context_settings={"ignore_unknown_options": True})  # so that an expression may start with a minus
def arith(
    expression: Annotated[str, Argument(metavar="EXPR", help="For example '0.5*a - b/2 + c'.")],
    out: Annotated[Path, Option(help="File of the result: .safetensors or .gguf.")],
    sets: Annotated[
        list[str] | None, Option("--set", metavar="NAME=FILE", help="A vector of the expression; repeatable.")
    ] = None,
) -> None:
    """Combine vectors with + - * / and numbers.

    Example: steerscope vectors arith 'a - b/2' --set a=happy.safetensors --set b=calm.safetensors --out c.safetensors
    """
    from steerscope.vectors.text import evaluate

    names = {name: file for name, _, file in (text.partition("=") for text in sets or ())}
    if "" in names.values():
        raise o.mistake("--set", "a name has no file", "write --set a=vector.safetensors")
    result = evaluate(expression, {name: ss.load_vector(path) for name, path in names.items()})
    ss.save_vector(replace(result, method=expression, provenance={"name": out.stem, "files": dict(names)}), out)
    typer.echo(f"{out}: {result}")
