"""Steerings and vectors as text: `vector.safetensors@10-14:6;tokens=generated`, and `0.5*a - b/2`.

The file of a steering is the longest prefix that exists, so its path may contain any of the separators.
"""

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steerscope.specs.errors import InvalidRequest
from steerscope.specs.steering import Ablate, Add, Cap, Steering
from steerscope.vectors.files import load
from steerscope.vectors.legacy import load_capping
from steerscope.vectors.vector import SteeringVector

FORMS = (
    "write FILE[@LAYERS][:SCALE], FILE[@LAYERS]:cap=MIN..MAX (one side may be empty), FILE[@LAYERS]:ablate[=KEEP] or "
    "CAPPING_CONFIG.pt#EXPERIMENT, each optionally followed by ;tokens=SELECTOR"
)
_OPERATORS: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True)
class SteerArg:
    path: str
    layers: str | None
    steering: Steering

    @property
    def name(self) -> str:
        return Path(self.path).stem


def parse(text: str, known: Sequence[str] = ()) -> SteerArg:
    """Read a steering from its text; `known` are names of vectors that a server has. Every problem names the text."""
    body, mark, tokens = text.rpartition(";tokens=") if ";tokens=" in text else (text, "", "")
    try:
        named = _known(body, known)
        path, rest = named or split(body)
        match = re.fullmatch(r"(?:@([^@:]+))?(?::(.+))?|(#.*)", rest)
        if match is None:
            raise _unreadable(f"cannot read {rest!r} after {path}")
        ops = (
            _experiment(path, rest[1:])
            if match[3]
            else (_op(path if named else load(path), match[1], match[2] or "1"),)
        )
        if mark:
            ops = tuple(type(op).parse({**op.model_dump(), "tokens": tokens}) for op in ops)
    except InvalidRequest as error:
        raise InvalidRequest(problem.under(f"steer {text!r}") for problem in error.problems) from None
    return SteerArg(path, match[1], Steering.of(*ops))


def joined(args: Sequence[SteerArg]) -> Steering:
    return Steering.of(*(op for arg in args for op in arg.steering.ops))


def _unreadable(what: str) -> InvalidRequest:
    return InvalidRequest.of("", what, FORMS)


def _known(body: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the longest name that the text begins with, and the rest."""
    fitting = [name for name in names if body.startswith(name) and body[len(name) :][:1] in ("", "@", ":")]
    name = max(fitting, key=len, default=None)
    return None if name is None else (name, body[len(name) :])


def split(body: str) -> tuple[str, str]:
    """Return the longest prefix that is a path, and the rest; a slash in the rest means that the path is wrong."""
    for cut in [len(body), *(sign.start() for sign in reversed([*re.finditer("[@:#]", body)]))]:
        path = body[:cut]
        rest = body[cut:]
        if os.path.exists(path) and ("/" not in rest or (rest[0] == "#" and os.path.isfile(path))):
            return path, rest
    path = re.sub(r"(@(all|[\d, -]+))?(:[^:/]*)?$|#[^/]*$", "", body, count=1)
    raise _unreadable(f"there is no file {path!r}")


def _experiment(path: str, name: str) -> tuple[Add | Cap | Ablate, ...]:
    experiments = load_capping(path)
    if name not in experiments:
        raise InvalidRequest.of("", f"{path} has no experiment {name!r}", f"it has {', '.join(experiments)}")
    return tuple(experiments[name].ops)


def _op(vector: SteeringVector | str, layers: str | None, strength: str) -> Add | Cap | Ablate:
    kind, equals, value = strength.partition("=")
    low, dots, high = value.partition("..")
    site = {"site": vector.site} if isinstance(vector, SteeringVector) else {}  # a server knows the site of its vectors
    about = {"vector": vector, "layers": layers, **site}
    try:
        if kind == "cap" and dots:
            bounds = {"min": float(low) if low else None, "max": float(high) if high else None}
            return Cap.parse({**about, **bounds})
        if kind == "ablate":
            return Ablate.parse({**about, "scale": float(value) if equals else 0.0})
        return Add.parse({**about, "scale": float(strength)})
    except InvalidRequest:  # it is a ValueError too
        raise
    except ValueError:
        raise _unreadable(f"{strength!r} is not a strength") from None


# --- expressions


def evaluate(expression: str, vectors: Mapping[str, SteeringVector]) -> SteeringVector:
    """Return the vector that an expression like `0.5*a - b/2` gives; no other syntax is accepted or executed."""
    try:
        result = _value(ast.parse(expression.strip(), mode="eval").body, vectors)
    except (SyntaxError, MemoryError, RecursionError, OverflowError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise InvalidRequest.of(expression, what, "write something like 0.5*a - b/2 + c") from None
    if not isinstance(result, SteeringVector):
        raise InvalidRequest.of(expression, "is a number, not a vector", "use a name that --set gives")
    return result


def _value(node: ast.expr, vectors: Mapping[str, SteeringVector]) -> SteeringVector | float:
    match node:
        case ast.Name(id=name):
            if name not in vectors:
                raise InvalidRequest.of(name, "is not set", f"add --set {name}=FILE")
            return vectors[name]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, vectors)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a = _value(left, vectors)
            b = _value(right, vectors)
            if not _fit(type(sign), a, b):
                what = "cannot be computed with these vectors and numbers"
                raise InvalidRequest.of(ast.unparse(node), what, "add vectors to vectors, and scale vectors by numbers")
            return _OPERATORS[type(sign)](a, b)
    syntax = type(node.op if isinstance(node, ast.BinOp | ast.UnaryOp) else node).__name__
    raise InvalidRequest.of(
        ast.unparse(node), f"{syntax} is not allowed", "use names, numbers, + - * / and parentheses"
    )


def _fit(sign: type[ast.operator], a: SteeringVector | float, b: SteeringVector | float) -> bool:
    if sign is ast.Mult:
        return isinstance(a, float) or isinstance(b, float)
    if sign is ast.Div:
        return isinstance(b, float) and b != 0
    return isinstance(a, float) == isinstance(b, float)
