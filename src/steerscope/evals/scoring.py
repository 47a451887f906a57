"""Scores of a run's answers: stored one by one, and collected in tables.

OUT/scores/NAME.jsonl   a line per answer, under a hash of the scorer and the answer: nothing is scored twice
OUT/scores/NAME.json    facts about the scorer, and how many answers have a score, or why not
OUT/answers.parquet     every answer with all its scores
OUT/questions.parquet   means over the answers to a question, under each condition
OUT/datasets.parquet    means over those, of each set of questions
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steerscope.evals.run import EvalRun, answers_of
from steerscope.evals.scorers import Scored, Scorer
from steerscope.extraction import runs
from steerscope.files import lock_folder

_AT_ONCE = 64
JUDGED, PENDING, UNFIT = "scored", "not scored yet", "does not apply"
Row = dict[str, Any]


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
        write_tables(out, run)
    if failures:
        raise failures[0]


def _score(out: Path, scorer: Scorer, answers: Sequence[runs.Record], progress: runs.Progress) -> None:
    ledger = runs.Ledger(out / "scores" / f"{scorer.name}.jsonl")
    identity, before = scorer.identity, scorer_facts(out).get(scorer.name)
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


def mean_of(name: str, values: Sequence[float]) -> float:
    """Return the mean, of perplexities the geometric one."""
    return float(np.exp(np.mean(np.log(values))) if name == "perplexity" else np.mean(values))


def question_means(rows: Sequence[Row], name: str) -> dict[tuple[str, str, str], list[float]]:
    """Return the values of one score by condition, set and question."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if name in row["scores"]:
            key = row["condition"], row["dataset"], row["question"]
            found.setdefault(key, []).append(row["scores"][name])
    return found


def write_tables(out: Path, run: EvalRun) -> None:
    rows = scored_answers(out, run)
    names = score_names(rows)
    fields = ("id", "condition", "series", "at", "dataset", "question", "sample", "text")
    answers = [
        {field: row[field] for field in fields} | {name: row["scores"].get(name) for name in names} for row in rows
    ]
    questions, datasets = list[Row](), list[Row]()
    for name in names:
        means: dict[tuple[str, str], list[float]] = {}
        for (condition, dataset, question), values in question_means(rows, name).items():
            mean = mean_of(name, values)
            means.setdefault((condition, dataset), []).append(mean)
            about = {"score": name, "condition": condition, "dataset": dataset}
            questions.append({**about, "question": question, "mean": mean, "n": len(values)})
        for (condition, dataset), own in means.items():
            about = {"score": name, "condition": condition, "dataset": dataset}
            datasets.append({**about, "mean": mean_of(name, own), "questions": len(own)})
    for name, table in (("answers", answers), ("questions", questions), ("datasets", datasets)):
        runs.write_table(out / f"{name}.parquet", table)
