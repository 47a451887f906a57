"""Tables and the plot of docs/vectors.md, from the results of vector_study, extraction_peers and precision."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

POSITIVE, NEUTRAL, INK, GRID = "#c2560c", "#6b7280", "#1f2430", "#e6e8ec"
_WIDTH, _HEIGHT, _LEFT, _TOP = 320, 250, 46, 34  # of one panel, and of the room for its words


def study(results: Path) -> str:
    data = json.loads((results / "vector_study.json").read_text())
    lines = [
        "| set | layer, scale | held-out AUROC | ± gap of log-odds | random directions | z | perplexity |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in data["sets"].items():
        worst = max(map(abs, one["random_gaps"]))
        lines.append(
            f"| {name} | {one['layer']}, {one['scale']:.2f} | {one['auroc']:.2f} | {one['gaps'][-1]:+.1f} nats "
            f"| {len(one['random_gaps'])}, largest ±{worst:.1f} | {one['z']:.1f} "
            f"| ×{one['perplexity_ratio'][-1]:.2f} |"
        )
    return "\n".join(lines)


def answers(results: Path) -> str:
    data = json.loads((results / "vector_study.json").read_text())
    lines = ["| set | + scale | unsteered | − scale |", "|---|---|---|---|"]
    for name, one in data["sets"].items():
        said = one["answers"]
        lines.append(f"| {name}: *{said['question']}* | {said['plus']} … | {said['none']} … | {said['minus']} … |")
    return "\n".join(lines).replace("\\", "\\\\")


def peers(results: Path) -> str:
    data = json.loads((results / "extraction_peers.json").read_text())
    lines = [
        "| peer | its method | ours | layers × sets | least cosine | signs that differ |",
        "|---|---|---|---|---|---|",
    ]
    for peer, found in data["peers"].items():
        for method in next(iter(found["sets"].values())):
            cells = [cells[method] for cells in found["sets"].values()]
            least, turned = min(cell["least_cosine"] for cell in cells), sum(len(cell["other_sign"]) for cell in cells)
            lines.append(
                f"| {peer} {found['version']} | `{method}` | `{cells[0]['ours']}` "
                f"| {cells[0]['layers']} × {len(cells)} | {least:.6f} | {turned or 'none'} |"
            )
    return "\n".join(lines)


def precision(results: Path) -> str:
    data = json.loads((results / "precision.json").read_text())
    lines = ["| engine, dtype | 1 − cosine: most, at layer | median | length |", "|---|---|---|---|"]
    for name, cell in data["cells"].items():
        if "error" in cell:
            lines.append(f"| {name} | — ({cell['error']}) | | |")
            continue
        off, lengths = [abs(1 - cosine) for cosine in cell["cosine"]], cell["length"]
        lines.append(
            f"| {name} | {max(off):.0e}, {off.index(max(off))} | {sorted(off)[len(off) // 2]:.0e} "
            f"| ×{min(lengths):.4f} – ×{max(lengths):.4f} |"
        )
    return "\n".join(lines)


def plot(results: Path) -> str:
    """Per set: the gap over the scale beside random directions, and below it AUROC over layers beside its controls."""
    sets = json.loads((results / "vector_study.json").read_text())["sets"]
    panels = []
    for i, (name, one) in enumerate(sets.items()):
        panels.append(f'<g transform="translate({i * _WIDTH} 0)">{_gap_panel(name, one)}</g>')
        panels.append(f'<g transform="translate({i * _WIDTH} {_HEIGHT})">{_auroc_panel(one)}</g>')
    width, height = _WIDTH * len(sets), 2 * _HEIGHT
    style = f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{style}><rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(panels)}</svg>\n'
    )


class _Axes:
    """Numbers to places in a panel."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y
        self.right, self.bottom = _WIDTH - 14, _HEIGHT - 42

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + across * (self.right - _LEFT), self.bottom - up * (self.bottom - _TOP)

    def frame(self, title: str, below: str, xs: Sequence[float], ys: Sequence[float]) -> str:
        parts = [_text(_LEFT, _TOP - 14, title, "start"), _text((_LEFT + self.right) / 2, self.bottom + 34, below)]
        for y in ys:
            _, place = self.at(self.x[0], y)
            parts += [_line(_LEFT, place, self.right, place, GRID), _text(_LEFT - 6, place + 4, f"{y:g}", "end")]
        parts += [_text(self.at(x, 0)[0], self.bottom + 16, f"{x:g}") for x in xs]
        return "".join(parts)

    def curve(self, points: Sequence[tuple[float, float]], colour: str, dashes: str = "none") -> str:
        places = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in points)
        return (
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )

    def dots(self, points: Sequence[tuple[float, float]], colour: str, radius: float, opacity: float = 1) -> str:
        places = [self.at(x, y) for x, y in points]
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="{opacity}"/>'
            for x, y in places
        )


def _gap_panel(name: str, one: dict) -> str:
    highest = 2.0 * (1 + max(*one["gaps"], *map(abs, one["random_gaps"])) // 2)
    axes = _Axes((0, 1.1), (-highest / 2, highest))
    points = [(0.0, 0.0), *zip(one["parts"], one["gaps"], strict=True)]
    ticks = [tick for tick in range(-20, 21, 2 if highest < 9 else 4) if -highest / 2 <= tick <= highest]
    return (
        axes.frame(f"{name}: ± gap of log-odds, nats", "part of the recommended scale", (0, *one["parts"]), ticks)
        + axes.dots([(1.0, gap) for gap in one["random_gaps"]], NEUTRAL, 4, 0.5)
        + axes.curve(points, POSITIVE)
        + axes.dots(points, POSITIVE, 4.5)
        + _text(axes.at(0.97, 0)[0], axes.at(0, min(one["random_gaps"]))[1] + 18, "random directions", "end", NEUTRAL)
    )


def _auroc_panel(one: dict) -> str:
    layers = [row[0] for row in one["quality"]]
    axes = _Axes((layers[0], layers[-1]), (0.4, 1.02))
    auroc, shuffled, random = ([(row[0], row[column]) for row in one["quality"]] for column in (1, 4, 5))
    chosen = [(one["layer"], one["auroc"])]
    return (
        axes.frame("held-out AUROC; dashed, dotted: chance", "layer", layers[::5], (0.4, 0.6, 0.8, 1.0))
        + axes.curve(random, "#b3b8c2", "2 3")
        + axes.curve(shuffled, NEUTRAL, "6 4")
        + axes.curve(auroc, INK)
        + axes.dots(chosen, POSITIVE, 6)
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'
