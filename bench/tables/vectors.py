"""Tables and the plot of docs/vectors.md, from the results of vector_study, extraction_peers and precision."""

import json
from pathlib import Path

from steerscope.report.colours import INK, NEUTRAL, POSITIVE
from steerscope.report.svg import HEIGHT, WIDTH, Axes, drawing, text


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
    parts = []
    for file in ("precision.json", "gpu/precision.json"):
        data = json.loads((results / file).read_text())
        versions = data["machine"]["versions"]
        where = data.get("gpu") or f"{data['machine']['processor']}, {data['machine']['cores']} cores"
        lines = [f"| on {where}, torch {versions['torch']} | 1 − cosine: most, at layer | median | length |"]
        lines.append("|---|---|---|---|")
        for name, cell in data["cells"].items():
            if "error" in cell:
                lines.append(f"| {name} | — ({cell['error']}) | | |")
                continue
            off, lengths = [abs(1 - cosine) for cosine in cell["cosine"]], cell["length"]
            lines.append(
                f"| {name} | {max(off):.0e}, {off.index(max(off))} | {sorted(off)[len(off) // 2]:.0e} "
                f"| ×{min(lengths):.4f} – ×{max(lengths):.4f} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot(results: Path) -> str:
    """Per set: the gap over the scale beside random directions, and below it AUROC over layers beside its controls."""
    sets = json.loads((results / "vector_study.json").read_text())["sets"]
    panels = []
    for i, (name, one) in enumerate(sets.items()):
        panels.append(f'<g transform="translate({i * WIDTH} 0)">{_gap_panel(name, one)}</g>')
        panels.append(f'<g transform="translate({i * WIDTH} {HEIGHT})">{_auroc_panel(one)}</g>')
    return drawing("".join(panels), WIDTH * len(sets), 2 * HEIGHT)


def _gap_panel(name: str, one: dict) -> str:
    highest = 2.0 * (1 + max(*one["gaps"], *map(abs, one["random_gaps"])) // 2)
    axes = Axes((0, 1.1), (-highest / 2, highest))
    points = [(0.0, 0.0), *zip(one["parts"], one["gaps"], strict=True)]
    ticks = [tick for tick in range(-20, 21, 2 if highest < 9 else 4) if -highest / 2 <= tick <= highest]
    return (
        axes.frame(f"{name}: ± gap of log-odds, nats", "part of the recommended scale", (0, *one["parts"]), ticks)
        + axes.dots([(1.0, gap) for gap in one["random_gaps"]], NEUTRAL, 4, 0.5)
        + axes.curve(points, POSITIVE)
        + axes.dots(points, POSITIVE, 4.5)
        + text(axes.at(0.97, 0)[0], axes.at(0, min(one["random_gaps"]))[1] + 18, "random directions", "end", NEUTRAL)
    )


def _auroc_panel(one: dict) -> str:
    layers = [row[0] for row in one["quality"]]
    axes = Axes((layers[0], layers[-1]), (0.4, 1.02))
    auroc, shuffled, random = ([(row[0], row[column]) for row in one["quality"]] for column in (1, 4, 5))
    chosen = [(one["layer"], one["auroc"])]
    return (
        axes.frame("held-out AUROC; dashed, dotted: chance", "layer", layers[::5], (0.4, 0.6, 0.8, 1.0))
        + axes.curve(random, "#b3b8c2", "2 3")
        + axes.curve(shuffled, NEUTRAL, "6 4")
        + axes.curve(auroc, INK)
        + axes.dots(chosen, POSITIVE, 6)
    )
