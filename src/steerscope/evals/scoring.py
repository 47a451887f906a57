"""Scores of a run's answers: stored one by one, and collected in a table.

OUT/scores/NAME.jsonl   a line per answer, under a hash of the scorer and the answer: nothing is scored twice
OUT/scores/NAME.json    facts about the scorer, and how many answers have a score, or why not
OUT/answers.parquet     every answer with all its scores
OUT/summary.json        of each condition a mean, an interval, and the difference from the unsteered model

A question is the unit of statistics, because answers to one question are alike: intervals (Student's t) come from the
means of questions. One question, or several with the same mean, have no interval; scores that are 0 or 1 have that of a
share. A difference is tested by exchanging the two conditions within questions, which gives no p below
2 / 2 ** questions; that least p is reported with each. All differences of one score are corrected together (Holm).
Perplexities are averaged and tested as logarithms.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steerscope.analysis.results import save_table
from steerscope.analysis.statistics import holm, least_paired_p, mean_interval, permutation, share_interval
from steerscope.evals.run import UNSTEERED, EvalRun, answers_of, wanted
from steerscope.evals.scorers import Scored, Scorer
from steerscope.extraction import runs
from steerscope.files import lock_folder
from steerscope.specs.errors import InvalidRequest, Problem

_AT_ONCE = 64
JUDGED = "scored"
PENDING = "not scored yet"
UNFIT = "does not apply"
Row = dict[str, Any]
_PREFERRED = ("classifier", "judge", "keywords", "choice", "correct", "regex", "refusal")
_FEWEST = 2  # questions a test takes
_SHARES = ("correct", "refusal", "regex")  # scores that are 0 or 1
Means = dict[str, tuple[float, int]]  # question → mean, and over how many answers


def score(out: Path, run: EvalRun, scorers: Sequence[Scorer], progress: runs.Progress = runs.no_progress) -> None:
    """Make the missing scores. The failure of a scorer is raised after the others are done; its scores are kept."""
    failures = list[runs.Interrupted]()
    with lock_folder(out / "scores"):  # answers may still be added
        answers = answers_of(out, run)
        for scorer in scorers:
            try:
                _score(out, scorer, answers, progress)
            except runs.Interrupted as error:
                failures.append(error)
        write_table(out, run)
    if failures:
        raise failures[0]


def _score(out: Path, scorer: Scorer, answers: Sequence[runs.Record], progress: runs.Progress) -> None:
    ledger = runs.Ledger(out / "scores" / f"{scorer.name}.jsonl")
    identity = scorer.identity
    before = scorer_facts(out).get(scorer.name)
    keys = [_key(scorer.name, identity, one) for one in answers]
    items = dict(zip(keys, zip(keys, answers, strict=True), strict=True))  # equal answers are scored once

    def write_facts() -> None:
        _write_facts(out, scorer, identity, before, [ledger.records.get(key) for key in keys])

    def work(part: Sequence[tuple[str, runs.Record]]) -> Iterator[list[runs.Record]]:
        for group in runs.groups(scorer([answer for _, answer in part])):
            records = [_line(part[i][0], one) for i, one in group if one is not None]
            if records:
                yield records
                write_facts()  # what was paid for is on the disk even if the process is killed now

    n_done = 0
    try:
        for n in runs.store_missing(items, ledger, _AT_ONCE, work):
            n_done += n
            progress(scorer.name, n_done, len(items))
    finally:
        write_facts()


def _key(name: str, identity: str, answer: runs.Record) -> str:
    own = [answer.get(field) for field in ("question", "text", "token_ids", "expected", "logprobs")]
    return runs.digest(name, identity, own, "logprobs" in answer)


def _line(key: str, one: Scored) -> runs.Record:
    return {"id": key, "values": one.values, **({"why": one.why} if one.why else {})}


def _write_facts(
    out: Path, scorer: Scorer, identity: str, before: Row | None, found: Sequence[runs.Record | None]
) -> None:
    about = dict(scorer.about())
    spent = about.get("spent")
    if isinstance(spent, dict) and before and before["identity"] == identity:
        earlier = before["about"].get("spent", {})
        about["spent"] = {name: earlier.get(name, 0) + spent.get(name, 0) for name in {**earlier, **spent}}
    counts = dict(sorted(Counter(map(_status, found)).items()))
    facts = {"scorer": scorer.name, "identity": identity, "about": about, "counts": counts}
    runs.write_json(out / "scores" / f"{scorer.name}.json", facts)


def _status(one: runs.Record | None) -> str:
    """Return whether an answer has a score, or why not."""
    if one is None:
        return PENDING
    return str(one.get("why", JUDGED if one["values"] else UNFIT)).split(" in ")[0]


def scorer_facts(out: Path) -> dict[str, Row]:
    """Return the facts about each scorer by its name, without temporary files."""
    paths = sorted((out / "scores").glob("[!.]*.json"))
    return {path.stem: runs.read_json(path, "account of a scorer") for path in paths}


def scored_answers(out: Path, run: EvalRun) -> list[Row]:
    """Return every answer with its `scores`, and the `status` of each scorer as it was last used."""
    places = {one.name: {"series": one.series, "at": one.at} for one in run.conditions}
    rows = [{**one, **places[one["condition"]], "scores": {}, "status": {}} for one in answers_of(out, run)]
    for name, facts in scorer_facts(out).items():
        records = runs.Ledger(out / "scores" / f"{name}.jsonl").records
        for row in rows:
            found = records.get(_key(name, facts["identity"], row))
            row["scores"].update(found["values"] if found else {})
            row["status"][name] = _status(found)
    return rows


def score_names(rows: Sequence[Row]) -> list[str]:
    return sorted({name for row in rows for name in row["scores"]})


def question_means(rows: Sequence[Row], name: str) -> dict[tuple[str, str, str], list[float]]:
    """Return the values of one score by condition, set and question."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if name in row["scores"]:
            key = row["condition"], row["dataset"], row["question"]
            found.setdefault(key, []).append(row["scores"][name])
    return found


def write_table(out: Path, run: EvalRun) -> None:
    rows = scored_answers(out, run)
    names = score_names(rows)
    fields = ("id", "condition", "series", "at", "dataset", "question", "sample", "system", "text", "finish_reason")
    answers = [
        {field: row[field] for field in fields} | {name: row["scores"].get(name) for name in names} for row in rows
    ]
    save_table(pa.Table.from_pylist(answers), out / "answers.parquet")


# --- how complete a run is


def count_answers(rows: Sequence[Row], run: EvalRun) -> list[dict[str, Any]]:
    """Count, by condition and set, the answers of the run (`expected`), those on the disk (`present`), those with each
    score (`judged`), and the others by scorer and reason (`unjudged`)."""
    expected = Counter((one.condition.name, one.item.dataset) for one in wanted(run))
    names = score_names(rows)
    scorers = sorted({name for row in rows for name in row["status"]})
    found = []
    for (condition, dataset), count in expected.items():
        own = [row for row in rows if (row["condition"], row["dataset"]) == (condition, dataset)]
        judged = {name: sum(name in row["scores"] for row in own) for name in names}
        reasons = {scorer: Counter(row["status"][scorer] for row in own) for scorer in scorers}
        for left in reasons.values():
            left.pop(JUDGED, None)
        unjudged = {scorer: dict(sorted(left.items())) for scorer, left in reasons.items() if left}
        about = {"condition": condition, "dataset": dataset, "expected": count, "present": len(own)}
        found.append({**about, "judged": judged, "unjudged": unjudged})
    return found


def what_is_missing(counts: Sequence[Mapping[str, Any]]) -> str:
    """Return which answers and scores a run lacks; empty where it has all. A score that a scorer could not give, for a
    reason of its own, is not missing."""
    parts = []
    short = [one for one in counts if one["present"] < one["expected"]]
    if short:
        expected, present = (sum(one[key] for one in counts) for key in ("expected", "present"))
        each = ", ".join(
            f"{one['condition']} on {one['dataset']} {one['present']} of {one['expected']}" for one in short
        )
        parts.append(f"{expected - present} of {expected} answers are not there ({each}): eval rollouts --resume")
    pending: Counter[str] = Counter()
    for one in counts:
        pending.update({scorer: left.get(PENDING, 0) for scorer, left in one["unjudged"].items()})
    waiting = [f"{scorer} {count}" for scorer, count in pending.items() if count]
    if waiting:
        parts.append(f"answers are not scored yet ({', '.join(waiting)}): eval score")
    return f"PARTIAL RUN: {'; '.join(parts)}" if parts else ""


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
    runs.write_json(out / "summary.json", summary)
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
