"""The table of `bench.taps`."""

import json
from pathlib import Path


def taps(results: Path) -> str:
    """What a tap costs the GPU alone."""
    file = results / "gpu" / "taps.json"
    if not file.exists():
        return "*No figures yet: run `python -m steerscope.bench.taps` where there is a GPU.*"
    data = json.loads(file.read_text())
    lines = ["| µs per layer over the norm alone | median | least and most |", "|---|---|---|"]
    for case, value in data["more_us_per_layer"].items():
        low, high = data["spread_us"][case]
        lines.append(f"| {case} | {value:+.2f} | {low:+.2f} to {high:+.2f} |")
    size = f"{data['layers']} layers, {data['tokens']} tokens of {data['hidden']}"
    run = f"{data['rounds']} rounds; {data['device']}, torch {data['torch'].partition('+')[0]}"
    lines += ["", f"{size}, the matrix products of a layer between two taps; {run}."]
    return "\n".join(lines)
