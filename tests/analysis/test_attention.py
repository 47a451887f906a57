"""Attention between directions: against the real model's attention weights, symmetries, planted heads, calibration."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from analysis.families import FAMILIES, family, named, saved
from steerscope.analysis.attention import attention_pass
from steerscope.analysis.attention_tables import ALL
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.results import Result, load_results
from steerscope.specs.errors import InvalidRequest

UNBIASED = [name for name in FAMILIES if name != "qwen2"]


def grid(result: Result, layer: int, column: str = "affinity") -> np.ndarray:
    """[query, key] of a layer, all heads together."""
    table = result.tables["pairs"]
    values = table.filter(table["layer"].to_numpy() == layer)[column].to_numpy()
    return values.reshape(int(len(values) ** 0.5), -1)


def heads(result: Result, layer: int, column: str, head: int = ALL) -> np.ndarray:
    table = result.tables["heads"]
    mine = (table["layer"].to_numpy() == layer) & (table["head"].to_numpy() == head)
    return table.filter(mine)[column].to_numpy()


def weights_of(model: PreTrainedModel, layer: int, text: torch.Tensor) -> torch.Tensor:
    """The real attention weights [heads, query, key] of a layer that is given this text [tokens, hidden]."""
    put = lambda _m, args, kwargs: ((text[None], *args[1:]), kwargs)  # noqa: E731
    handle = model.model.layers[layer].register_forward_pre_hook(put, with_kwargs=True)
    try:
        with torch.no_grad():
            return model(torch.zeros(1, len(text), dtype=torch.long), output_attentions=True).attentions[layer][0]
    finally:
        handle.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_affinities_are_the_logits_behind_the_real_attention_weights(name: str, tmp_path: Path) -> None:
    """b stands at position 0 and a right behind it: the ratio of a's two weights is a difference of two affinities."""
    model, directions = family(name), named(3)
    checkpoint = Checkpoint(saved(model, tmp_path))
    near, apart = (attention_pass(checkpoint, directions, random=100, distance=d) for d in (0, 1))
    rows = torch.from_numpy(directions.normalised().rows[0]) * 8
    for layer in range(4):
        for a in range(3):
            for b in range(3):
                real = weights_of(model, layer, rows[[b, a]])[:, 1].double().log()
                expected = float((real[:, 0] - real[:, 1]).sum())
                assert grid(apart, layer)[a, b] - grid(near, layer)[a, a] == pytest.approx(expected, abs=5e-4, rel=1e-4)
        np.testing.assert_allclose(heads(near, layer, "self"), np.diag(grid(near, layer)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_what_is_written_equals_the_real_modules(name: str, tmp_path: Path) -> None:
    """A token alone looks at itself with all its heads."""
    model, directions = family(name), named(2)
    found = attention_pass(Checkpoint(saved(model, tmp_path)), directions, random=100)
    rows = torch.from_numpy(directions.normalised().rows[0]) * 8
    units = (rows / 8).double()
    for number, layer in enumerate(model.model.layers):
        mixed, attended = [], []
        handles = [
            layer.register_forward_pre_hook(lambda _m, a, k: ((rows[:, None], *a[1:]), k), with_kwargs=True),
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, a, mixed=mixed: mixed.append(a[0][:, 0])),
            layer.self_attn.register_forward_hook(lambda _m, _a, out, kept=attended: kept.append(out[0][:, 0])),
        ]
        model(torch.zeros(2, 1, dtype=torch.long))
        for handle in handles:
            handle.remove()
        total = attended[0].double()
        np.testing.assert_allclose(heads(found, number, "write"), (total * units).sum(1), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(heads(found, number, "write_norm"), total.norm(dim=1), rtol=1e-4, atol=1e-4)
        size, bias = layer.self_attn.head_dim, layer.self_attn.o_proj(torch.zeros_like(mixed[0]))
        alone = torch.zeros_like(mixed[0])
        alone[:, size : 2 * size] = mixed[0][:, size : 2 * size]
        by_head = (layer.self_attn.o_proj(alone) - bias).double()
        np.testing.assert_allclose(heads(found, number, "write", 1), (by_head * units).sum(1), rtol=1e-4, atol=1e-4)
        added = layer.post_attention_layernorm(attended[0]) if "gemma2" in name or "gemma3" in name else attended[0]
        table = found.tables["written"].filter(
            (found.tables["written"]["layer"].to_numpy() == number) & (found.tables["written"]["sign"].to_numpy() == 1)
        )
        np.testing.assert_allclose(table["parallel"].to_numpy(), (added.double() * units).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("distance", [0, 5])
def test_opposites_look_at_opposites_as_the_directions_do(name: str, distance: int, tmp_path: Path) -> None:
    """QK(−v, −w) = QK(v, w) and QK(v, −v) = −QK(v, v): exactly where nothing has a bias, and not where q and k have."""
    checkpoint, directions = Checkpoint(saved(family(name), tmp_path)), named(4)
    plain, mirrored = (
        attention_pass(checkpoint, one, random=100, distance=distance) for one in (directions, directions.negated())
    )
    for layer in range(4):
        same = np.allclose(grid(plain, layer), grid(mirrored, layer), rtol=1e-5, atol=1e-4)
        turned = np.allclose(heads(plain, layer, "self"), -heads(plain, layer, "opposite"), rtol=1e-5, atol=1e-4)
        assert (same, turned) == ((name in UNBIASED,) * 2)


def test_a_planted_look_is_found_at_its_layer_and_head(tmp_path: Path) -> None:
    """Head 2 of layer 1 learns to look from d0 at d3; its key head serves head 3, whose queries did not change."""
    base, directions = family("llama"), named(8)
    tuned, rows = copy.deepcopy(base), torch.from_numpy(directions.normalised().rows[0]) * 8
    layer = tuned.model.layers[1]
    size = layer.self_attn.head_dim
    with torch.no_grad():
        query, key = layer.input_layernorm(rows[0]), layer.input_layernorm(rows[3])
        meet = torch.nn.functional.normalize(torch.randn(size, generator=torch.Generator().manual_seed(0)), dim=0)
        layer.self_attn.q_proj.weight[2 * size : 3 * size] += 3 * torch.outer(meet, query / query.norm())
        layer.self_attn.k_proj.weight[size : 2 * size] += 3 * torch.outer(meet, key / key.norm())
    found = attention_pass(
        Checkpoint(saved(base, tmp_path / "a")), directions, Checkpoint(saved(tuned, tmp_path / "b"))
    )
    top = found.tables["top"].filter(found.tables["top"]["by"].to_numpy(zero_copy_only=False) == "z_change")
    best = top.slice(0, 1).to_pylist()[0]
    assert (best["layer"], best["head"], best["query"], best["key"]) == (1, 2, "d0", "d3")
    assert best["z_change"] > 5
    assert not np.abs(grid(found, 0, "change")).any()
    assert not np.abs(grid(found, 3, "z_change")).any()
    significant = found.tables["pairs"].filter(found.tables["pairs"]["p_change"].to_numpy() < 0.01).to_pylist()
    assert {(row["layer"], row["query"], row["key"]) for row in significant} == {(1, "d0", "d3")}


def test_a_planted_write_is_found_at_its_layer_and_head(tmp_path: Path) -> None:
    base, directions = family("qwen3"), named(8)
    tuned, rows = copy.deepcopy(base), torch.from_numpy(directions.normalised().rows[0]) * 8
    layer = tuned.model.layers[2]
    size = layer.self_attn.head_dim
    with torch.no_grad():
        value = layer.self_attn.v_proj(layer.input_layernorm(rows[5]))[size : 2 * size]  # of heads 2 and 3
        push = torch.outer(rows[5] / 8, value / value.norm())
        layer.self_attn.o_proj.weight[:, 3 * size : 4 * size] += push
    found = attention_pass(
        Checkpoint(saved(base, tmp_path / "a")), directions, Checkpoint(saved(tuned, tmp_path / "b"))
    )
    rows_of = [row for row in found.tables["heads"].to_pylist() if row["head"] != ALL]
    best = max(rows_of, key=lambda row: row["z_change_write"])
    assert (best["layer"], best["head"], best["name"]) == (2, 3, "d5")
    assert found.about["focus"] == {"change": 2, "turn": 2}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_few_random_directions_are_extreme(name: str, tmp_path: Path) -> None:
    a, b = (Checkpoint(saved(family(name, seed), tmp_path / str(seed))) for seed in (0, 1))
    found = attention_pass(a, named(120), b, distance=2)
    for table in ("pairs", "heads", "written"):
        for column in (column for column in found.tables[table].column_names if column.startswith("z")):
            z = found.tables[table][column].to_numpy()
            assert (np.abs(z) > 3).mean() < 0.01, (table, column)
            assert 0.8 < z.std() < 1.2, (table, column)
    assert found.tables["beyond"]["percent"].to_numpy().max() < 1
    assert found.tables["pairs"]["p"].to_numpy().min() > 0.001, "no pair of random directions is a finding"


def test_one_direction_has_no_pairs_and_results_come_back_from_files(tmp_path: Path) -> None:
    found = attention_pass(Checkpoint(saved(family("llama"), tmp_path / "model")), named(1), random=100)
    assert found.tables["top"].num_rows == 0
    found.save(tmp_path / "out")
    again = load_results(tmp_path / "out")["attention"]
    assert again.about == found.about
    assert all(again.tables[name].equals(table) for name, table in found.tables.items())


def test_directions_of_each_layer_meet_that_layer(tmp_path: Path) -> None:
    checkpoint = Checkpoint(saved(family("llama"), tmp_path))
    one, other = named(2, seed=1), named(2, seed=2)
    both = Directions(one.names, one.groups, (1, 3), np.concatenate([one.rows, other.rows]))
    found = attention_pass(checkpoint, both, random=100)
    assert set(found.tables["pairs"]["layer"].to_pylist()) == {1, 3}
    np.testing.assert_allclose(grid(found, 3), grid(attention_pass(checkpoint, other, random=100), 3), rtol=1e-5)
    everywhere = attention_pass(checkpoint, both, layer=1, random=100)
    np.testing.assert_allclose(grid(everywhere, 3), grid(attention_pass(checkpoint, one, random=100), 3), rtol=1e-5)


def test_a_distance_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(saved(family("llama"), tmp_path))
    for distance in (-1, 256):
        with pytest.raises(InvalidRequest, match=f"distance: {distance} is out of range; .* from 0 to 255"):
            attention_pass(checkpoint, named(2), distance=distance)
