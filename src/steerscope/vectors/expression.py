"""Vectors combined by an expression of names, numbers, + - * / and parentheses."""

import ast
import operator
from collections.abc import Callable, Mapping

from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.vectors.vector import SteeringVector

_OPERATORS: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str, vectors: Mapping[str, SteeringVector]) -> SteeringVector:
    """Return the vector that an expression like `0.5*a - b/2` gives; no other syntax is accepted or executed."""
    try:
        result = _value(ast.parse(expression.strip(), mode="eval").body, vectors)
    except (SyntaxError, MemoryError, RecursionError, OverflowError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise _refused(expression, what, "write something like 0.5*a - b/2 + c") from None
    if not isinstance(result, SteeringVector):
        raise _refused(expression, "is a number, not a vector", "use a name that --set gives")
    return result


def _value(node: ast.expr, vectors: Mapping[str, SteeringVector]) -> SteeringVector | float:
    match node:
        case ast.Name(id=name):
            if name not in vectors:
                raise _refused(name, "is not set", f"add --set {name}=FILE")
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
                raise _refused(ast.unparse(node), what, "add vectors to vectors, and scale vectors by numbers")
            return _OPERATORS[type(sign)](a, b)
    syntax = type(node.op if isinstance(node, ast.BinOp | ast.UnaryOp) else node).__name__
    raise _refused(ast.unparse(node), f"{syntax} is not allowed", "use names, numbers, + - * / and parentheses")


def _fit(sign: type[ast.operator], a: SteeringVector | float, b: SteeringVector | float) -> bool:
    numbers = [isinstance(one, float) for one in (a, b)]
    if sign is ast.Mult:
        return any(numbers)
    if sign is ast.Div:
        return numbers[1] and b != 0
    return numbers[0] == numbers[1]


def _refused(field: str, what: str, remedy: str) -> InvalidRequest:
    return InvalidRequest([Problem(field, what, remedy)])
