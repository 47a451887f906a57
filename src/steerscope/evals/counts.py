"""How complete a run is: for each condition, how many answers are expected, present and judged."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from steerscope.evals.run import EvalRun, wanted
from steerscope.evals.scoring import JUDGED, PENDING, Row, score_names


def count_answers(rows: Sequence[Row], run: EvalRun) -> list[dict[str, Any]]:
    """Count, by condition and set, the answers of the run (`expected`), those on the disk (`present`), those with each
    score (`judged`), and the others by scorer and reason (`unjudged`)."""
    expected = Counter((one.condition.name, one.item.dataset) for one in wanted(run))
    names = score_names(rows)
    scorers = sorted({name for row in rows for name in row["status"]})
    found = []
    for (condition, dataset), count in expected.items():
        own = [row for row in rows if (row["condition"], row["dataset"]) == (condition, dataset)]
        reasons = {
            scorer: Counter(row["status"][scorer] for row in own if row["status"][scorer] != JUDGED)
            for scorer in scorers
        }
        found.append(
            {
                "condition": condition,
                "dataset": dataset,
                "expected": count,
                "present": len(own),
                "judged": {name: sum(name in row["scores"] for row in own) for name in names},
                "unjudged": {scorer: dict(sorted(left.items())) for scorer, left in reasons.items() if left},
            }
        )
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
