"""Attention between directions: against the real model's attention weights, symmetries, planted heads, calibration."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from analysis.families import FAMILIES, family, named, negated, saved, unit_rows, watching
from steerscope.analysis.attention import ALL, attention_pass
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import z_by_rank
from steerscope.analysis.results import AnalysisResult, load_results
from steerscope.specs.errors import InvalidRequest

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

UNBIASED = [name for name in FAMILIES if name != "qwen2"]


def grid(result: AnalysisResult, layer: int, column: str = "affinity") -> np.ndarray:
    """[query, key] of a layer, all heads together."""
    table = result.tables["pairs"]
    values = table.filter(table["layer"].to_numpy() == layer)[column].to_numpy()
    return values.reshape(int(len(values) ** 0.5), -1)


def heads(result: AnalysisResult, layer: int, column: str, head: int = ALL) -> np.ndarray:
    table = result.tables["heads"]
    mine = (table["layer"].to_numpy() == layer) & (table["head"].to_numpy() == head)
    return table.filter(mine)[column].to_numpy()


def both(name: str, folder: Path) -> tuple[list[PreTrainedModel], list[Checkpoint]]:
    """Two models of a family in float64, and their checkpoints."""
    models = [family(name, seed) for seed in (0, 1)]
    checkpoints = [Checkpoint(saved(model, folder / str(seed))) for seed, model in enumerate(models)]
    return [copy.deepcopy(model).double() for model in models], checkpoints


@contextmanager
def given(model: PreTrainedModel, layer: int, texts: torch.Tensor) -> Iterator[None]:
    """A layer that gets these texts [batch, tokens, hidden] as its input."""
    put = lambda _m, args, kwargs: ((texts, *args[1:]), kwargs)  # noqa: E731
    handle = model.model.layers[layer].register_forward_pre_hook(put, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_affinities_are_the_logits_behind_the_real_attention_weights(name: str, tmp_path: Path) -> None:
    """b stands at position 0 and a right behind it: the ratio of a's two weights is a difference of two affinities."""
    models, checkpoints = both(name, tmp_path)
    directions, n = named(3), 3
    near, apart = (attention_pass(checkpoints[0], directions, checkpoints[1], random=100, distance=d) for d in (0, 1))
    rows = unit_rows(directions)[0].double() * 8
    rows = torch.cat([rows, -rows])
    texts = torch.stack([torch.stack([b, a]) for a in rows[:n] for b in rows])
    ids = torch.zeros(texts.shape[:2], dtype=torch.long)
    for layer in range(4):
        real = []
        for model in models:
            with given(model, layer, texts):
                weights = model(ids, output_attentions=True).attentions[layer][:, :, 1].log()
            real.append((weights[..., 0] - weights[..., 1]).view(n, 2 * n, -1).numpy())  # [a, b, head]
        for prefix, expected in (("", real[0]), ("change_", real[1] - real[0])):
            column = "affinity" if prefix == "" else "change"
            found = grid(apart, layer, column) - np.diag(grid(near, layer, column))[:, None]
            np.testing.assert_allclose(found, expected[:, :n].sum(2), rtol=1e-4, atol=1e-4)
            for head in range(expected.shape[2]):
                by_head = heads(apart, layer, f"{prefix}self", head) - heads(near, layer, f"{prefix}self", head)
                np.testing.assert_allclose(by_head, np.diag(expected[:, :n, head]), rtol=1e-4, atol=1e-4)
        for head in range(real[0].shape[2]):
            mirrored = heads(apart, layer, "opposite", head) - heads(near, layer, "self", head)
            np.testing.assert_allclose(mirrored, np.diag(real[0][:, n:, head]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(heads(near, layer, "self"), np.diag(grid(near, layer)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_what_is_written_equals_the_real_modules(name: str, tmp_path: Path) -> None:
    """A token alone looks at itself with all its heads."""
    models, checkpoints = both(name, tmp_path)
    directions, n = named(2), 2
    found = attention_pass(checkpoints[0], directions, checkpoints[1], random=100)
    units = unit_rows(directions)[0].double()
    units = torch.cat([units, -units])
    for number in range(4):
        added, by_head = [], []
        for model in models:
            layer = model.model.layers[number]
            with given(model, number, 8 * units[:, None]), watching(layer.self_attn.o_proj, addend(layer)) as seen:
                model(torch.zeros(2 * n, 1, dtype=torch.long))
            added.append(seen[1][1][:, 0])
            by_head.append(heads_alone(layer, seen[0][0][:, 0]))
        table = found.tables["written"].filter(found.tables["written"]["layer"].to_numpy() == number)
        a, b = added
        parallel = (a * units).sum(1)
        expected = {
            "norm": a.norm(dim=1),
            "parallel": parallel,
            "orthogonal": (a - parallel[:, None] * units).norm(dim=1),
            "cosine": parallel / a.norm(dim=1),
            "change": (b - a).norm(dim=1),
            "turn": 1 - (a * b).sum(1) / a.norm(dim=1) / b.norm(dim=1),
            "change_parallel": ((b - a) * units).sum(1),
        }
        for measure, values in expected.items():
            np.testing.assert_allclose(table[measure].to_numpy(), values, rtol=1e-4, atol=1e-4, err_msg=measure)
        for head, parts in enumerate(zip(*by_head, strict=True)):
            at = ALL if head == len(by_head[0]) - 1 else head
            write, length = ([measure(part[:n]) for part in parts] for measure in (
                lambda part: (part * units[:n]).sum(1), lambda part: part.norm(dim=1)))  # fmt: skip
            for measure, (before, after) in (("write", write), ("write_norm", length)):
                np.testing.assert_allclose(heads(found, number, measure, at), before, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(
                    heads(found, number, f"change_{measure}", at), after - before, rtol=1e-4, atol=1e-4
                )


def addend(layer: nn.Module) -> nn.Module:
    """Whose output is added to the stream."""
    return layer.post_attention_layernorm if hasattr(layer, "pre_feedforward_layernorm") else layer.self_attn


def heads_alone(layer: nn.Module, mixed: torch.Tensor) -> list[torch.Tensor]:
    """What the real projection writes for each head alone, without its bias, and for all of them."""
    project, size = layer.self_attn.o_proj, layer.self_attn.head_dim
    found = []
    for start in range(0, mixed.shape[1], size):
        alone = torch.zeros_like(mixed)
        alone[:, start : start + size] = mixed[:, start : start + size]
        found.append(project(alone) - project(torch.zeros_like(mixed)))
    return [*found, project(mixed)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("distance", [0, 5])
def test_opposites_look_at_opposites_as_the_directions_do(name: str, distance: int, tmp_path: Path) -> None:
    """QK(−v, −w) = QK(v, w) and QK(v, −v) = −QK(v, v): exactly where nothing has a bias, and not where q and k have."""
    checkpoint, directions = Checkpoint(saved(family(name), tmp_path)), named(4)
    plain, mirrored = (
        attention_pass(checkpoint, one, random=100, distance=distance) for one in (directions, negated(directions))
    )
    for layer in range(4):
        same = np.allclose(grid(plain, layer), grid(mirrored, layer), rtol=1e-5, atol=1e-4)
        turned = np.allclose(heads(plain, layer, "self"), -heads(plain, layer, "opposite"), rtol=1e-5, atol=1e-4)
        assert (same, turned) == ((name in UNBIASED,) * 2)


def test_a_planted_look_is_found_at_its_layer_and_head(tmp_path: Path) -> None:
    """Head 2 of layer 1 learns to look from d0 at d3; its key head serves head 3, whose queries did not change."""
    base, directions = family("llama"), named(8)
    tuned, rows = copy.deepcopy(base), unit_rows(directions)[0] * 8
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
    tuned, rows = copy.deepcopy(base), unit_rows(directions)[0] * 8
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


def joined(*parts: Directions) -> Directions:
    names = tuple(f"d{i}" for i in range(sum(len(part.names) for part in parts)))
    return Directions(names, ("",) * len(names), (None,), np.concatenate([part.rows for part in parts], axis=1))


def test_given_directions_are_a_second_baseline_on_both_sides(tmp_path: Path) -> None:
    """z of a pair among given keys and given queries, from the affinities of all of them."""
    checkpoint = Checkpoint(saved(family("llama"), tmp_path))
    directions, against = named(3), named(9, seed=8)
    found = attention_pass(checkpoint, directions, random=100, distance=1, against=against)
    assert found.about["against"] == 9
    whole = joined(directions, against, negated(against))
    every = attention_pass(checkpoint, whole, random=100, distance=1)
    for layer in range(4):
        grids = grid(every, layer)
        keys, queries = grids[:3, 3:], grids[3:, :3]
        by_key = (grids[:3, :3] - keys.mean(1)[:, None]) / keys.std(1, ddof=1)[:, None]
        by_query = (grids[:3, :3] - queries.mean(0)) / queries.std(0, ddof=1)
        expected = np.where(by_key * by_query > 0, np.sign(by_key) * np.minimum(abs(by_key), abs(by_query)), 0)
        apart = ~np.eye(3, dtype=bool)
        np.testing.assert_allclose(grid(found, layer, "against_z")[apart], expected[apart], rtol=1e-3, atol=1e-3)
        for column in ("self", "write"):
            values = torch.from_numpy(heads(every, layer, column).astype(np.float32))
            z = z_by_rank(values[:3], values[3:])
            np.testing.assert_allclose(heads(found, layer, f"against_z_{column}"), z, rtol=1e-3, atol=1e-3)
    plain = attention_pass(checkpoint, directions, random=100, distance=1)
    assert plain.tables["pairs"]["p"].equals(found.tables["pairs"]["p"]), "p stays against random directions"
    assert set(found.tables["top"]["by"].to_pylist()) == {"z", "against_z"}


def test_p_of_a_direction_with_itself_counts_random_directions(tmp_path: Path) -> None:
    """However far beyond them it lies, it is no smaller than their number allows; that of pairs is."""
    base, directions = family("llama"), named(8)
    tuned, row = copy.deepcopy(base), unit_rows(directions)[0, 3] * 8
    layer = tuned.model.layers[1].self_attn
    with torch.no_grad():
        key = tuned.model.layers[1].input_layernorm(row)
        for part in (layer.q_proj.weight, layer.k_proj.weight):
            part[: layer.head_dim] += 8 * torch.outer(torch.ones(layer.head_dim), key / key.norm())
    checkpoints = Checkpoint(saved(base, tmp_path / "a")), Checkpoint(saved(tuned, tmp_path / "b"))
    result = attention_pass(checkpoints[0], directions, checkpoints[1], random=999)
    found = result.tables["pairs"].to_pylist()
    (own,) = [row for row in found if (row["layer"], row["query"], row["key"]) == (1, "d3", "d3")]
    assert own["z_change"] > 10
    selves = [row for row in found if row["query"] == row["key"]]
    assert own["p_change"] == pytest.approx(2 / 1000 * len(selves), rel=1e-6), "Benjamini-Hochberg over 32 of them"
    assert all(row["p_change"] >= own["p_change"] for row in selves)
    enough = attention_pass(checkpoints[0], directions, checkpoints[1], random=40 * len(selves))
    again = enough.tables["pairs"].to_pylist()
    assert [row["p_change"] < 0.05 for row in again if (row["layer"], row["query"], row["key"]) == (1, "d3", "d3")] == [
        True
    ]


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
    assert found.tables["pairs"]["p"].to_numpy().min() > 0.05, "no pair of random directions is a finding"


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
