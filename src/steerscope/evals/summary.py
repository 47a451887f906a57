"""Statistics of a run's scores: of each condition a mean, an interval, and the difference from the unsteered model.

A question is the unit, because answers to one question are alike: intervals (Student's t) come from the means of
questions. One question, or several with the same mean, have no interval; scores that are 0 or 1 have that of a share.
A difference is tested by exchanging the two conditions within questions, which gives no p below 2 / 2 ** questions;
that least p is reported with each. All differences of one score are corrected together (Holm). Perplexities are
averaged and tested as logarithms.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steerscope.analysis.statistics import holm, least_paired_p, mean_interval, permutation, share_interval
from steerscope.evals.counts import count_answers, what_is_missing
from steerscope.evals.run import UNSTEERED, EvalRun
from steerscope.evals.scoring import Row, question_means, score_names, scored_answers, scorer_facts
from steerscope.extraction.runs import write_json
from steerscope.specs.errors import InvalidRequest, Problem

_PREFERRED = ("classifier", "judge", "keywords", "choice", "correct", "regex", "refusal")
_FEWEST = 2  # questions a test takes
_SHARES = ("correct", "refusal", "regex")  # scores that are 0 or 1
Means = dict[str, tuple[float, int]]  # question → mean, and over how many answers


def summarise(out: Path, run: EvalRun, main: str | None = None) -> dict[str, Any]:
    """Writes OUT/summary.json and returns what is in it."""
    rows = scored_answers(out, run)
    names = score_names(rows)
    if not names or (main is not None and main not in names):
        what = "there are no scores" if not names else f"there is no score {main!r}"
        remedy = "run steerscope eval score first" if not names else f"choose from {', '.join(names)}"
        raise InvalidRequest([Problem(str(out), what, remedy)])
    counts = count_answers(rows, run)
    missing = what_is_missing(counts)
    summary = {
        "partial": bool(missing),
        "missing": missing,
        "counts": counts,
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
    """Return the entries of one score: every condition on every set, with its difference from the unsteered model."""
    log = name == "perplexity"
    cells: dict[tuple[str, str], Means] = {}
    for (condition, dataset, question), values in question_means(rows, name).items():
        mean = float(np.mean(np.log(values) if log else values))
        cells.setdefault((dataset, condition), {})[question] = mean, len(values)
    places = {one.name: {"series": one.series, "at": one.at} for one in run.conditions}
    found = []
    for (dataset, condition), means in cells.items():
        entry: dict[str, Any] = {"score": name, "dataset": dataset, "condition": condition, **places[condition]}
        bounds = _interval([mean for mean, _ in means.values()], share=name in _SHARES)
        for key, value in zip(("mean", "low", "high"), bounds, strict=True):
            entry[key] = float(np.exp(value)) if log and value is not None else value
        entry |= {"questions": len(means), "answers": sum(n for _, n in means.values())}
        base = cells.get((dataset, UNSTEERED), {})
        both = [question for question in means if question in base]
        if condition != UNSTEERED and len(both) >= _FEWEST:
            entry |= _difference([means[q][0] for q in both], [base[q][0] for q in both])
        found.append(entry)
    tested = [entry for entry in found if "p" in entry]
    for p in ("p", "least_p") if tested else ():
        for entry, corrected in zip(tested, holm([entry[p] for entry in tested]), strict=True):
            entry[f"{p}_corrected"] = float(corrected)
    return found


def _interval(values: Sequence[float], share: bool = False) -> tuple[float, float | None, float | None]:
    """Return the mean and its bounds; None where the values do not determine them."""
    if share and set(values) <= {0.0, 1.0}:
        found = share_interval(values)
    else:
        found = mean_interval(values)
        if len(set(values)) < 2:
            return found.estimate, None, None
    return found.estimate, found.low, found.high


def _difference(own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Compare paired values; of perplexities the difference is the logarithm of a ratio."""
    apart = np.subtract(own, base)
    difference, low, high = _interval(apart.tolist())
    p = permutation(own, base, paired=True) if apart.any() else 1.0
    found: dict[str, Any] = {"difference": difference, "difference_low": low, "difference_high": high}
    return found | {"compared": len(apart), "p": p, "least_p": least_paired_p(own, base)}


def out_of_reach(entries: Sequence[Mapping[str, Any]], level: float = 0.05) -> str:
    """Return which differences of one score cannot be significant, however large; empty where all can be."""
    beyond = [one for one in entries if one.get("least_p_corrected", 0.0) >= level]
    if not beyond:
        return ""
    n_tests = sum("p" in one for one in entries)
    fewest = min(one["compared"] for one in beyond)
    least = max(one["least_p_corrected"] for one in beyond)
    return (
        f"{len(beyond)} of {n_tests} differences cannot reach p < {level:g} after correction, however large they are: "
        f"with {fewest} questions, less those scored alike, p is at least {least:.2g}. Ask more questions."
    )
