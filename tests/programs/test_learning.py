"""What the docs say of learned vectors: the committed results hold, and the plots are theirs."""

import json
from pathlib import Path

import pytest

from bench.studies.learning import QUESTIONS, RATES, STAGES
from bench.studies.learning_judged import parts_of
from bench.tables import learning
from steerscope.extraction.personas.definitions import load_questions
from steerscope.training.texts import load_training_set

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results"
FOUND = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))


def test_the_learned_vector_beats_the_average_the_prompt_and_the_model_alone() -> None:
    found = FOUND["test"]
    perplexity = found["perplexity"]
    assert min(perplexity, key=perplexity.get) == "learned"
    assert perplexity["mean difference"] < perplexity["unsteered"]
    for name in ("unsteered", "mean difference", "prompted"):
        estimate, low, high = found["learned_better_by"][name]
        assert 0 < low <= estimate <= high
        assert found["p"][name] < 0.01
    assert found["texts"] == len(load_training_set(FOUND["data"]).test)


def test_its_answers_show_the_trait_at_least_about_as_much_as_those_of_the_best_prompt() -> None:
    found = FOUND["judged"]["conditions"]
    scores = {one["condition"]: one for one in found if one["score"] == "classifier"}
    plain, learned = scores["unsteered"]["mean"], scores["learned × 1"]
    told = [one["mean"] for name, one in scores.items() if name.startswith("prompted: ")]
    assert len(told) == len(load_training_set(FOUND["data"]).prompts)
    assert learned["mean"] - plain > 0.8 * (max(told) - plain) > 0
    assert learned["p_corrected"] < 0.05


def test_the_judging_classifier_was_tested_on_answers_it_had_not_seen() -> None:
    found, parts = FOUND["judged"], parts_of(FOUND["data"])
    learned = {text for row in parts["train"] for text in row}
    assert found["classifier"]["trained on"] == 2 * len(parts["train"])
    for part in ("validation", "test"):
        assert not learned & {text for row in parts[part] for text in row}
        assert found["classifier"][part]["texts"] == 2 * len(parts[part])
        assert found["classifier"][part]["auroc"] > 0.9
    counts = {one["answers"] for one in found["conditions"] if one["score"] in ("classifier", "perplexity")}
    assert counts == {len(parts["test"])}


def test_the_best_rate_of_the_sweep_is_the_one_that_was_tested() -> None:
    runs = {run["rate"]: run for run in FOUND["sweep"]["runs"]}
    assert set(runs) == set(RATES)
    assert not FOUND["sweep"]["failed"]
    assert min(runs, key=lambda rate: runs[rate]["steered"]) == FOUND["sweep"]["best_rate"]
    assert all(run["steered"] < run["prompted"] < run["unsteered"] for run in runs.values())


def test_a_killed_run_ended_like_one_that_was_left_alone_and_files_are_small() -> None:
    resume = FOUND["resume"]
    assert 0 < resume["killed_after"] < resume["steps"]
    assert all(resume["same"].values())
    assert FOUND["sweep"]["bytes"]["vector.safetensors"] < 4096
    assert FOUND["sweep"]["bytes"]["checkpoint.safetensors"] < 16384


def test_all_of_it_is_a_matter_of_minutes() -> None:
    assert sum(FOUND[name]["processor_seconds"] for name in STAGES) < 20 * 60


def test_answers_are_to_questions_nobody_learned_from() -> None:
    data = load_training_set(FOUND["data"])
    asked = {chat[0].content for part in (data.train, data.validation, data.test) for chat in part}  # type: ignore[index, union-attr]
    assert not asked & set(QUESTIONS)
    assert set(QUESTIONS) <= set(load_questions())


@pytest.mark.parametrize("name", learning.PLOTS)
def test_plots_are_those_of_the_committed_results(name: str) -> None:
    drawn = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert drawn == learning.PLOTS[name](RESULTS), "run: python -m bench.tables.__main__"
