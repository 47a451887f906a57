"""Wrapping of vLLM's methods."""

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    """Replace a method of a class by `wrapper(method, self, …)`, or of an object by `wrapper(method, …)`, once."""
    inner = getattr(owner, name)
    if getattr(inner, "steerscope", False):
        return

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, *args, **kwargs)

    call.steerscope = True  # type: ignore[attr-defined]
    setattr(owner, name, call)
