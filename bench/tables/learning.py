"""Tables and plots of docs/learning.md, from the results of bench/studies/learning.py."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from bench.studies.learning import STAGES
from bench.studies.learning_judged import SHOWN
from bench.tables.evals import cell
from steerscope.training.course import Baselines
from steerscope.training.curves import loss_plot, sweep_plot


def _load(results: Path) -> dict:
    return json.loads((results / "learning.json").read_text(encoding="utf-8"))


def ways(results: Path) -> str:
    data = _load(results)["test"]
    lines = [
        "| test texts | perplexity | learned is better by, nats per token (95 %) | p |",
        "|---|---|---|---|",
    ]
    for name, value in data["perplexity"].items():
        better = data["learned_better_by"].get(name)
        told = (
            "| | |" if better is None else "| {:.2f} ({:.2f} to {:.2f}) ".format(*better) + f"| {data['p'][name]:.1g} |"
        )
        lines.append(f"| {name} | {value:.1f} {told}")
    lines += ["", f"{data['texts']} texts, {data['tokens']} tokens that count."]
    return "\n".join(lines)


def rates(results: Path) -> str:
    data = _load(results)["sweep"]
    lines = ["| learning rate | validation perplexity | best epoch | length of the vector |", "|---|---|---|---|"]
    for run in data["runs"]:
        norm, best = next(iter(run["norms"].values())), run["rate"] == data["best_rate"]
        shown = f"**{run['steered']:.1f}**" if best else f"{run['steered']:.1f}"
        lines.append(f"| {run['rate']:g} | {shown} | {run['best_epoch']} of {run['epochs']} | {norm:.1f} |")
    one = data["runs"][0]
    lines += ["", f"Unsteered {one['unsteered']:.1f}, prompted {one['prompted']:.1f} (“{one['prompt']}”)."]
    return "\n".join(lines)


def answers(results: Path) -> str:
    lines = ["| | unsteered | prompted | learned |", "|---|---|---|---|"]
    for one in _load(results)["test"]["answers"]:
        said = [one[way].replace("|", "\\|") for way in ("unsteered", "prompted", "learned")]
        lines.append(f"| *{one['question']}* | {' | '.join(said)} |")
    return "\n".join(lines).replace("\\", "\\\\")


def judged(results: Path) -> str:
    """Conditions down, scores across, and by how much the learned vector scores more."""
    data = _load(results)["judged"]
    cells = {(one["condition"], one["score"]): one for one in data["conditions"]}
    over, conditions = data["learned_over"]["classifier"], dict.fromkeys(one for one, _ in cells)
    head = [*SHOWN, "learned × 1 is more by (classifier, 95 %)"]
    lines = [f"| condition | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for condition in conditions:
        apart = over.get(condition)
        told = "" if apart is None else f"{apart['by']:+.2f} ({apart['low']:+.2f} to {apart['high']:+.2f})"
        found = [cell(cells.get((condition, name))) for name in SHOWN]
        lines.append(f"| {condition} | {' | '.join(found)} | {told} |")
    about = data["classifier"]
    tested = " and ".join(
        f"{about[part]['auroc']:.2f} on {about[part]['texts']} {part} answers" for part in ("validation", "test")
    )
    return "\n".join([*lines, "", f"The classifier learned {about['trained on']} training answers; AUROC {tested}."])


def time(results: Path) -> str:
    data = _load(results)
    stages = {name: data[name] for name in STAGES}
    total = sum(one["processor_seconds"] for one in stages.values()) / 60
    clock = sum(one["seconds"] for one in stages.values()) / 60
    parts = ", ".join(f"{name} {one['processor_seconds'] / 60:.1f}" for name, one in stages.items())
    resume, sizes = data["resume"], data["sweep"]["bytes"]
    same = ", ".join(f"`{name}`" for name, held in resume["same"].items() if held)
    return (
        f"All of it took {clock:.1f} minutes by the clock and {total:.1f} of one processor ({parts}). The vector is a "
        f"file of {sizes['vector.safetensors']:,} bytes, a checkpoint has {sizes['checkpoint.safetensors']:,}. A run "
        f"of {resume['steps']} steps that was killed (SIGKILL) after {resume['killed_after']} and started again ended "
        f"with the same numbers, bit by bit, in {same} as one that was left alone."
    )


def _sweep(results: Path) -> str:
    data = _load(results)
    runs = data["sweep"]["runs"]
    levels = {"unsteered": runs[0]["unsteered"], "prompted": runs[0]["prompted"]}
    return sweep_plot({f"layer {data['layer']}": [(run["rate"], run["steered"]) for run in runs]}, levels)


def _loss(results: Path) -> str:
    data = _load(results)["sweep"]
    one = data["runs"][0]
    baselines = Baselines(math.log(one["unsteered"]), {one["prompt"]: math.log(one["prompted"])})
    return loss_plot(data["lines"], baselines)


PLOTS: dict[str, Callable[[Path], str]] = {"learning-sweep.svg": _sweep, "learning-loss.svg": _loss}
