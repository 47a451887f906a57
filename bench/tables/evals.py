"""Tables of docs/evals.md, from the results of eval_study."""

import json
from pathlib import Path
from typing import Any

_SHOWN = ("classifier", "keywords", "judge", "perplexity", "repetition")


def _load(results: Path) -> dict[str, Any]:
    return json.loads((results / "eval_study.json").read_text(encoding="utf-8"))


def study(results: Path) -> str:
    """Conditions down, scores across."""
    rows = _load(results)["evaluation"]["conditions"]
    cells = {(one["condition"], one["score"]): one for one in rows}
    conditions = list(dict.fromkeys(one["condition"] for one in rows))
    shown = [name for name in _SHOWN if any(one["score"] == name for one in rows)]
    lines = [f"| condition | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    for condition in conditions:
        found = [cell(cells.get((condition, name))) for name in shown]
        lines.append(f"| {condition} | {' | '.join(found)} |")
    return "\n".join(lines)


def cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "—"
    sure = "**" if one.get("p_corrected", 1.0) < 0.05 else ""
    interval = "unknown" if one["questions"] < 2 or one["low"] is None else f"{one['low']:.2f}–{one['high']:.2f}"
    return f"{sure}{one['mean']:.2f}{sure} ({interval})"


def caps(results: Path) -> str:
    """Refusals of jailbreak prompts and right facts, side by side."""
    data = _load(results)
    if "caps" not in data:
        return "*Not measured yet: `eval_study --caps`.*"
    rows = data["caps"]["conditions"]
    cells = {(one["condition"], one["dataset"], one["score"]): one for one in rows}
    shown = (("jailbreak", "refusal"), ("jailbreak", "perplexity"), ("facts", "correct"), ("facts", "choice"))
    lines = [
        "| condition | refused | perplexity | facts right | probability of the right one |",
        "|---|---|---|---|---|",
    ]
    for condition in dict.fromkeys(one["condition"] for one in rows):
        lines.append(f"| {condition} | {' | '.join(cell(cells.get((condition, *place))) for place in shown)} |")
    return "\n".join(lines)


def _trained(about: dict[str, Any]) -> str:
    return f"{about['trained on']}, {about['AUROC on groups left out']:.2f}"


def checks(results: Path) -> str:
    data = _load(results)
    scorers = data["evaluation"]["scorers"]
    about, judge = scorers["classifier"]["about"], scorers.get("judge")
    wordings = [
        f"{one['auroc']:.2f} ({one['tested']})" for one in data["wordings"].values() if one["auroc"] is not None
    ]
    lines = ["| check | measured |", "|---|---|"]
    lines += [
        f"| classifier: sentences it was trained on, AUROC on pairs left out | {_trained(about)} |",
        f"| … trained on prompted and opposite answers, AUROC on questions left out | {_trained(data['prompted'])} |",
        f"| … trained without one wording of the prompt, AUROC on answers to that one and other questions (how many) | "
        f"{', '.join(wordings)} |",
    ]
    if judge:
        counts = judge["counts"]
        said = f"{counts.get('scored', 0)}, {sum(counts.values())}"
        lines.append(f"| the served model as judge: answers with a score, of all | {said} |")
    null, *planted = data["simulated"]
    lines.append(
        f"| {null['runs']} simulated runs, no effect: a difference found anywhere | {null['found_anywhere']:.1%} |"
    )
    lines += [
        f"| … with an effect of {one['effect']:g} standard deviations in one condition: found "
        f"| {one['found_in_the_planted_condition']:.1%} |"
        for one in planted
    ]
    return "\n".join(lines)
