"""Statistics: a planted effect is found, nothing is found where nothing is, and the numbers are scipy's."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from bench.studies.evals import simulated
from steerscope.evals.items import Item
from steerscope.evals.run import Condition, EvalRun
from steerscope.evals.scoring import compare, out_of_reach

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "eval_study.json"


def rows_of(scores: Mapping[str, np.ndarray], name: str = "x") -> list[dict]:
    """Of each condition [questions, answers]."""
    return [
        {"condition": condition, "dataset": "d", "question": str(q), "scores": {name: float(value)}}
        for condition, table in scores.items()
        for q, answers in enumerate(table)
        for value in answers
    ]


def a_run(*names: str) -> EvalRun:
    return EvalRun(conditions=tuple(Condition(name=name) for name in names), items=(Item(question="?", dataset="d"),))


def test_means_tests_and_corrections_are_those_of_scipy_and_statsmodels() -> None:
    random = np.random.default_rng(3)
    scores = {
        name: random.normal(shift, 1, (9, 3)) for name, shift in (("unsteered", 0), ("a", 0.1), ("b", 1), ("c", 2))
    }
    found = {one["condition"]: one for one in compare(rows_of(scores), a_run(*scores), "x")}
    means = {name: table.mean(1) for name, table in scores.items()}
    exact = []
    for name in ("a", "b", "c"):
        apart = means[name] - means["unsteered"]
        test = stats.permutation_test((apart,), np.mean, permutation_type="samples", n_resamples=np.inf)
        exact.append(float(test.pvalue))
        assert found[name]["difference"] == pytest.approx(apart.mean())
        assert found[name]["p"] == pytest.approx(exact[-1])
        known = stats.ttest_1samp(means[name], 0).confidence_interval(0.95)
        assert (found[name]["low"], found[name]["high"]) == pytest.approx((known.low, known.high))
        known = stats.ttest_rel(means[name], means["unsteered"]).confidence_interval(0.95)
        assert (found[name]["difference_low"], found[name]["difference_high"]) == pytest.approx((known.low, known.high))
    corrected = [found[name]["p_corrected"] for name in ("a", "b", "c")]
    assert corrected == pytest.approx(multipletests(exact, method="holm")[1])
    assert "p" not in found["unsteered"]
    assert (found["a"]["questions"], found["a"]["answers"]) == (9, 27)


def test_answers_to_one_question_do_not_count_as_many() -> None:
    """Copies of an answer must not make anybody surer."""
    random = np.random.default_rng(0)
    once = {name: random.normal(shift, 1, (8, 1)) for name, shift in (("unsteered", 0), ("a", 0.7))}
    often = {name: np.repeat(table, 20, axis=1) for name, table in once.items()}
    first, second = (compare(rows_of(one), a_run(*one), "x")[1] for one in (once, often))
    for key in ("low", "high", "p", "difference_low", "difference_high"):
        assert first[key] == pytest.approx(second[key])


def test_perplexity_is_averaged_and_tested_as_a_logarithm() -> None:
    scores = {"unsteered": np.array([[10.0], [1000.0], [10.0]]), "a": np.array([[20.0], [2000.0], [20.0]])}
    plain, twice = compare(rows_of(scores, "perplexity"), a_run(*scores), "perplexity")
    assert plain["mean"] == pytest.approx(10 ** (5 / 3))
    assert twice["mean"] == pytest.approx(2 * 10 ** (5 / 3))
    assert twice["difference"] == pytest.approx(np.log(2))


@pytest.mark.parametrize("name", ["x", "perplexity"])
def test_of_one_question_nobody_knows_how_sure_it_is(name: str) -> None:
    one = {"unsteered": np.full((1, 3), 2.0), "a": np.array([[2.0, 4.0, 8.0]])}
    for entry in compare(rows_of(one, name), a_run(*one), name):
        assert (entry["low"], entry["high"], entry["questions"]) == (None, None, 1)
        assert "p" not in entry
    two = {"a": np.array([[2.0], [8.0]])}
    (entry,) = compare(rows_of(two, name), a_run(*two), name)
    assert entry["low"] < entry["mean"] < entry["high"]


@pytest.mark.parametrize(
    ("questions", "conditions", "least"), [(4, 1, 0.125), (5, 1, 0.0625), (6, 1, 2 / 64), (8, 4, 8 / 256)]
)
def test_the_least_p_is_that_of_a_difference_as_large_as_can_be(questions: int, conditions: int, least: float) -> None:
    scores = {"unsteered": np.arange(questions)[:, None] / 10}
    scores |= {f"c{i}": scores["unsteered"] + 1e6 * (i + 1) for i in range(conditions)}
    _, *found = compare(rows_of(scores), a_run(*scores), "x")
    assert [one["p_corrected"] for one in found] == pytest.approx([least] * conditions)
    assert [one["least_p_corrected"] for one in found] == pytest.approx([least] * conditions)
    said = out_of_reach(found)
    assert bool(said) == (least >= 0.05)
    if said:
        assert said.startswith(f"{conditions} of {conditions} differences cannot reach p < 0.05")
        assert f"with {questions} questions, less those scored alike, p is at least {least:.2g}" in said


def test_questions_that_are_scored_alike_add_nothing_to_what_a_test_can_find() -> None:
    scores = {"unsteered": np.zeros((9, 1)), "a": np.array([[0.0]] * 5 + [[1.0]] * 4)}
    (_, found) = compare(rows_of(scores), a_run(*scores), "x")
    assert found["p"] == found["least_p"] == pytest.approx(2 / 2**4)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_intervals_of_few_questions_cover_the_truth(n: int) -> None:
    random, covered, runs = np.random.default_rng(n), {"mean": 0, "difference": 0}, 300
    for _ in range(runs):
        level = random.normal(0, 1, (n, 1))
        scores = {name: level + shift + random.normal(0, 1, (n, 2)) for name, shift in (("unsteered", 0), ("a", 0.5))}
        _, found = compare(rows_of(scores), a_run(*scores), "x")
        covered["mean"] += found["low"] <= 0.5 <= found["high"]
        covered["difference"] += found["difference_low"] <= 0.5 <= found["difference_high"]
    assert min(covered.values()) / runs >= 0.92


def test_answers_that_are_all_right_do_not_make_the_share_certain() -> None:
    scores = {"unsteered": np.ones((5, 1)), "a": np.ones((5, 1))}
    first, second = compare(rows_of(scores, "correct"), a_run(*scores), "correct")
    assert (first["mean"], first["low"], first["high"]) == pytest.approx((1, 0.025 ** (1 / 5), 1))
    assert (second["difference"], second["difference_low"], second["p"]) == (0, None, 1)
    (other, _) = compare(rows_of(scores), a_run(*scores), "x")
    assert (other["mean"], other["low"], other["high"]) == (1, None, None), "of a score of any kind nothing is known"


def test_a_condition_that_changes_nothing_and_one_without_a_base_are_not_found() -> None:
    same = {"unsteered": np.ones((5, 1)), "a": np.ones((5, 1))}
    assert compare(rows_of(same), a_run(*same), "x")[1]["p_corrected"] == 1.0
    alone = {"a": np.ones((5, 1))}
    assert "p" not in compare(rows_of(alone), a_run(*alone), "x")[0]


def test_a_planted_effect_is_found_and_a_null_effect_is_not() -> None:
    """A few of the 200 runs each that are in the committed results."""
    null, planted = (simulated(effect, runs=40, conditions=2, questions=8) for effect in (0.0, 3.0))
    assert null["found_anywhere"] <= 0.15  # 0.05 are expected; more than 6 of 40 have a chance of 0.3 %
    assert planted["found_in_the_planted_condition"] >= 0.9


def test_over_200_simulated_runs_the_share_of_false_findings_is_what_is_promised() -> None:
    null, weak, strong = json.loads(RESULTS.read_text(encoding="utf-8"))["simulated"]
    assert (null["effect"], null["runs"]) == (0.0, 200)
    assert null["found_anywhere"] <= 0.09  # 0.05 are expected; more than 18 of 200 have a chance of 0.4 %
    assert strong["found_in_the_planted_condition"] > 0.9 > weak["found_in_the_planted_condition"]
