"""Directions through MLPs: every number against the real modules, planted structure, calibrated z-scores."""

import copy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import stats
from torch import nn

from analysis.families import FAMILIES, family, named, negated, saved
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import group_tests, mlp_pass, p_by_rank, ranking, z_by_rank
from steerscope.analysis.results import where
from steerscope.specs.errors import InvalidRequest
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def joined(parts: list[dict[str, np.ndarray]]) -> pa.Table:
    return pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def plainly(layer: nn.Module, row: torch.Tensor) -> torch.Tensor:
    """The real modules, one after the other."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(row)))
    return layer.mlp(layer.post_attention_layernorm(row))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_measure_equals_the_real_modules(name: str, tmp_path: Path) -> None:
    base, tuned = family(name), family(name, seed=1)
    checkpoints = [Checkpoint(saved(model, tmp_path / str(i))) for i, model in enumerate((base, tuned))]
    directions = named(3)
    rows = mlp_pass(checkpoints[0], directions, checkpoints[1], random=100).tables["written"].to_pylist()
    assert len(rows) == 4 * 3 * 2
    for row in rows:
        unit = torch.from_numpy(directions.rows[0, directions.names.index(row["name"])]) * row["sign"]
        unit = (unit / unit.norm()).double()
        a, b = (plainly(model.model.layers[row["layer"]], (8 * unit).float()[None])[0] for model in (base, tuned))
        a, b = a.double(), b.double()
        expected = {
            "norm": a.norm(),
            "parallel": a @ unit,
            "orthogonal": (a - (a @ unit) * unit).norm(),
            "cosine": (a @ unit) / a.norm(),
            "change": (b - a).norm(),
            "turn": 1 - (a @ b) / (a.norm() * b.norm()),
            "change_parallel": (b - a) @ unit,
        }
        for measure, value in expected.items():
            assert row[measure] == pytest.approx(float(value), rel=1e-4, abs=1e-4), (row["layer"], measure)


def test_a_planted_change_is_found_at_its_layer_and_direction(tmp_path: Path) -> None:
    """Layer 2 learns to write the direction `d1` when it sees it."""
    base, directions = family("llama"), named(6)
    tuned, d = copy.deepcopy(base), torch.from_numpy(directions.rows[0, 1])
    layer, kept = tuned.model.layers[2], []
    layer.mlp.down_proj.register_forward_pre_hook(lambda _m, args: kept.append(args[0][0]))
    with torch.no_grad():
        plainly(layer, 8 * d[None] / d.norm())
        layer.mlp.down_proj.weight += torch.outer(d / d.norm(), kept[0] / kept[0].norm())
    found = mlp_pass(Checkpoint(saved(base, tmp_path / "a")), directions, Checkpoint(saved(tuned, tmp_path / "b")))
    assert found.about["focus"] == {"change": 2, "turn": 2}
    rows = found.tables["written"].to_pylist()
    assert all(row["change"] == 0 and row["z_change"] == 0 for row in rows if row["layer"] != 2)
    planted = [row for row in rows if row["layer"] == 2 and row["sign"] == 1]
    best = max(planted, key=lambda row: row["z_change_parallel"])
    assert best["name"] == "d1"
    assert best["z_change_parallel"] > 6
    assert all(abs(row["z_change_parallel"]) < 4 for row in planted if row["name"] != "d1")
    first = found.tables["ranking"].slice(0, 1).to_pylist()[0]
    assert (first["measure"], first["name"], first["max_layer"]) == ("change", "d1", 2)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_few_random_directions_are_extreme(name: str, tmp_path: Path) -> None:
    a, b = (Checkpoint(saved(family(name, seed), tmp_path / str(seed))) for seed in (0, 1))
    table = mlp_pass(a, named(300), b).tables["written"]
    for column in (column for column in table.column_names if column.startswith("z_")):
        z = table[column].to_numpy()
        assert (np.abs(z) > 3).mean() < 0.01, column
        assert 0.9 < z.std() < 1.1, column


def test_z_by_rank_is_calibrated_where_tails_are_heavy_and_grows_beyond_them() -> None:
    generator = torch.Generator().manual_seed(0)
    values, baseline = (torch.randn(8, n, generator=generator).abs() ** 3 for n in (4000, 1024))
    plain = (values - baseline.mean(1, keepdim=True)) / baseline.std(1, keepdim=True)
    assert (plain.abs() > 3).float().mean() > 0.01, "these tails are not heavy"
    z = z_by_rank(values, baseline)
    assert (z.abs() > 3).float().mean() < 0.01
    assert torch.equal(z[0].argsort(), values[0].argsort())
    normal = torch.randn(1, 50_000, generator=generator)
    points = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])
    torch.testing.assert_close(z_by_rank(points, normal), points, atol=0.05, rtol=0)
    far = z_by_rank(torch.tensor([[20.0, -20.0]]), normal)
    assert 15 < far[0, 0] < 25
    assert -25 < far[0, 1] < -15


def test_directions_of_each_layer_meet_that_layer_or_those_of_one_meet_all(tmp_path: Path) -> None:
    checkpoint, one, other = Checkpoint(saved(family("llama"), tmp_path)), named(2, seed=1), named(2, seed=2)
    both = Directions(one.names, one.groups, (1, 3), np.concatenate([one.rows, other.rows]))
    of = lambda directions, **asked: where(  # noqa: E731
        mlp_pass(checkpoint, directions, random=100, **asked).tables["written"], "layer", 3
    )["norm"].to_numpy()
    np.testing.assert_array_equal(of(both), of(other))
    np.testing.assert_array_equal(of(both, layer=1), of(one))


def test_p_by_rank_is_uniform_whatever_the_tails_are() -> None:
    generator = torch.Generator().manual_seed(0)
    baseline = torch.arange(1.0, 20.0)  # 19 of them
    found = p_by_rank(torch.tensor([0.0, 1.0, 10.0, 18.5, 99.0]), baseline)
    torch.testing.assert_close(found, torch.tensor([2 / 20, 4 / 20, 1.0, 4 / 20, 2 / 20]))
    p = torch.cat(
        [p_by_rank(draws[:40], draws[40:]) for draws in torch.randn(200, 139, generator=generator).pow(3).unbind()]
    )
    for level in (0.02, 0.1, 0.5):
        assert (p <= level + 1e-6).float().mean() == pytest.approx(level, abs=0.2 * level)


def test_given_directions_are_a_second_baseline_on_both_sides(tmp_path: Path) -> None:
    checkpoint, directions, against = Checkpoint(saved(family("qwen3"), tmp_path)), named(2), named(8, seed=8)
    found = mlp_pass(checkpoint, directions, random=100, against=against).tables["written"]
    plain, given = (mlp_pass(checkpoint, one, random=100).tables["written"] for one in (directions, against))
    assert plain["z_norm"].equals(found["z_norm"])
    for layer in range(4):
        mine, theirs = (torch.tensor(where(table, "layer", layer)["parallel"].to_pylist()) for table in (found, given))
        assert len(theirs) == 16
        expected = z_by_rank(mine, theirs)
        np.testing.assert_allclose(where(found, "layer", layer)["against_z_parallel"].to_numpy(), expected, **CLOSE)


def test_the_opposite_is_measured_along_itself(tmp_path: Path) -> None:
    """An MLP is not odd, so v and −v differ; −v as the direction gives what v's sign −1 gives."""
    checkpoint, directions = Checkpoint(saved(family("qwen3"), tmp_path)), named(2)
    both = (directions, negated(directions))
    plain, mirrored = (mlp_pass(checkpoint, one, random=100).tables["written"] for one in both)
    of = lambda table, sign: table.filter(table["sign"].to_numpy() == sign)["parallel"].to_numpy()  # noqa: E731
    np.testing.assert_allclose(of(plain, -1), of(mirrored, 1), **CLOSE)
    assert np.abs(of(plain, -1) - of(plain, 1)).max() > 0.1


def test_groups_are_compared_with_welchs_test_corrected_over_measures() -> None:
    values = np.random.default_rng(0).normal(size=(5, 12))
    values[:, :6] += 2.0
    parts = [
        {
            "layer": np.full(12, layer),
            "name": np.array([f"v{i}" for i in range(12)], object),
            "group": np.array(["roles"] * 6 + ["traits"] * 6, object),
            "x": row,
            "y": row[::-1] * 0.01 + np.arange(12) % 2,
            "same": np.zeros(12),
        }
        for layer, row in enumerate(values)
    ]
    ranked = ranking(joined(parts), ("x", "y", "same"))
    top = ranked.slice(0, 1).to_pylist()[0]
    means = values.mean(0)
    assert top["name"] == f"v{means.argmax()}"
    assert top["mean"] == pytest.approx(means.max())
    assert top["max"] == values[:, means.argmax()].max()
    first, second = group_tests(ranked)  # none of "same", which has nothing to test
    plain = stats.ttest_ind(means[:6], means[6:], equal_var=False)
    assert first["t"] == pytest.approx(plain.statistic)
    assert first["p"] == pytest.approx(2 * plain.pvalue)
    assert (first["a"], first["b"]) == ("roles", "traits")
    assert second["p"] > 0.05


def test_wrong_input_is_refused_with_every_reason(tmp_path: Path) -> None:
    base = Checkpoint(saved(family("llama"), tmp_path / "a"))
    other = Checkpoint(saved(tiny.model("llama", layers=2), tmp_path / "b"))
    with pytest.raises(InvalidRequest, match="2 layers of 64 against 4 of 64") as error:
        mlp_pass(base, named(2, hidden=32), other)
    assert "have 32 numbers" in str(error.value)
    with pytest.raises(InvalidRequest) as error:
        mlp_pass(base, named(2), base, random=10, against=named(7), layer=2)
    told = [f"{problem.field}: {problem.remedy}" for problem in error.value.problems]
    assert told == ["tuned: give the checkpoint after training", "random: take 100 or more", "against: give 8 or more"]
    late = Directions(("d",), ("",), (9,), named(1).rows)
    with pytest.raises(InvalidRequest, match=r"directions: have no layer of .*; it has 0-3"):
        mlp_pass(base, late)
    with pytest.raises(InvalidRequest, match=r"directions: have no layer 3; they have 9"):
        mlp_pass(base, late, layer=3)
    zero = named(2)
    zero.rows[0, 1] = 0
    with pytest.raises(InvalidRequest, match="zero at layer 0: d1"):
        mlp_pass(base, zero)
    zero = named(8)
    zero.rows[0, 5] = 0
    with pytest.raises(InvalidRequest, match="zero at layer 0: d5"):
        mlp_pass(base, named(2), against=zero)
