"""Sets of directions and their components: equal to scikit-learn's, with fixed signs and with chance beside them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.decomposition import PCA

from steerscope.analysis.directions import Directions, components, load_directions, project
from steerscope.analysis.report import extremes
from steerscope.analysis.results import load_results
from steerscope.specs.errors import BadFile, InvalidRequest
from steerscope.vectors.files import save
from steerscope.vectors.vector import SteeringVector

HIDDEN = 48


def drawn(size: int, layers: int = 3, seed: int = 0, hidden: int = HIDDEN) -> Directions:
    rows = np.random.default_rng(seed).standard_normal((layers, size, hidden)).astype(np.float32)
    names = tuple(f"v{i}" for i in range(size))
    return Directions(names, ("a",) * size, tuple(range(layers)), rows)


def planted(strength: float, size: int = 12) -> tuple[Directions, np.ndarray]:
    """Vectors that differ along one axis by their number, and otherwise at random."""
    source, axis = drawn(size), np.eye(HIDDEN)[5]
    rows = source.rows + strength * np.linspace(-1, 1, size)[None, :, None] * axis
    return Directions(source.names, source.groups, source.layers, rows.astype(np.float32)), axis


def test_components_are_those_of_scikit_learn() -> None:
    source = drawn(9)
    found = components(source, 4)
    for i in range(3):
        pca = PCA(4, svd_solver="full").fit(source.rows[i].astype(np.float64))
        assert found.variance[i] == pytest.approx(pca.explained_variance_ratio_, abs=1e-6)
        assert np.abs((found.axes[i] * pca.components_).sum(1)) == pytest.approx(1, abs=1e-5)
        same = np.abs(found.scores[i]) - np.abs(pca.transform(source.rows[i].astype(np.float64)))
        assert np.abs(same).max() < 1e-5


def test_a_planted_axis_is_the_first_component_and_stands_out_from_chance() -> None:
    source, axis = planted(12)
    found = components(source, 3)
    assert np.abs(found.axes[:, 0] @ axis).min() > 0.95
    assert (found.variance[:, 0] > found.chance_high[:, 0]).all()
    assert (found.variance[:, 1] < found.chance_high[:, 0]).all()
    ends = {"v0", "v11"}
    first = extremes(found.result(), 1)[0]
    assert {first["lowest"], first["highest"]} == ends


def test_random_vectors_have_components_as_large_as_chance() -> None:
    found = components(drawn(12, layers=40, seed=3), 1, draws=40)
    above = (found.variance[:, 0] > found.chance_high[:, 0]).mean()
    assert above < 0.2  # 5 % are expected; of 40 layers more than 8 have a chance below 1e-4


def test_signs_agree_from_layer_to_layer_and_follow_the_vector_that_is_named() -> None:
    source, axis = planted(12)
    turned = source.rows.copy()
    turned[1] *= -1  # a layer that points the other way: its scores turn, too
    flipped = Directions(source.names, source.groups, source.layers, turned)
    for one in (source, flipped):
        scores = components(one, 1).scores[:, :, 0]
        assert ((scores[:-1] * scores[1:]).sum(1) > 0).all()
        assert (components(one, 3, positive="v3").scores[:, 3] >= 0).all()
    random = components(drawn(9, layers=12), 4).scores  # whose signs differ at random before they are fixed
    assert ((random[:-1] * random[1:]).sum(1) > 0).all()
    first = components(source, 2).scores[0]
    assert (first[np.abs(first).argmax(0), [0, 1]] > 0).all()
    up = components(source, 1, positive="v11").axes[:, 0] @ axis
    down = components(source, 1, positive="v0").axes[:, 0] @ axis
    assert (up > 0.9).all()
    assert (down < -0.9).all()


def test_random_sets_are_as_long_as_the_real_one_and_differ_by_seed() -> None:
    source = drawn(5)
    random = source.random(1)
    assert random.norms == pytest.approx(source.norms, rel=1e-5)
    assert np.array_equal(random.rows, source.random(1).rows)
    cosines = (random.rows * source.random(2).rows).sum(2) / source.norms**2
    assert np.abs(cosines).max() < 0.6


def test_components_become_vectors_to_steer_with(tmp_path: Path) -> None:
    found = components(drawn(6), 2)
    vectors = found.vectors()
    assert set(vectors) == {"pc1", "pc2"}
    assert np.array_equal(vectors["pc2"][2].numpy(), found.axes[2, 1])
    save(vectors["pc1"], tmp_path / "pc1.safetensors")
    found.result().save(tmp_path)
    table = load_results(tmp_path)["directions"].tables["scores"].to_pylist()
    assert table[0] == {"layer": 0, "name": "v0", "group": "a", "component": 1, "score": found.scores[0, 0, 0]}
    assert len(table) == 3 * 6 * 2


# --- files


def keep(path: Path, layers: tuple[int, ...] | None, hidden: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    directions = {layer: torch.randn(hidden) for layer in layers} if layers else {None: torch.randn(hidden)}
    save(SteeringVector(directions), path)


def test_folders_are_groups_and_names_stay_apart(tmp_path: Path) -> None:
    keep(tmp_path / "roles" / "pirate.safetensors", (1, 2, 3))
    keep(tmp_path / "traits" / "calm.safetensors", (2, 3, 4))
    keep(tmp_path / "traits" / "shared.safetensors", None)
    (tmp_path / "traits" / "rows.safetensors").write_bytes(b"no vector")
    noted: list[str] = []
    found = load_directions([tmp_path / "roles", tmp_path / "traits"], noted.append)
    assert found.names == ("pirate", "calm", "shared")
    assert found.groups == ("roles", "traits", "traits")
    assert found.layers == (2, 3)
    assert len(noted) == 1
    assert "rows.safetensors" in noted[0]
    with pytest.raises(BadFile, match=r"rows.safetensors"):
        load_directions([tmp_path / "traits" / "rows.safetensors"])
    keep(tmp_path / "roles" / "calm.safetensors", (2,))
    assert load_directions([tmp_path / "roles", tmp_path / "traits"]).names[0] == "roles/calm"


def test_what_does_not_fit_together_is_told_at_once(tmp_path: Path) -> None:
    vectors = {
        "a": SteeringVector({1: torch.ones(4)}),
        "b": SteeringVector({1: torch.ones(5)}, site="mlp_out"),
    }
    with pytest.raises(InvalidRequest) as error:
        Directions.of(vectors)
    assert [problem.field for problem in error.value.problems] == ["hidden", "site"]
    with pytest.raises(InvalidRequest, match="no layer is common to all; a has only 1"):
        Directions.of({"a": vectors["a"], "b": SteeringVector({2: torch.ones(4)})})
    with pytest.raises(InvalidRequest, match="the vectors have no layer 2; common to all are 1"):
        Directions.of({"a": vectors["a"]}).at(2)
    with pytest.raises(InvalidRequest, match="holds no vector files"):
        load_directions([tmp_path])
    with pytest.raises(InvalidRequest) as error:
        components(drawn(2), 0, positive="x")
    assert [problem.field for problem in error.value.problems] == ["vectors", "positive", "components"]


# --- projections


def test_projections_find_what_a_vector_is_made_of() -> None:
    named = drawn(5, hidden=512)
    mixed = 2 * named.rows[:, [1]] - named.rows[:, [3]]
    found = project(Directions(("mixed",), ("",), named.layers, mixed), named)
    rows = found.tables["cosines"].to_pylist()
    for row in rows:
        a, b = (
            mixed[row["layer"], 0].astype(float),
            named.at(row["layer"])[named.names.index(row["onto"])].astype(float),
        )
        assert row["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-9)
        assert (row["p"] < 0.001) == (row["onto"] in ("v1", "v3"))
    assert [row["share"] for row in found.tables["spans"].to_pylist()] == pytest.approx([1, 1, 1])
    assert found.tables["spans"].to_pylist()[0]["chance"] == pytest.approx(5 / 512)


def test_what_chance_gives_is_calibrated() -> None:
    """Cosines of random directions: their p are uniform before correction, which none survives."""
    found = project(drawn(40, layers=5, seed=7), drawn(40, layers=5, seed=8))
    cosines, z, p = (found.tables["cosines"].column(name).to_numpy() for name in ("cosine", "z", "p"))
    t = cosines * np.sqrt((HIDDEN - 1) / (1 - cosines**2))
    assert stats.kstest(2 * stats.t.sf(np.abs(t), HIDDEN - 1), "uniform").pvalue > 0.001
    assert (np.abs(z) > 3).mean() < 0.01
    assert p.min() > 0.05
    shares = found.tables["spans"].column("share").to_numpy()
    assert shares.mean() == pytest.approx(40 / HIDDEN, abs=0.02)


def test_projections_need_a_common_layer_and_one_model() -> None:
    with pytest.raises(InvalidRequest, match="48 against 8"):
        project(drawn(3), drawn(3, hidden=8))
    late = Directions(("x",), ("",), (7,), np.ones((1, 1, HIDDEN), np.float32))
    with pytest.raises(InvalidRequest, match="none is common"):
        project(late, drawn(3))
    shared = Directions(("x",), ("",), (None,), np.ones((1, 1, HIDDEN), np.float32))
    assert project(shared, drawn(3)).tables["spans"].column("layer").to_pylist() == [0, 1, 2]
    assert project(late, shared).tables["spans"].column("layer").to_pylist() == [7]
