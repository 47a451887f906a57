"""Linear probes of scikit-learn as packs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from steerscope.lenses import Concept
from steerscope.lenses.bank import Bank
from steerscope.lenses.formats.probes import from_probes, load_probes
from steerscope.specs.errors import BadFile, InvalidRequest

RNG = np.random.default_rng(0)
X = RNG.normal(2.0, 3.0, (200, 12)) * np.arange(1, 13)
Y = X @ RNG.normal(size=12) + RNG.normal(size=200) * 20 > 10
WHERE = {"model": "org/model", "layer": 4}


def probabilities(pack) -> np.ndarray:
    return Bank(pack).probabilities(torch.from_numpy(X).float()).double().numpy()


def test_probes_and_pipelines_give_their_own_probabilities():
    plain = LogisticRegression(max_iter=5000).fit(X, Y)
    scaled = make_pipeline(StandardScaler(), "passthrough", LogisticRegression()).fit(X, ~Y)
    centred = make_pipeline(StandardScaler(with_std=False), LogisticRegression(max_iter=5000)).fit(X, Y)
    spread = make_pipeline(StandardScaler(with_mean=False), LogisticRegression(fit_intercept=False)).fit(X, Y)
    probes = {"plain": plain, "scaled": scaled, "centred": centred, "spread": spread}
    pack = from_probes(probes, **WHERE)
    expected = np.stack([probe.predict_proba(X)[:, 1] for probe in probes.values()], 1)
    assert expected.std() > 0.2
    np.testing.assert_allclose(probabilities(pack), expected, atol=1e-4)
    assert [concept.id for concept in pack.concepts] == list(probes)
    assert (pack.info.normalisation, pack.info.architecture.widths, pack.info.layer) == ("none", (), 4)


def test_logits_are_the_decision_function_and_classes_become_lenses():
    labels = np.digitize(X[:, 0], [-1, 4])
    probe = RidgeClassifier().fit(X, labels)
    pack = from_probes({"size": probe}, **WHERE)
    assert [concept.id for concept in pack.concepts] == ["size=0", "size=1", "size=2"]
    found = Bank(pack).logits(torch.from_numpy(X).float()).numpy()
    np.testing.assert_allclose(found, probe.decision_function(X), atol=1e-4)


def test_concepts_describe_the_lenses_and_order_them():
    probe = LogisticRegression(max_iter=5000).fit(X, Y)
    concepts = [Concept(id="b", level=1, parents=("a",), definition="below"), Concept(id="a")]
    pack = from_probes({"b": probe, "a": LogisticRegression(max_iter=5000).fit(X, ~Y)}, **WHERE, concepts=concepts)
    assert [concept.id for concept in pack.concepts] == ["a", "b"]
    np.testing.assert_allclose(probabilities(pack)[:, 1], probe.predict_proba(X)[:, 1], atol=1e-4)
    with pytest.raises(InvalidRequest, match="differ in a"):
        from_probes({"b": probe}, **WHERE, concepts=concepts)


def test_everything_that_is_no_linear_probe_is_named_in_one_error():
    good = LogisticRegression(max_iter=5000).fit(X, Y)
    wrong = {
        "good": good,
        "small": LogisticRegression(max_iter=5000).fit(X[:, :5], Y),
        "tree": DecisionTreeClassifier().fit(X, Y),
        "unfitted": LogisticRegression(),
        "pca": make_pipeline(PCA(3), LogisticRegression()).fit(X, Y),
    }
    with pytest.raises(InvalidRequest) as caught:
        from_probes(wrong, **WHERE)
    for expected in ("'tree': is a DecisionTreeClassifier", "'unfitted'", "'pca': has a step PCA", "sizes [5, 12]"):
        assert expected in str(caught.value)
    with pytest.raises(InvalidRequest, match="there are none"):
        from_probes({}, **WHERE)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("underscore", ["", "_"])
def test_numbers_in_a_file_are_the_same_probe(tmp_path: Path, suffix: str, underscore: str):
    probe = LogisticRegression(max_iter=5000).fit(X, Y)
    arrays = {f"coef{underscore}": probe.coef_, f"intercept{underscore}": probe.intercept_}
    path = tmp_path / f"p{suffix}"
    np.savez(path, **arrays) if suffix == ".npz" else save_file(arrays, path)
    pack = load_probes(path, **WHERE, names=["joy"])
    assert pack.index("joy") == 0
    np.testing.assert_allclose(probabilities(pack)[:, 0], probe.predict_proba(X)[:, 1], atol=1e-4)


def test_names_in_the_file_are_used(tmp_path: Path):
    np.savez(tmp_path / "p.npz", coef_=np.ones((2, 3)), intercept_=np.zeros(2), names=np.array(["x", "y"]))
    assert [c.id for c in load_probes(tmp_path / "p.npz", **WHERE).concepts] == ["x", "y"]


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"coef_": np.ones((2, 3))}, "expected coef_ and intercept_"),
        ({"coef_": np.ones((2, 3)), "intercept_": np.zeros(3)}, r"\[2, 3\], intercept_ \[3\]"),
        ({"coef_": np.full((2, 3), np.nan), "intercept_": np.zeros(2)}, "NaN"),
        ({"coef_": np.ones((2, 3)), "intercept_": np.zeros(2), "names": np.array(["x", "x"])}, "1 different names"),
        ({"coef_": np.array([object()]), "intercept_": np.zeros(1)}, "not a readable file of probes"),
    ],
)
def test_a_file_that_holds_no_probes_is_refused_by_name(tmp_path: Path, arrays: dict, reason: str):
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(BadFile, match=rf"(?s)p\.npz.*{reason}"):
        load_probes(tmp_path / "p.npz", **WHERE)
    with pytest.raises(BadFile, match="unknown suffix"):
        load_probes(tmp_path / "p.pkl", **WHERE)
