"""`steerscope vectors`: look at vector files, convert, compare and combine them."""

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

import steerscope as ss
from steerscope.cli import options as o

app = typer.Typer(no_args_is_help=True, help="Show, convert, compare and combine steering vectors.")

PersonaKey = Annotated[str | None, typer.Option(help="Of a persona file: a key, or a difference: pos_3-default_1.")]
PersonaDefault = Annotated[Path | None, typer.Option(help="The default_vectors.pt that goes with a persona file.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=FILE", help="A vector of the expression.")]


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A vector in any known format, or a capping config.")]) -> None:
    """Layers, norms and origin of a vector, or the experiments of a capping config."""
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
    o.table((str(file), ""), ((key, str(value)) for key, value in {**facts, **origin}.items() if value is not None))
    norms = ((_layer(k), f"{norm:.6g}", str(vector.directions[k].dtype)) for k, norm in vector.norms().items())
    return o.table(("layer", "norm", "dtype"), norms)


def _caps(steering: "ss.Steering") -> tuple[str, str]:
    from steerscope.specs import VectorData

    vectors = [op.vector for op in steering.ops if isinstance(op.vector, VectorData)]
    return str(len(steering.ops)), ", ".join(str(layer) for vector in vectors for layer in vector.per_layer)


def _layer(layer: int | None) -> str:
    return "shared" if layer is None else str(layer)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A vector in any known format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help=".safetensors, or .gguf for llama.cpp.")],
    key: PersonaKey = None,
    default: PersonaDefault = None,
) -> None:
    """Write a vector in another format."""
    from steerscope.vectors.legacy import load_persona

    vector = ss.load_vector(source) if key is None and default is None else load_persona(source, key, default)
    ss.save_vector(vector, target)
    typer.echo(f"{target}: {vector}")


@app.command()
def compare(paths: Annotated[list[Path], typer.Argument(metavar="A B [C…]")], as_json: o.AsJson = False) -> None:
    """Cosines of two or more vectors, at every layer that all of them have."""
    if len(paths) < 2:
        raise o.mistake("compare", "one vector has nothing to be compared with", "give at least two")
    vectors = [ss.load_vector(path) for path in paths]
    own = [set(vector.layers) for vector in vectors if vector.layers is not None]
    layers = sorted(set.intersection(*own)) if own else None  # None: all are shared
    if layers == []:
        raise o.mistake("compare", "the vectors have no layer in common", "see their layers with vectors show")
    cut = [vector.at(layers) if layers else vector for vector in vectors]
    cosines = {(i, j): cut[i].cosine(cut[j]) for i in range(len(cut)) for j in range(len(cut))}
    if as_json:
        size = range(len(paths))
        matrices = {_layer(k): [[cosines[i, j][k] for j in size] for i in size] for k in cut[0].directions}
        typer.echo(json.dumps({"files": [str(path) for path in paths], "cosine": matrices}))
        return
    pairs = list(combinations(range(len(paths)), 2))
    rows = ((_layer(k), *(f"{cosines[pair][k]:+.4f}" for pair in pairs)) for k in cut[0].directions)
    o.table(("layer", *(f"{paths[i]} · {paths[j]}" for i, j in pairs)), rows)


@app.command(context_settings={"ignore_unknown_options": True})  # so that an expression may start with a minus
def arith(
    out: Annotated[Path, typer.Argument(help="Where the result goes: .safetensors or .gguf.")],
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="For example '0.5*a - b/2 + c'.")],
    sets: Sets = None,
) -> None:
    """Combine vectors with + - * / and numbers."""
    names = {name: file for name, _, file in (text.partition("=") for text in sets or ())}
    if "" in names.values():
        raise o.mistake("--set", "a name has no file", "write --set a=vector.safetensors")
    vectors = {name: ss.load_vector(path) for name, path in names.items()}
    try:
        result = _evaluate(ast.parse(expression.strip(), mode="eval").body, vectors)
    except (SyntaxError, MemoryError, RecursionError, OverflowError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise o.mistake(expression, what, "write something like 0.5*a - b/2 + c") from None
    if not isinstance(result, ss.SteeringVector):
        raise o.mistake(expression, "is a number, not a vector", "use a name that --set gives")
    ss.save_vector(replace(result, method=expression, provenance={"name": out.stem, "files": dict(names)}), out)
    typer.echo(f"{out}: {result}")


_OPERATORS: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluate(node: ast.expr, vectors: "Mapping[str, ss.SteeringVector]") -> "ss.SteeringVector | float":
    """The value of a checked syntax tree: what is not listed here is refused by name, and nothing is executed."""
    match node:
        case ast.Name(id=name):
            if name not in vectors:
                raise o.mistake(name, "is not set", f"add --set {name}=FILE")
            return vectors[name]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner, vectors)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a, b = _evaluate(left, vectors), _evaluate(right, vectors)
            numbers = isinstance(a, float), isinstance(b, float)
            fits = {ast.Mult: any(numbers), ast.Div: numbers[1] and b != 0}.get(type(sign), numbers[0] == numbers[1])
            if not fits:
                what = "cannot be computed with these vectors and numbers"
                raise o.mistake(ast.unparse(node), what, "add vectors to vectors, and scale vectors by numbers")
            return _OPERATORS[type(sign)](a, b)
    named = type(node.op if isinstance(node, ast.BinOp | ast.UnaryOp) else node).__name__
    raise o.mistake(ast.unparse(node), f"{named} is not allowed", "use names, numbers, + - * / and parentheses")
