"""The table and the plot of the soak in docs/stress.md."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from steerscope.report.colours import INK, NEUTRAL, POSITIVE
from steerscope.report.svg import HEIGHT, WIDTH, Axes, drawing, text

_NAMES = {
    "memory_mib": "memory, MiB",
    "handles": "open handles",
    "threads": "threads",
    "shared": "files in shared memory",
    "processor_ms_per_token": "processor time per token, ms",
    "first_token_ms": "first token, ms",
    "token_ms": "each further token, ms",
}

_HELD = ("memory_mib", "handles", "threads", "shared")


def _load(results: Path) -> dict[str, Any]:
    return json.loads((results / "soak.json").read_text(encoding="utf-8"))


def table(results: Path) -> str:
    data = _load(results)
    lines = ["| median of the | first third | second | last | slope per hour (95 %) |", "|---|---|---|---|---|"]
    for name, title in _NAMES.items():
        one = data["trends"][name]
        thirds = " | ".join(f"{value:,.0f}" for value in one["thirds"])
        lines.append("| {} | {} | {:+.1f} ({:+.1f} to {:+.1f}) |".format(title, thirds, *one["per_hour"]))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(data["requests"]).most_common())
    total = sum(data["requests"].values())
    rest = [f"{_NAMES[name]} {data['before'][name]:,.0f} → {data['after'][name]:,.0f}" for name in _HELD]
    lines += [
        "",
        f"{data['minutes']:g} minutes, {data['clients']} clients, {total:,} requests ({kinds}), "
        f"{data['tokens']:,} tokens of streams. The questions were asked {data['canaries']:,} times in all; "
        f"**{len(data['wrong'])}** answers or requests were wrong. At rest, before → after: {', '.join(rest)}. "
        f"{len(data['orphans'])} files were left in shared memory when the server had ended.",
    ]
    return "\n".join(lines)


def plot(results: Path) -> str:
    trends = _load(results)["trends"]
    panels = (("memory_mib",), ("handles", "threads"), ("processor_ms_per_token",), ("first_token_ms", "token_ms"))
    content = [f'<g transform="translate({i * WIDTH} 0)">{_panel(trends, names)}</g>' for i, names in enumerate(panels)]
    return drawing("".join(content), WIDTH * len(panels), HEIGHT)


def _panel(trends: dict[str, Any], names: tuple[str, ...]) -> str:
    curves = [list(enumerate(trends[name]["by_minute"])) for name in names]
    curves = [[(at, value) for at, value in curve if value is not None] for curve in curves]
    top, last = max(value for curve in curves for _, value in curve), max(at for curve in curves for at, _ in curve)
    step = 10 ** math.floor(math.log10(top / 4))
    highest = 4 * step * math.ceil(1.1 * top / 4 / step)
    axes = Axes((0, max(1, last)), (0, highest))
    ticks = [highest * i / 4 for i in range(5)]
    parts = [axes.frame(", ".join(_NAMES[name] for name in names), "minutes", range(0, last + 1, 15), ticks)]
    for curve, colour, name in zip(curves, (POSITIVE, NEUTRAL), names, strict=False):
        parts.append(axes.curve(curve, colour))
        if len(names) > 1:
            x, y = axes.at(*curve[-1])
            parts.append(text(x, y - 8, _NAMES[name].split(",")[0], "end", INK))
    return "".join(parts)
