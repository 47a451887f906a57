"""Scores of a run's answers: kept one by one, and gathered into tables.

OUT/scores/NAME.jsonl   an answer per line, under a hash of the scorer and the answer: nothing is scored twice
OUT/scores/NAME.json    the scorer, what it tells of itself, and how many answers have a score, or why not
OUT/answers.parquet     every answer with all its scores
OUT/questions.parquet   means over the answers to a question, under each condition
OUT/datasets.parquet    means over those, of each set of questions
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steerscope.evals.run import EvalRun, answers_of
from steerscope.evals.scorers import Interrupted, PaidScorer, Scored, Scorer
from steerscope.extraction.personas.folder import Ledger, Record, digest, write_json
from steerscope.extraction.personas.rollouts import Progress, silent
from steerscope.files import atomic_path, reading

_AT_ONCE = 64
JUDGED, PENDING, UNFIT = "scored", "not scored yet", "does not apply"
Row = dict[str, Any]


def score(out: Path, run: EvalRun, scorers: Sequence[Scorer], progress: Progress = silent) -> None:
    """Score what is not scored yet. A scorer that cannot go on is heard at the end; what it had is kept."""
    answers, failures = answers_of(out, run), list[Interrupted]()
    for scorer in scorers:
        try:
            _score(out, scorer, answers, progress)
        except Interrupted as error:
            failures.append(error)
    write_tables(out, run)
    if failures:
        raise failures[0]


def _score(out: Path, scorer: Scorer, answers: Sequence[Record], progress: Progress) -> None:
    ledger = Ledger(out / "scores" / f"{scorer.name}.jsonl")
    identity, before = scorer.identity, scorer_facts(out).get(scorer.name)
    keys = [_key(scorer.name, identity, one) for one in answers]
    keyed = dict(zip(keys, answers, strict=True))  # equal answers are scored once

    def tell() -> None:
        _tell(out, scorer, identity, before, [ledger.records.get(key) for key in keys])

    def keep(answer: Record, one: Scored) -> None:
        ledger.append([_line(_key(scorer.name, identity, answer), one)])
        tell()  # whoever is killed has still paid

    missing = [key for key in keyed if key not in ledger.records]
    progress(scorer.name, len(keyed) - len(missing), len(keyed))
    try:
        for start in range(0, len(missing), _AT_ONCE):
            part = missing[start : start + _AT_ONCE]
            batch = [keyed[key] for key in part]
            try:
                scores = scorer.one_by_one(batch, keep) if isinstance(scorer, PaidScorer) else scorer(batch)
                failure = None
            except Interrupted as error:
                scores, failure = error.scores, error
            found = {key: one for key, one in zip(part, scores, strict=True) if one and key not in ledger.records}
            ledger.append([_line(key, one) for key, one in found.items()])
            tell()
            if failure is not None:
                raise failure
            progress(scorer.name, len(keyed) - len(missing) + start + len(part), len(keyed))
    finally:
        tell()


def _key(name: str, identity: str, answer: Record) -> str:
    own = [answer.get(field) for field in ("question", "text", "token_ids", "expected", "logprobs")]
    return digest(name, identity, own, "logprobs" in answer)


def _line(key: str, one: Scored) -> Record:
    return {"id": key, "values": one.values, **({"why": one.why} if one.why else {})}


def _tell(out: Path, scorer: Scorer, identity: str, before: Row | None, found: Sequence[Record | None]) -> None:
    about = dict(scorer.about())
    spent = about.get("spent")
    if isinstance(spent, dict) and before and before["identity"] == identity:
        earlier = before["about"].get("spent", {})
        about["spent"] = {name: earlier.get(name, 0) + spent.get(name, 0) for name in {**earlier, **spent}}
    counts = Counter(_status(one) for one in found)
    write_json(
        out / "scores" / f"{scorer.name}.json",
        {"scorer": scorer.name, "identity": identity, "about": about, "counts": dict(sorted(counts.items()))},
    )


def _status(one: Record | None) -> str:
    """What became of an answer under a scorer, from its line."""
    if one is None:
        return PENDING
    return str(one.get("why", JUDGED if one["values"] else UNFIT)).split(" in ")[0]


def scorer_facts(out: Path) -> dict[str, Row]:
    """What each scorer told, by its name."""
    found = {}
    for path in sorted((out / "scores").glob("[!.]*.json")):  # not what is being written
        with reading(path, "account of a scorer"):
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def scored_answers(out: Path, run: EvalRun) -> list[Row]:
    """Every answer with `scores`, and the `status` of each scorer, as it was last used."""
    places = {one.name: (one.series, one.at) for one in run.conditions}
    rows = []
    for one in answers_of(out, run):
        series, at = places[one["condition"]]
        rows.append({**one, "series": series, "at": at, "scores": {}, "status": {}})
    for name, facts in scorer_facts(out).items():
        records = Ledger(out / "scores" / f"{name}.jsonl").records
        for row in rows:
            found = records.get(_key(name, facts["identity"], row))
            row["scores"].update(found["values"] if found else {})
            row["status"][name] = _status(found)
    return rows


def score_names(rows: Sequence[Row]) -> list[str]:
    return sorted({name for row in rows for name in row["scores"]})


def mean_of(name: str, values: Sequence[float]) -> float:
    """Perplexities are averaged as logarithms."""
    return float(np.exp(np.mean(np.log(values))) if name == "perplexity" else np.mean(values))


def question_means(rows: Sequence[Row], name: str) -> dict[tuple[str, str, str], list[float]]:
    """Of one score: condition, set and question → its values."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if name in row["scores"]:
            found[row["condition"], row["dataset"], row["question"]].append(row["scores"][name])
    return dict(found)


def write_tables(out: Path, run: EvalRun) -> None:
    rows = scored_answers(out, run)
    names = score_names(rows)
    told = ("id", "condition", "series", "at", "dataset", "question", "sample", "text")
    _write(
        out / "answers.parquet",
        {field: [row[field] for row in rows] for field in told}
        | {name: [row["scores"].get(name) for row in rows] for name in names},
    )
    questions, sets = list[Row](), list[Row]()
    for name in names:
        means = {key: (mean_of(name, values), len(values)) for key, values in question_means(rows, name).items()}
        for (condition, dataset, question), (mean, n) in means.items():
            questions.append(
                {"score": name, "condition": condition, "dataset": dataset, "question": question, "mean": mean, "n": n}
            )
        for condition, dataset in dict.fromkeys((c, d) for c, d, _ in means):
            own = [mean for (c, d, _), (mean, _) in means.items() if (c, d) == (condition, dataset)]
            mean = mean_of(name, own)
            sets.append(
                {"score": name, "condition": condition, "dataset": dataset, "mean": mean, "questions": len(own)}
            )
    for path, table in (("questions", questions), ("datasets", sets)):
        fields = list(table[0]) if table else ["score"]
        _write(out / f"{path}.parquet", {field: [row[field] for row in table] for field in fields})


def _write(path: Path, columns: dict[str, list]) -> None:
    with atomic_path(path) as temporary:
        pq.write_table(pa.table(columns), temporary)
