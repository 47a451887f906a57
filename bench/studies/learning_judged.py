"""Do the answers show the trait? The test questions of `nostalgic`, answered and scored as `steerscope eval` does.

The classifier learns the training answers of the set, nostalgic and plain, and is tested on the set's validation and
test answers. All prompts of the trait are asked. Scale 1 is what was learned, and of the mean difference what was best
on the validation texts: nothing is chosen here. The classifier knows the hand that wrote the texts the vector was
learned from; the trait's words are counted beside it, which come from elsewhere.
"""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from steerscope.analysis.statistics import least_paired_p, mean_interval, permutation
from steerscope.engines.sync import SyncEngine
from steerscope.evals import scorers as s
from steerscope.evals.classifier import Classifier, Labelled
from steerscope.evals.conditions import steered
from steerscope.evals.forced import ModelScorer
from steerscope.evals.items import Item
from steerscope.evals.run import PROMPTED, UNSTEERED, Condition, EvalRun, generate
from steerscope.evals.scoring import question_means, score, scored_answers, summarise
from steerscope.extraction.personas.definitions import load_personas
from steerscope.extraction.runs import RolloutSettings
from steerscope.vectors.vector import SteeringVector

LEARNED, AVERAGED = "learned", "mean difference"
SHOWN = ("classifier", "keywords", "perplexity", "repetition")
_SAMPLING = RolloutSettings(max_tokens=32)


def parts_of(name: str) -> dict[str, list[list[str]]]:
    """Of a shipped set: its parts, each a list of question, answer with the trait, plain answer."""
    text = (resources.files("steerscope.training") / "data" / f"{name}.json").read_text(encoding="utf-8")
    return {part: rows for part, rows in json.loads(text).items() if isinstance(rows, list)}


def judged(engine: SyncEngine, out: Path, name: str, learned: SteeringVector, average: SteeringVector) -> dict:
    """What each condition scores on the test questions, and how the learned vector compares with each of the others."""
    parts, persona = parts_of(name), load_personas("traits", [name])[0]
    classifier = Classifier(_labelled(parts["train"]))
    told = [Condition(name=f"{PROMPTED}: {one.pos}", told=(one.pos,)) for one in persona.instructions]
    vectors = {AVERAGED: average, LEARNED: learned}
    run = EvalRun(
        conditions=(Condition(name=UNSTEERED), *told, *steered(vectors, [1.0])),
        items=tuple(Item(question=question, dataset="test") for question, *_ in parts["test"]),
        rollouts=_SAMPLING,
        persona=persona,
    )
    run, failures = generate(engine, run, out, vectors=vectors, resume=True)
    assert not failures, failures
    score(out, run, [classifier, s.keywords(persona), s.repetition(), ModelScorer(engine, {})])
    rows = [one for one in summarise(out, run)["conditions"] if one["score"] in SHOWN]
    return {
        "sampling": _SAMPLING.model_dump(),
        "classifier": classifier.about() | {part: _auroc(classifier, parts[part]) for part in ("validation", "test")},
        "conditions": rows,
        "learned_over": {score: _against(out, run, score) for score in ("classifier", "keywords")},
    }


def _labelled(rows: Sequence[Sequence[str]]) -> Labelled:
    questions, yes, no = zip(*rows, strict=True)
    return Labelled((*yes, *no), (True,) * len(yes) + (False,) * len(no), questions * 2, frozenset(questions))


def _auroc(classifier: Classifier, rows: Sequence[Sequence[str]]) -> dict[str, float]:
    """On answers of the set that had no part in its training."""
    data = _labelled(rows)
    said = classifier.probabilities(data.texts)
    right = np.mean((said > 0.5) == np.array(data.positive))
    return {"texts": len(data.texts), "auroc": float(roc_auc_score(data.positive, said)), "right": float(right)}


def _against(out: Path, run: EvalRun, name: str) -> dict[str, dict[str, Any]]:
    """By how much the learned vector at scale 1 scores more than each of the others, question by question."""
    means: dict[str, dict[str, float]] = {}
    for (condition, _, question), values in question_means(scored_answers(out, run), name).items():
        means.setdefault(condition, {})[question] = float(np.mean(values))
    own, found = means.pop(f"{LEARNED} × 1"), {}
    for condition, other in means.items():
        both = [question for question in own if question in other]
        mine, theirs = [own[q] for q in both], [other[q] for q in both]
        apart = mean_interval(np.subtract(mine, theirs))
        p = permutation(mine, theirs, paired=True)
        least = least_paired_p(mine, theirs)
        found[condition] = {"by": apart.estimate, "low": apart.low, "high": apart.high, "p": p, "least_p": least}
    return found
