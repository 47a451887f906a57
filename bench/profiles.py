"""Profiles of one thread, and their most expensive functions."""

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

TOP = 25  # functions of a profile


def profiled(work: Callable[[], object], wrap: Callable[[Callable[[], None]], Any] = lambda call: call()) -> Any:
    """Return the profile (`pstats.Stats`) of this thread, or of the thread in which `wrap` runs a call."""
    profile = cProfile.Profile()
    wrap(profile.enable)
    try:
        work()
    finally:
        wrap(profile.disable)
    return pstats.Stats(profile)


def top_functions(stats: Any) -> list[dict[str, Any]]:
    """Return the functions of a profile that take the most time of their own."""
    ranked = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:TOP]
    return [
        {
            "function": name,
            "file": f"{'/'.join(file.split('/')[-2:])}:{line}",
            "calls": calls,
            "own_us": 1e6 * own,
            "total_us": 1e6 * total,
        }
        for (file, line, name), (_, calls, own, total, _) in ranked
    ]
