"""Tables of docs/analysis.md, from the results of analysis_study and checkpoint_memory."""

import json
from pathlib import Path


def components(results: Path) -> str:
    data = json.loads((results / "analysis_study.json").read_text())
    lines = ["| component | share | random sets | one end | other end |", "|---|---|---|---|---|"]
    for row in data["components"]:
        share, chance = f"{row['variance']:.0%}", f"{row['chance_high']:.0%}"
        lines.append(f"| {row['component']} | {share} | {chance} | {row['lowest']} | {row['highest']} |")
    return "\n".join(lines)


def susceptibility(results: Path) -> str:
    data = json.loads((results / "analysis_study.json").read_text())
    lines = [
        "| direction | layer, matrix | alignment | × chance | z, random | p | z, exchanged labels |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["cells"]:
        times = f"{row['alignment'] / row['chance']:.1f}"
        place = f"{row['layer']}, `{row['matrix']}` ({row['side']})"
        lines.append(
            f"| {row['direction']} | {place} | {row['alignment']:.3f} | {times} | {row['z']:.1f} | {row['p']:.3f} "
            f"| {row['against_z']:.1f} |"
        )
    return "\n".join(lines)


def sides(results: Path) -> str:
    data = json.loads((results / "analysis_study.json").read_text())
    lines = [
        "| direction | matrices that | p ≤ 0.05 | median z, random | median z, exchanged labels |",
        "|---|---|---|---|---|",
    ]
    for row in data["sides"]:
        lines.append(
            f"| {row['direction']} | {'read' if row['side'] == 'reads' else 'write'} "
            f"| {row['significant']} of {row['matrices']} | {row['z']:+.1f} | {row['against_z']:+.1f} |"
        )
    return "\n".join(lines)


def run(results: Path) -> str:
    """What was done, how long it took, and whether the planted change was found."""
    data = json.loads((results / "analysis_study.json").read_text())
    memory = json.loads((results / "checkpoint_memory.json").read_text())
    training, planted, seconds = data["training"], data["planted"], data["seconds"]
    own = [row for row in planted["cells"] if row["direction"] == planted["direction"]]
    found = ", ".join(f"{row['layer']} `{row['matrix']}` {row['z']:.1f} ({row['against_z']:.1f})" for row in own)
    analysed = [seconds[name] for name in ("directions", "susceptibility", "report")]
    change = {side: f"{training['before'][side]:.0f} → {training['after'][side]:.0f}" for side in training["before"]}
    peaks = [f"{one['peak_rss'] / 2**30:.2f}" for one in memory["passes"].values()]
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| tuning: steps on {training['texts']} happy sentences, loss | {training['steps']}, "
            f"{training['losses'][0]:.2f} → {training['losses'][-1]:.2f} |",
            f"| … perplexity of held-out happy and sad sentences | {change['positive']}, {change['negative']} |",
            f"| planted along {planted['direction']}: layer {planted['layer']}, `{planted['matrix']}`; its strongest "
            f"matrices then, z against random directions (exchanged labels) | {found} |",
            f"| everything, seconds of the processor (and of the clock, on a busy machine) "
            f"| {sum(one['processor'] for one in seconds.values()):.0f} "
            f"({sum(one['clock'] for one in seconds.values()):.0f}) |",
            f"| … of these the three analyses and the page | {sum(one['processor'] for one in analysed):.0f} "
            f"({sum(one['clock'] for one in analysed):.0f}) |",
            f"| two checkpoints of Qwen2.5-3B's shape, {memory['bytes'] / 1e9:.1f} GB each: peak memory of "
            f"{', '.join(memory['passes'])} | {', '.join(peaks)} GiB |",
        ]
    )
