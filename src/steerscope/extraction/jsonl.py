"""Files of users in JSON Lines: all problems of a file are reported together."""

import json
from collections.abc import Callable, Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from steerscope.files import reading
from steerscope.specs.errors import InvalidRequest, Problem, not_json

T = TypeVar("T")
E = TypeVar("E")


def numbered_lines(path: Path | Traversable, what: str) -> list[tuple[str, str]]:
    """Return the lines that are not blank, each with `path:number`; `what` names the kind of file in errors."""
    with reading(str(path), what):
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def parse_json(text: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest([Problem("", not_json(error), remedy)]) from None


def parse_some(entries: Iterable[tuple[str, E]], parse: Callable[[E], T]) -> tuple[list[T], list[Problem]]:
    """Parse named entries; return those that are right, and the problems of the others under their names."""
    parsed: list[T] = []
    problems: list[Problem] = []
    for name, entry in entries:
        try:
            parsed.append(parse(entry))
        except InvalidRequest as error:
            problems += [problem.under(name) for problem in error.problems]
    return parsed, problems


def parse_all(entries: Iterable[tuple[str, E]], parse: Callable[[E], T]) -> list[T]:
    """Parse named entries, or raise one error with the problems of all."""
    parsed, problems = parse_some(entries, parse)
    if problems:
        raise InvalidRequest(problems)
    return parsed
