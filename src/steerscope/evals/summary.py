"""What the scores of a run prove: of each condition a mean, an interval, and the difference from the unsteered model.

A question is the unit: answers to one question are alike, so intervals come from drawing questions (one alone has
none), and a difference is tested by exchanging the two conditions within questions. Of one score all differences are
corrected together (Holm). Perplexities are averaged and tested as logarithms.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steerscope.analysis.statistics import bootstrap, holm, permutation
from steerscope.evals.run import UNSTEERED, EvalRun
from steerscope.evals.scoring import Row, question_means, score_names, scored_answers, scorer_facts
from steerscope.extraction.personas.folder import write_json
from steerscope.specs.errors import InvalidRequest, Problem

_PREFERRED = ("classifier", "judge", "keywords", "choice", "correct", "regex", "refusal")
_FEWEST = 2  # questions an interval and a test take
Means = dict[str, tuple[float, int]]  # question → mean, and over how many answers


def summarise(out: Path, run: EvalRun, main: str | None = None) -> dict[str, Any]:
    """Writes OUT/summary.json and returns what is in it."""
    rows = scored_answers(out, run)
    names = score_names(rows)
    if not names or (main is not None and main not in names):
        what = "there are no scores" if not names else f"there is no score {main!r}"
        remedy = "run steerscope eval score first" if not names else f"choose from {', '.join(names)}"
        raise InvalidRequest([Problem(str(out), what, remedy)])
    summary = {
        "score": main or next((name for name in _PREFERRED if name in names), names[0]),
        "model": run.model.model_dump() if run.model else None,
        "n": run.n,
        "sampling": run.rollouts.model_dump(),
        "marks": run.marks,
        "answers": len(rows),
        "scorers": scorer_facts(out),
        "conditions": [entry for name in names for entry in compare(rows, run, name)],
    }
    write_json(out / "summary.json", summary)
    return summary


def compare(rows: Sequence[Row], run: EvalRun, name: str) -> list[dict[str, Any]]:
    """Of one score: every condition on every set, with its difference from the unsteered model."""
    found, tested = [], []
    cells: dict[tuple[str, str], Means] = {}
    for (condition, dataset, question), values in question_means(rows, name).items():
        scaled = np.log(values) if name == "perplexity" else values
        cells.setdefault((dataset, condition), {})[question] = (float(np.mean(scaled)), len(values))
    places = {one.name: (one.series, one.at) for one in run.conditions}
    for (dataset, condition), means in cells.items():
        series, at = places[condition]
        entry: dict[str, Any] = {"score": name, "dataset": dataset, "condition": condition, "series": series, "at": at}
        interval = bootstrap([mean for mean, _ in means.values()])
        mean, low, high = _back(name, interval.estimate, interval.low, interval.high)
        known = len(means) >= _FEWEST  # drawing one question again and again would make it look certain
        entry |= {"mean": mean, "low": low if known else None, "high": high if known else None}
        entry |= {"questions": len(means), "answers": sum(n for _, n in means.values())}
        base = cells.get((dataset, UNSTEERED), {})
        both = [question for question in means if question in base]
        if condition != UNSTEERED and len(both) >= _FEWEST:
            entry |= _difference([means[q][0] for q in both], [base[q][0] for q in both])
            tested.append(entry)
        found.append(entry)
    for entry, corrected in zip(tested, holm([entry["p"] for entry in tested]) if tested else (), strict=True):
        entry["p_corrected"] = float(corrected)
    return found


def _difference(own: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """For perplexity this is the logarithm of a ratio."""
    apart = np.subtract(own, base)
    interval = bootstrap(apart)
    p = permutation(own, base, paired=True) if apart.any() else 1.0
    return {"difference": interval.estimate, "difference_low": interval.low, "difference_high": interval.high, "p": p}


def _back(name: str, *values: float) -> list[float]:
    return [float(np.exp(value)) for value in values] if name == "perplexity" else list(values)
