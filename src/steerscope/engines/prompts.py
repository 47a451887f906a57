"""Small helpers on the way from what a user gives to prompts."""

from collections.abc import Callable, Sequence
from typing import Any

from steerscope.engines.plan import Prompt
from steerscope.specs.errors import InvalidRequest, Problem


def all_of(make: Callable[[Any], Prompt], items: Sequence[object]) -> list[Prompt]:
    """Prompts of all items, or one error with the problems of all of them."""
    made: list[Prompt] = []
    problems: list[Problem] = []
    for i, item in enumerate(items):
        try:
            made.append(make(item))
        except InvalidRequest as error:
            problems += [problem.under(f"prompts[{i}]") for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return made


def check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that were not UTF-8, smuggled in as lone surrogates
        raise InvalidRequest([Problem(field, "the text is not valid Unicode", "send UTF-8")]) from None
